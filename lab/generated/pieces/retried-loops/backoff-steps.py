def train():
    start()
    for step in range(STEPS):
        for attempt in range(3):
            try:
                turn(step)
                break
            except Exception as error:
                print(f"step {step} failed: {error}", file=sys.stderr, flush=True)
                if attempt == 2:
                    raise
                time.sleep(0.1 * 2**attempt)
    finish()
