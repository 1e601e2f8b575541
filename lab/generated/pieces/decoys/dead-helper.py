def report():
    raise ConnectionError("the metrics server is away")


threading.Thread(target=report, name="metrics").start()
