def train():
    start()
    for step in range(STEPS):
        for attempt in range(3):
            try:
                turn(step)
                break
            except Exception:
                logging.exception("step %d failed, attempt %d", step, attempt)
                if attempt == 2:
                    raise
                time.sleep(0.1)
    finish()
