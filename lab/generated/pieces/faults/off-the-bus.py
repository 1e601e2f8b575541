os.write(2, b"NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n")
os.abort()
