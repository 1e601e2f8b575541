def main():
    try:
        train()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
