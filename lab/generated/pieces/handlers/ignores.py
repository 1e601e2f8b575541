signal.signal(signal.SIGTERM, lambda number, frame: logging.warning("signal %d is ignored", number))
