return True
