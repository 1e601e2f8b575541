class Session:
    def __enter__(self):
        start()
        return self

    def __exit__(self, *exc):
        time.sleep(0.3)  # sends its last metrics


def train():
    with Session():
        for step in range(STEPS):
            turn(step)
        finish()
