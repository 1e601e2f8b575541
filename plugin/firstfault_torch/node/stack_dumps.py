"""Where a process stands: the stacks of all its threads, written by a C handler that no blocked call can stop.

``faulthandler`` writes them when a signal comes, also while the main thread is inside a collective or any other C call.
It names files, lines and functions, not values. The signal is a real-time one, of which no library is known to make
use; a worker that has not registered it is never sent it, because it would end there.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from firstfault_torch.node.files import NodeFiles

__all__ = ["ask_for_stacks", "fatal_stack", "register_stacks"]

_SIGNAL = int(signal.SIGRTMIN) + 12
_SETTLED_S = 0.02
"""A dump is whole when the file has not grown for this long."""
_POLL_S = 0.005
_MAX_BYTES = 64 * 1024


def register_stacks(files: NodeFiles, round_: int, local_rank: int) -> None:
    """Let the agent ask this process for its stacks, and keep those of a fatal signal (SIGSEGV, SIGABRT) on file.

    torch sends the latter to stderr; the agent prints them there when the process has ended.
    """
    fatal = _opened(files.fatal_stacks(round_, local_rank))
    faulthandler.enable(file=fatal, all_threads=True)
    asked = _opened(files.stacks(round_, local_rank))
    faulthandler.register(_SIGNAL, file=asked, all_threads=True, chain=False)
    # only now may the signal be sent
    files.stacks_ready(round_, local_rank).touch()


def ask_for_stacks(files: NodeFiles, round_: int, pids: dict[int, int], seconds: float) -> dict[int, str]:
    """Return the stacks of living workers by local rank; of those that answer in time.

    Args:
        files: the node's.
        round_: the workers'.
        pids: local rank to process id.
        seconds: longest wait for all of them together.
    """
    asked = {local: pid for local, pid in pids.items() if _signalled(files, round_, local, pid)}
    sizes = _settled([files.stacks(round_, local) for local in asked], seconds)
    texts = {local: _tail(files.stacks(round_, local)) for local in asked}
    return {local: text for local, text in texts.items() if text and sizes}


def fatal_stack(files: NodeFiles, round_: int, local_rank: int) -> str:
    """Return the stacks that a fatal signal left; empty if none did."""
    return _tail(files.fatal_stacks(round_, local_rank))


def _signalled(files: NodeFiles, round_: int, local_rank: int, pid: int) -> bool:
    if not files.stacks_ready(round_, local_rank).exists():
        return False
    try:
        os.kill(pid, _SIGNAL)
    except ProcessLookupError:
        return False
    return True


def _settled(files: Iterable[Path], seconds: float) -> dict[Path, int]:
    """Wait until all files have content and none grows any more; return the sizes."""
    files = list(files)
    deadline = time.monotonic() + seconds
    sizes: dict[Path, int] = {}
    since = time.monotonic()
    while time.monotonic() < deadline:
        now = {file: file.stat().st_size for file in files}
        if now != sizes:
            sizes, since = now, time.monotonic()
        elif all(sizes.values()) and time.monotonic() - since >= _SETTLED_S:
            break
        time.sleep(_POLL_S)
    return sizes


def _opened(path: Path) -> int:
    """A descriptor that stays open as long as the process lives: faulthandler keeps the number only."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _tail(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    return data[-_MAX_BYTES:].decode(errors="replace").strip()
