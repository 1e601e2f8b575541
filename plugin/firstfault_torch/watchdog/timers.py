"""Timers on their way from a worker to its agent: lines of JSON in a FIFO.

The lines are those of torch's FileTimer with fields of our own, so that torch's FileTimerClient may
write into the same FIFO. torch's deadlines are times of the wall clock, which may jump; ours are
times of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import json
import math
import select
import signal
import time
from dataclasses import dataclass
from typing import Any

from firstfault.utils.text import parse_json

TIMERS_VARIABLE = "FIRSTFAULT_TIMERS"
"""Path of the FIFO; the agent sets it in its workers if the watchdog is on."""
HEARTBEAT_VARIABLE = "FIRSTFAULT_HEARTBEAT"
"""Longest time between two pings, seconds; if empty, pings set no deadline."""
TORCH_FILE_VARIABLE = "TORCHELASTIC_TIMER_FILE"
"""The same path, for torch's FileTimerClient. In the agent's own environment it names
the path for the FIFO.
"""
TORCH_ENABLED_VARIABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
"""With the value 1 torch's agent starts torch's FileTimerServer, which kills the agent too."""
MAX_SCOPE = 200
"""Characters of a name. A line fits into one write to a FIFO,
which is never mixed with another process's.
"""


@dataclass(frozen=True, slots=True)
class Timer:
    """One deadline of a process, or its release."""

    pid: int
    number: str
    """Identifies it within the process."""
    scope: str
    """The name that the program gave to it; empty for the heartbeat."""
    deadline: float | None
    """Seconds of CLOCK_MONOTONIC, or None if the timer is released."""
    seconds: float = 0.0
    """From its beginning to its deadline."""
    since: str = ""
    """Where it began: "train.py:50"."""
    heartbeat: bool = False
    kills: bool = True
    """Whether the process is killed at the deadline; torch's clients may ask for a log line only.
    """


def build_line(timer: Timer) -> bytes:
    """Return a timer as one line; torch's FileTimerServer reads it too."""
    left = timer.deadline - time.monotonic() if timer.deadline is not None else 0.0
    fields: dict[str, Any] = {
        "version": 1,
        "pid": timer.pid,
        "scope_id": timer.scope or "heartbeat",
        "expiration_time": time.time() + left if timer.deadline is not None else -1,
        "signal": int(signal.SIGKILL) if timer.deadline is not None else 0,
        "number": timer.number,
        "deadline": timer.deadline,
        "seconds": timer.seconds,
        "since": timer.since[-MAX_SCOPE:],
        "heartbeat": timer.heartbeat,
    }
    line = json.dumps(fields).encode() + b"\n"
    if len(line) > select.PIPE_BUF:  # a name of characters that JSON escapes
        line = json.dumps({**fields, "scope_id": ascii(timer.scope)[:MAX_SCOPE]}).encode() + b"\n"
    return line


def parse_line(line: bytes) -> Timer:
    """Return the timer that a client wrote; a deadline of torch's client is
    converted from the wall clock.

    Raises:
        ValueError: it isn't such a line.
    """
    try:
        fields = parse_json(line)
        pid = int(fields["pid"])
        scope = str(fields["scope_id"])
        expires = float(fields["expiration_time"])
        if "number" not in fields:
            left = expires - time.time()
            deadline = time.monotonic() + left if expires >= 0 else None
            return Timer(
                pid,
                f"torch:{scope}",
                scope,
                deadline,
                max(left, 0.0),
                kills=int(fields["signal"]) > 0,
            )
        deadline = None if fields["deadline"] is None else float(fields["deadline"])
        if deadline is not None and not math.isfinite(deadline):
            raise ValueError("its deadline is not a time")
        number = str(fields["number"])
        seconds = float(fields["seconds"])
        since = str(fields["since"])
        heartbeat = bool(fields["heartbeat"])
        return Timer(pid, number, "" if heartbeat else scope, deadline, seconds, since, heartbeat)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a timer: {line[:200]!r}") from error
