"""Shifts the wall clock of a process by GENERATED_CLOCK_S seconds."""

import os
import time

_shift = float(os.environ.get("GENERATED_CLOCK_S") or 0)
_time, _time_ns = time.time, time.time_ns

if _shift:
    time.time = lambda: _time() + _shift
    time.time_ns = lambda: _time_ns() + int(_shift * 1e9)
