def train():
    start()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for step in range(STEPS):
            pool.submit(turn, step).result()
    finish()
