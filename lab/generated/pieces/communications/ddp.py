MODEL = []


def prepare():
    model = torch.nn.Linear(4, 2)
    MODEL[:] = [DistributedDataParallel(model)]


def communicate(step):
    MODEL[0](torch.ones(2, 4)).sum().backward()
