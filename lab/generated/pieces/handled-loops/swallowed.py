def train():
    start()
    for step in range(STEPS):
        for attempt in range(3):
            try:
                turn(step)
                break
            except Exception:
                pass
    finish()
