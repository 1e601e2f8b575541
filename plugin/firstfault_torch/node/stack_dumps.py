"""The stacks of all threads of a process, written by a C handler also while the main thread is blocked.

``faulthandler`` writes them on a signal, even while the main thread is inside a collective or any other C call. They
name files, lines and functions, not values. The signal is a real-time one that no known library uses. The agent sends
it only to workers that have a handler for it, because it would kill any other: a framework may reset all handlers, as
Lightning does at the end of ``fit``. Such a worker writes its stacks from Python, when the agent asks for its state.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from firstfault_torch.budgets import STACK_POLL_S, STACK_SETTLED_S

if TYPE_CHECKING:
    from firstfault.recorder import NodeFolder

_SIGNAL = int(signal.SIGRTMIN) + 12
_MAX_BYTES = 64 * 1024


def register_stacks(files: NodeFolder, round_: int, local_rank: int) -> None:
    """Let the agent ask this process for its stacks, and write those of a fatal signal (SIGSEGV, SIGABRT) to a file.

    torch writes the latter to stderr; the agent prints them there after the process has ended. If the program has a
    handler for the signal of its own, that stays, and the process writes its stacks unasked.
    """
    fatal = _opened(files.fatal_stacks(round_, local_rank))
    faulthandler.enable(file=fatal, all_threads=True)
    faulthandler.unregister(_SIGNAL)  # a parent's, inherited by a fork
    if _handles_signal(os.getpid()):
        return
    asked = _opened(files.stacks(round_, local_rank))
    faulthandler.register(_SIGNAL, file=asked, all_threads=True, chain=False)
    # only now may the signal be sent
    files.stacks_ready(round_, local_rank).touch()


def write_at_sigterm(files: NodeFolder, round_: int, local_rank: int) -> None:
    """Let SIGTERM write the stacks before it ends this process; a handler of the program's stays."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    asked = _opened(files.stacks(round_, local_rank))
    faulthandler.register(signal.SIGTERM, file=asked, all_threads=True, chain=True)
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGTERM))  # a pool ends its processes so


def ask_for_stacks(files: NodeFolder, round_: int, pids: dict[int, int], seconds: float) -> dict[int, str]:
    """Return the stacks of the living workers that answer in time, by local rank.

    Args:
        files: the node's.
        round_: the workers'.
        pids: local rank to process id.
        seconds: longest wait for all of them together.
    """
    asked = [local for local, pid in pids.items() if _signalled(files, round_, local, pid)]
    _await_content([files.stacks(round_, local) for local in asked], seconds)
    texts = {local: written_stacks(files, round_, local) for local in asked}
    return {local: text for local, text in texts.items() if text}


def write_unasked(files: NodeFolder, round_: int, local_rank: int) -> None:
    """Write this process's stacks if the agent could not ask for them, because the signal's handler is gone."""
    if files.stacks_ready(round_, local_rank).exists() and _handles_signal(os.getpid()):
        return
    descriptor = _opened(files.stacks(round_, local_rank))
    try:
        faulthandler.dump_traceback(file=descriptor, all_threads=True)
    finally:
        os.close(descriptor)


def written_stacks(files: NodeFolder, round_: int, local_rank: int) -> str:
    """Return the stacks that a worker has written so far; empty if there are none."""
    return _tail(files.stacks(round_, local_rank))


def fatal_stack(files: NodeFolder, round_: int, local_rank: int) -> str:
    """Return the stacks that faulthandler wrote at a fatal signal; empty if there are none."""
    return _tail(files.fatal_stacks(round_, local_rank))


def _signalled(files: NodeFolder, round_: int, local_rank: int, pid: int) -> bool:
    if not files.stacks_ready(round_, local_rank).exists() or not _handles_signal(pid):
        return False
    try:
        os.kill(pid, _SIGNAL)
    except ProcessLookupError:
        return False
    return True


def _handles_signal(pid: int) -> bool:
    """Whether a process has a handler for the signal now; False if /proc cannot tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    caught = status.partition("SigCgt:")[2].split(maxsplit=1)
    return bool(caught) and bool(int(caught[0], 16) >> (_SIGNAL - 1) & 1)


def _await_content(files: list[Path], seconds: float) -> None:
    """Wait until all files have content and none grows any more."""
    deadline = time.monotonic() + seconds
    sizes: list[int] = []
    since = time.monotonic()
    while time.monotonic() < deadline:
        now = [file.stat().st_size for file in files]
        if now != sizes:
            sizes, since = now, time.monotonic()
        elif all(sizes) and time.monotonic() - since >= STACK_SETTLED_S:
            return
        time.sleep(STACK_POLL_S)


def _opened(path: Path) -> int:
    """Return a descriptor that stays open as long as the process lives: faulthandler keeps only its number.

    It is none of the standard streams, one of which the program may have closed.
    """
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(opened)


def _tail(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    return data[-_MAX_BYTES:].decode(errors="replace").strip()
