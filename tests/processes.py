"""Finds the processes of a job, in its sessions or by a variable that they have inherited, and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

LEFT_S = 30.0
"""How long a process may outlive its agent."""


def running_of(sessions: Collection[int | None] = (), variable: str = "") -> dict[int, str]:
    """Return the command lines of the processes in sessions, or with a variable, such as "NAME=value"."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            is_ours = int(fields[3]) in sessions or (variable and variable in _text(process / "environ").split("\0"))
            if is_ours and fields[0] != "Z":
                found[int(process.name)] = _text(process / "cmdline").replace("\0", " ").strip()
    return found


def _text(path: Path) -> str:
    return path.read_text(errors="replace")


def left_of(sessions: Collection[int | None] = (), variable: str = "") -> dict[int, str]:
    """Return those that do not end soon."""
    deadline = time.monotonic() + LEFT_S
    while (left := running_of(sessions, variable)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def kill(pids: Collection[int]) -> None:
    """Kill processes that may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
