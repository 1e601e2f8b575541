time.sleep(1.5)
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(LONG_S)
