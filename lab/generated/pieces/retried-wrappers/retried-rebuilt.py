def main():
    for attempt in range(3):
        try:
            return train()
        except Exception:
            traceback.print_exc()
            if dist.is_initialized():
                dist.destroy_process_group()
            if attempt == 2:
                raise
            time.sleep(0.1 * 2**attempt)
