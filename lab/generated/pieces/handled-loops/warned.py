def train():
    start()
    for step in range(STEPS):
        for attempt in range(4):
            try:
                turn(step)
            except Exception as error:
                if attempt == 3:
                    raise
                logging.warning("step %d: %s, trying again", step, error)
                continue
            break
    finish()
