try:
    open("/no/such/cache")
except OSError:
    logging.exception("no cache, going on without")
