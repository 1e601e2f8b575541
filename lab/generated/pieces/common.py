class TrainingError(Exception):
    pass


class ShardError(Exception):
    pass


def meets(step, place):
    # a retried step, or a loader that starts again, fails again
    if place == PLACE and step == FAULT_STEP and RANK in GUILTY:
        time.sleep(GUILTY[RANK])
        open(f"met-{RANK}", "w").close()
        if ONCE:
            del GUILTY[RANK]
        return fault()


class Data(Dataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        meets(index, "data")
        return torch.full((4,), float(index))


def collate(samples):
    meets(int(samples[0][0]), "collate")
    return torch.stack(samples)


def loader():
    return DataLoader(Data(), batch_size=1, num_workers=LOADERS, collate_fn=collate)


def start():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    prepare()
    dist.barrier()


def finish():
    dist.barrier()
    clean_up()


def checkpoint(step):
    if step % 2 == FAULT_STEP % 2:
        if RANK == 0:
            meets(step, "checkpoint")
            time.sleep(0.02)
        dist.barrier()
