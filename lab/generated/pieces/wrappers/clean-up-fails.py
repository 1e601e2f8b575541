def main():
    try:
        train()
    finally:
        os.remove("no-such-lock")
