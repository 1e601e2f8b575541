def main():
    try:
        train()
    except Exception as error:
        sys.exit(f"training failed: {error}")
