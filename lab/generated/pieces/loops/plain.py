def train():
    start()
    for step in range(STEPS):
        turn(step)
    finish()
