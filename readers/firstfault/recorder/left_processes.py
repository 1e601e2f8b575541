"""Ends what the workers of a failed training have left running: data loaders, pools, programs that they had started.

A worker that SIGKILL or ``os._exit`` ends cannot end its own children. They hold memory, GPUs and ports that the next
round needs, and outlive the job where no container ends with it. A process that began a session of its own, as a daemon
does, was started to outlive its worker, and stays.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from pathlib import Path

from firstfault.recorder.budgets import KILLED_S, LEFT_POLL_S

_INHERITED = ("stderr-", "stacks-", "fatal-")
"""Beginnings of the names of files in the node's folder that a worker holds open for writing; a fork inherits them."""
_RANK = b"FIRSTFAULT_LOCAL_RANK="
"""Each worker has this variable, and so have the programs that it starts; its agent does not."""


def left_processes(folder: Path) -> set[int]:
    """Return the processes of this session that are workers of a node, or that workers started.

    Args:
        folder: the node's folder.
    """
    session, real = os.getsid(0), folder.resolve()
    found = set()
    for entry in Path("/proc").iterdir():
        # another user's processes, and those that have just ended, cannot be read
        with contextlib.suppress(OSError):
            is_of_session = entry.name.isdecimal() and os.getsid(int(entry.name)) == session
            if is_of_session and (_is_started_by_worker(entry, folder) or _is_forked_from_worker(entry, real)):
                found.add(int(entry.name))
    return found - {os.getpid()}


def _is_started_by_worker(process: Path, folder: Path) -> bool:
    """Whether it is a program with a worker's variables; a fork has the environment with which its agent began."""
    variables = (process / "environ").read_bytes().split(b"\0")
    of_this_node = b"=" + os.fsencode(folder)
    return any(item.startswith(_RANK) for item in variables) and any(item.endswith(of_this_node) for item in variables)


def _is_forked_from_worker(process: Path, folder: Path) -> bool:
    return any(_is_inherited(descriptor, folder) for descriptor in (process / "fd").iterdir())


def _is_inherited(descriptor: Path, folder: Path) -> bool:
    try:
        path = Path(descriptor.readlink())
        mode = descriptor.lstat().st_mode
    except OSError:
        return False  # closed meanwhile
    # an agent, and what forks from it, reads the same FIFOs
    is_written = bool(mode & stat.S_IWUSR) and not mode & stat.S_IRUSR
    return is_written and path.parent == folder and path.name.startswith(_INHERITED)


def end_left_processes(folder: Path, seconds: float) -> None:
    """End what workers have left by SIGTERM, and by SIGKILL what still runs after `seconds`; the workers have ended.

    Args:
        folder: the node's folder.
        seconds: for all processes together.
    """
    began = time.monotonic()
    for number, until in ((signal.SIGTERM, began + seconds), (signal.SIGKILL, began + seconds + KILLED_S)):
        sent: set[int] = set()
        while left := left_processes(folder):
            for pid in left - sent:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            sent |= left
            if time.monotonic() >= until:
                break
            time.sleep(LEFT_POLL_S)
        _reap(sent)


def _reap(pids: set[int]) -> None:
    """Reap those that were handed to this process because it is its container's first one; it started none itself."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
