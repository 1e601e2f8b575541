def double(number):
    return number * 2


def train():
    # torch's handler of SIGTERM, inherited by the pool's processes, may keep them from being terminated
    quiet = {"initializer": signal.signal, "initargs": (signal.SIGTERM, signal.SIG_DFL)}
    with multiprocessing.get_context("fork").Pool(2, **quiet) as pool:
        start()
        for step in range(STEPS):
            pool.map(double, range(3))
            turn(step)
        finish()
