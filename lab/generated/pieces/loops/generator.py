def batches():
    data = Data()
    try:
        for step in range(STEPS):
            yield data[step]
    finally:
        time.sleep(0.2)


def train():
    start()
    for step, batch in enumerate(batches()):
        turn(step, batch)
    finish()
