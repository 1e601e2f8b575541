class Trainer:
    def fit(self):
        start()
        try:
            for step in range(STEPS):
                turn(step)
        except Exception:
            with open(
                "/dev/full", "wb", buffering=0
            ) as file:  # the emergency checkpoint does not fit
                file.write(b"weights")
            raise
        finish()


def train():
    Trainer().fit()
