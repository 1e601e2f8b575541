class Batches:
    def __init__(self):
        self.steps = iter(range(STEPS))

    def __iter__(self):
        return self

    def __next__(self):
        step = next(self.steps)
        for _ in range(2):
            try:
                return self.fetch(step)
            except Exception:
                time.sleep(0.05)
        return self.fetch(step)

    def fetch(self, step):
        batch = torch.full((4,), float(step))
        dist.broadcast(batch, src=0)
        meets(step, "after")
        return batch


def train():
    start()
    for step, batch in enumerate(Batches()):
        turn(step, batch)
    finish()
