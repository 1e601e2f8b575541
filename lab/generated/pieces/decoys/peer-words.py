logging.error("Connection closed by peer; connecting again to the metrics server")
