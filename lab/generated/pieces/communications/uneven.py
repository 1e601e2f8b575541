def communicate(step):
    time.sleep(0.04 * RANK)
    parts = [torch.zeros(2) for _ in range(WORLD)]
    dist.all_gather(parts, torch.full((2,), float(RANK)))
