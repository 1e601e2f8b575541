time.sleep(1.5)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(LONG_S)
