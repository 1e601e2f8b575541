try:
    {}["optimizer"]
except KeyError:
    traceback.print_exc()
    os._exit(1)
