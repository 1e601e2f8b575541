"""Finds the processes of a job, in its sessions or by a variable that they have inherited,
and ends them.
"""

import contextlib
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

LEFTOVER_TIMEOUT_S = 30.0
"""How long a process may outlive its agent."""


@dataclass(frozen=True)
class Process:
    """A process of this machine, as in proc(5)."""

    state: str
    parent: int
    session: int
    command: str
    environment: dict[str, str]


def read_processes() -> dict[int, Process]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ValueError):  # it has just ended
            state, parent, _, session, *_ = _text(folder / "stat").rpartition(")")[2].split()
            command = _text(folder / "cmdline").replace("\0", " ").strip()
            variables = dict(
                item.partition("=")[::2] for item in _text(folder / "environ").split("\0")
            )
            found[int(folder.name)] = Process(state, int(parent), int(session), command, variables)
    return found


def find_running_processes(
    sessions: Collection[int | None] = (), variable: str = ""
) -> dict[int, str]:
    """Return the command lines of the processes in sessions, or with a variable,
    such as "NAME=value".
    """
    name, _, value = variable.partition("=")
    return {
        pid: process.command
        for pid, process in read_processes().items()
        if process.state != "Z"
        and (process.session in sessions or (name and process.environment.get(name) == value))
    }


def is_gone(pid: int) -> bool:
    """Whether a process has ended; it may be a zombie."""
    return _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].lstrip()[:1] in {"", "Z", "X"}


def _text(path: Path) -> str:
    """Return a file's text; empty if its process has ended, or is another user's."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def find_leftover_processes(
    sessions: Collection[int | None] = (), variable: str = ""
) -> dict[int, str]:
    """Return those that do not end soon."""
    deadline = time.monotonic() + LEFTOVER_TIMEOUT_S
    while (left := find_running_processes(sessions, variable)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def kill(pids: Collection[int]) -> None:
    """Kill processes that may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
