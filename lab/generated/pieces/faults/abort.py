os.abort()
