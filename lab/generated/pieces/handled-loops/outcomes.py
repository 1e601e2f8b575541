class Retrying:
    def __init__(self, function):
        self.function, self.outcome = function, None

    def __call__(self, *args):
        for number in range(3):
            self.outcome = concurrent.futures.Future()
            try:
                result = self.function(*args)
            except BaseException as error:
                self.outcome.set_exception(error)
                time.sleep(0.05 * 2**number)
            else:
                self.outcome.set_result(result)
                return result
        return self.outcome.result()


turn = Retrying(turn)


def train():
    start()
    for step in range(STEPS):
        turn(step)
    finish()
