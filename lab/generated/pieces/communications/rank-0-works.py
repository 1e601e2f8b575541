def communicate(step):
    if RANK == 0:
        time.sleep(0.1)
    weights = torch.full((3,), float(step))
    dist.broadcast(weights, src=0)
    dist.all_reduce(weights)
