def watch():
    try:
        raise LookupError("no heartbeat from the data server")
    except LookupError:
        logging.exception("giving up")
        os._exit(1)


threading.Thread(target=watch).start()
time.sleep(LONG_S)
