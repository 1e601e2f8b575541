def communicate(step):
    dist.all_reduce(torch.ones(3))
