def stopped(number, frame):
    torch.save({"rank": RANK}, f"last-{RANK}.pt")
    sys.exit(0)


signal.signal(signal.SIGTERM, stopped)
