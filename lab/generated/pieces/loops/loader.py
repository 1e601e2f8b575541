def train():
    start()
    for step, batch in enumerate(loader()):
        turn(step, batch)
    finish()
