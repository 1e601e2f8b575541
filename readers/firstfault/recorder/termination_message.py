"""The termination message of a container: ``kubectl describe pod`` shows it after
the container has ended.

It needs no storage, and it is all that is left of a container that the kernel killed for its
memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from firstfault.recorder.folder import NodeFolder
from firstfault.recorder.orphans import find_orphans

VARIABLE = "FIRSTFAULT_TERMINATION_LOG"
_DEFAULT_FILE = Path("/dev/termination-log")
_OWN_PREFIX = "firstfault: "
WARNING = "memory at "
"""How a warning begins."""
_MAX_BYTES = 4096
"""Kubernetes's limit."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def find_file() -> Path | None:
    """Return the file of the message; None outside of a container that has one."""
    configured = os.environ.get(VARIABLE, "")
    path = Path(configured) if configured else _DEFAULT_FILE
    # Kubernetes makes its file: elsewhere, such a file in /dev would be litter
    return path if configured or path.is_file() else None


def write_termination_message(text: str, *, replaces: str = "") -> None:
    """Write the message; never raises.

    Args:
        text: the message, cut off at Kubernetes's limit, or empty for no message.
        replaces: how a message of firstfault begins that may be replaced. The program's own
            messages stay.
    """
    path = find_file()
    data = f"{_OWN_PREFIX}{text}".encode(errors="replace")[:_MAX_BYTES] if text else b""
    if path is None:
        return
    with contextlib.suppress(OSError), path.open("a+b") as file:
        # When workers die, memory drops: the recorder clears its warning while the agent may write
        # the verdict. Without the lock, the recorder could read the warning and then clear the
        # verdict.
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        current = file.read()
        if not current or current.startswith(f"{_OWN_PREFIX}{replaces}".encode(errors="replace")):
            file.truncate(0)
            file.write(data.decode(errors="ignore").encode())


def describe_memory(used_bytes: int, limit_bytes: int, folder: NodeFolder, agent_pid: int) -> str:
    """Return "memory at 97 % of 80.0 GiB, rank 3 largest (31.2 GiB)",
    with the largest process of a node's workers.
    """
    sessions = folder.sessions
    with contextlib.suppress(OSError):
        sessions |= {os.getsid(agent_pid)}
    largest = max(
        ((_read_resident_bytes(pid), pid) for pid in find_orphans(folder.path, sessions)),
        default=None,
    )
    text = f"{WARNING}{used_bytes * 100 // limit_bytes} % of {limit_bytes / 2**30:.1f} GiB"
    return (
        f"{text}, {_name(largest[1])} largest ({largest[0] / 2**30:.1f} GiB)" if largest else text
    )


def _read_resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    return 0  # it has just ended


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"RANK="):
                return f"rank {variable[5:].decode(errors='replace')}"
    return f"process {pid}"
