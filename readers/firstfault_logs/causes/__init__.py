"""Which of the errors in an attempt's logs ended its processes,
and which process each one is about.
"""
