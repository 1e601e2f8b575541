fault()
