signal.signal(signal.SIGTERM, signal.default_int_handler)
