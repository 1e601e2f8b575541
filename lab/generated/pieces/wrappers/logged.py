def main():
    try:
        train()
    except Exception:
        logging.exception("training failed")
        raise
