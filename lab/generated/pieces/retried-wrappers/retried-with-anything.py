def main():
    for attempt in range(3):
        try:
            return train()
        except:
            if attempt == 2:
                raise
            logging.error("attempt %d failed", attempt, exc_info=True)
            time.sleep(0.1)
