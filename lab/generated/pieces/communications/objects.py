def communicate(step):
    found = [None] * WORLD
    dist.all_gather_object(found, {"rank": RANK, "step": step})
