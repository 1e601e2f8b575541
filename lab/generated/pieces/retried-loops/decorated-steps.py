class RetryError(Exception):
    pass


def retrying(function):
    def tries(*args):
        for attempt in range(3):
            try:
                return function(*args)
            except Exception as error:
                last = error
                time.sleep(0.1)
        raise RetryError(f"{function.__name__} failed 3 times") from last

    return tries


turn = retrying(turn)


def train():
    start()
    for step in range(STEPS):
        turn(step)
    finish()
