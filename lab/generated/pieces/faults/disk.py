with open("/dev/full", "wb", buffering=0) as file:
    file.write(b"weights")
