try:
    int("seventeen")
except ValueError as error:
    raise RuntimeError("no index") from error
