atexit.register(lambda: print(f"rank {RANK} says good-bye", file=sys.stderr))
