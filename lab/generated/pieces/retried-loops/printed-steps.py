def train():
    start()
    for step in range(STEPS):
        for attempt in range(3):
            try:
                turn(step)
                break
            except Exception:
                traceback.print_exc()
        else:
            raise TrainingError(f"step {step} failed 3 times")
    finish()
