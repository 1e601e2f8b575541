"""From the bytes of a log to records: lines of any size, exports of log collectors,
and who printed each line.
"""
