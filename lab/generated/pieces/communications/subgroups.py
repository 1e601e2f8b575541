GROUPS = []


def prepare():
    pairs = [(0, 2), (1, 3)]
    made = [dist.new_group(pair) for pair in pairs]
    GROUPS[:] = [group for pair, group in zip(pairs, made) if RANK in pair]


def communicate(step):
    dist.all_reduce(torch.ones(3), group=GROUPS[0])
    if step % 2:
        dist.all_reduce(torch.ones(3))
