def run():
    try:
        train()
    except Exception as error:
        raise RuntimeError("the run has failed") from error


def main():
    try:
        run()
    except Exception as error:
        raise TrainingError("training failed") from error
