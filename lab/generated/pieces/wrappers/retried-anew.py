def main():
    for attempt in range(3):
        try:
            return train()
        except Exception as error:
            logging.warning("attempt %d failed: %s", attempt, error)
            last = error
            if dist.is_initialized():
                dist.destroy_process_group()
            time.sleep(0.1)
    raise RuntimeError("gave up after 3 attempts") from last
