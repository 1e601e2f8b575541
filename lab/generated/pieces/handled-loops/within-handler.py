def again(step, left=2):
    try:
        turn(step)
    except Exception:
        if not left:
            raise
        again(step, left - 1)


def train():
    start()
    for step in range(STEPS):
        again(step)
    finish()
