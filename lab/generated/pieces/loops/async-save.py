def train():
    import torch.distributed.checkpoint as dcp

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            meets(saved, "save")
            return super().write_data(plan, planner)

    start()
    saved, saving, own = (
        0,
        None,
        dist.new_group(),
    )  # its collectives run concurrently with those of the steps
    for step in range(STEPS):
        turn(step)
        if step == FAULT_STEP:
            saved = step
            state = {"weights": torch.ones(4) * step}
            saving = dcp.async_save(state, storage_writer=Writer("checkpoints"), process_group=own)
    if saving is not None:
        saving.result()
    finish()
