def main():
    try:
        train()
    except Exception:
        raise TrainingError("training failed") from None
