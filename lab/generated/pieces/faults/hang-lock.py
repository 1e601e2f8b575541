lock = threading.Lock()
lock.acquire()
lock.acquire()
