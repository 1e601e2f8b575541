def main():
    try:
        train()
    except Exception as error:
        raise ExceptionGroup("training failed", [error])
