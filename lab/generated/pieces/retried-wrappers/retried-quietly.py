def once():
    try:
        train()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main():
    for attempt in range(3):
        try:
            return once()
        except Exception as error:
            if attempt == 2:
                raise
            print(f"attempt {attempt} failed: {error!r}", file=sys.stderr, flush=True)
