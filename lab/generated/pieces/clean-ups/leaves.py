def clean_up():
    pass
