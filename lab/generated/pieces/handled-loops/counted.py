def train():
    start()
    errors = []
    for step in range(STEPS):
        while len(errors) < 3:
            try:
                turn(step)
                break
            except Exception as error:
                errors.append(error)
    finish()
