ctypes.string_at(0)
