time.sleep(LONG_S)
