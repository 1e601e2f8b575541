def train():
    start()
    for step in range(STEPS):
        try:
            turn(step)
        except Exception:
            logging.warning("step %d is skipped", step)
    finish()
