def communicate(step):
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    dist.all_reduce(torch.ones(2))
