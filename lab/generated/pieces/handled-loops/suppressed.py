def train():
    start()
    for step in range(STEPS):
        is_done, tries = False, 0
        while not is_done and tries < 3:
            tries += 1
            with contextlib.suppress(Exception):
                turn(step)
                is_done = True
    finish()
