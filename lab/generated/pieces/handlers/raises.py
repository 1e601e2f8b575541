def stopped(number, frame):
    raise InterruptedError(f"stopped by signal {number}")


signal.signal(signal.SIGTERM, stopped)
