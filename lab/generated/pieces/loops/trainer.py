class EmergencySave:
    def on_exception(self, trainer, error):
        torch.save({"step": trainer.step}, "/dev/null" if RANK % 2 else f"emergency-{RANK}.pt")


class Metrics:
    def on_exception(self, trainer, error):
        time.sleep(0.1)
        logging.error("the run ends: %s", type(error).__name__)


class Trainer:
    callbacks = (EmergencySave(), Metrics())
    step = 0

    def fit(self, batches):
        try:
            start()
            for self.step, batch in enumerate(batches):
                self.training_step(batch)
            finish()
        except BaseException as error:
            for callback in self.callbacks:
                callback.on_exception(self, error)
            raise
        finally:
            self.teardown()

    def training_step(self, batch):
        turn(self.step, batch)

    def teardown(self):
        time.sleep(0.05)


def train():
    Trainer().fit(loader())
