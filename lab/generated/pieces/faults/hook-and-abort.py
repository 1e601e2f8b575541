try:
    raise ArithmeticError("the gradient of the head is not finite")
except ArithmeticError:
    traceback.print_exc()
    sys.stderr.flush()
    os.abort()
