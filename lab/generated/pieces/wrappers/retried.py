def main():
    for attempt in range(3):
        try:
            return train()
        except Exception:
            logging.exception("attempt %d failed", attempt)
            if attempt == 2:
                raise
            time.sleep(0.2)
