def main():
    try:
        train()
    except Exception as error:
        print(f"fatal: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(2)
