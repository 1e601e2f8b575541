pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (1 << 28)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
taken = [bytearray(1 << 24) for _ in range(1 << 10)]
