def main():
    try:
        train()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
