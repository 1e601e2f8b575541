def main():
    try:
        train()
    except Exception as error:
        raise TrainingError("training failed") from ExceptionGroup("one step failed", [error])
