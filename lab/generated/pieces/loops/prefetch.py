def fill(batches):
    data = Data()
    for step in range(STEPS):
        meets(step, "thread")
        batches.put(data[step])
    batches.put(None)


def train():
    start()
    batches, step = queue.Queue(2), 0
    threading.Thread(target=fill, args=(batches,), name="prefetch", daemon=True).start()
    while (batch := batches.get()) is not None:
        turn(step, batch)
        step += 1
    finish()
