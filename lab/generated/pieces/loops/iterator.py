def train():
    start()
    batches, step = iter(loader()), 0
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            break
        turn(step, batch)
        step += 1
    finish()
