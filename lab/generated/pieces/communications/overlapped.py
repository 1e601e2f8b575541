def communicate(step):
    parts = [torch.ones(3) for _ in range(3)]
    works = [dist.all_reduce(part, async_op=True) for part in parts]
    time.sleep(0.02)
    for work in works:
        work.wait()
