print("fatal: the license server does not answer", file=sys.stderr)
sys.exit(7)
