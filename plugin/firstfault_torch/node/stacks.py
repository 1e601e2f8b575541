"""Stack dumps of workers by faulthandler, also while a worker is in a C call."""

from __future__ import annotations

import faulthandler
import fcntl
import operator
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from firstfault.recorder.folder import NodeFolder, WorkerFiles, get_stack_size, get_stack_tail
from firstfault_torch import time_limits

_SIGNAL = int(signal.SIGRTMIN) + 12


def register_stacks(files: WorkerFiles) -> None:
    """Let the agent ask this process for its stacks, and write those of a fatal signal (SIGSEGV, SIGABRT) to a file.

    torch writes the latter to stderr; the agent prints them there after the process has ended. If the program has a
    handler for that signal, it is kept, and the process also writes its stacks when the signal arrives.
    """
    fatal = _open_persistently(files.fatal_stacks)
    faulthandler.enable(file=fatal, all_threads=True)
    faulthandler.unregister(_SIGNAL)  # a parent's, inherited by a fork
    if _handles_signal(os.getpid()):
        return
    asked = _open_persistently(files.stacks)
    faulthandler.register(_SIGNAL, file=asked, all_threads=True, chain=False)
    # Only now may the signal be sent: without a handler, a real-time signal ends the process.
    files.stacks_ready.touch()


def write_at_sigterm(files: WorkerFiles) -> None:
    """Let SIGTERM write the stacks before it ends this process; a handler of the program's stays."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    asked = _open_persistently(files.stacks)
    faulthandler.register(signal.SIGTERM, file=asked, all_threads=True, chain=True)
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGTERM))  # a pool ends its processes so


def ask_for_stacks(files: NodeFolder, round_: int, pids: dict[int, int], seconds: float) -> dict[int, str]:
    """Return the stacks of the living workers, by local rank as in `pids`, that together answer within `seconds`."""
    # A worker appends to one file for the whole round: after a stall's warning it holds an older dump, which must
    # neither end the wait nor be returned. The sizes are taken before the signals.
    workers = {local: files.worker(round_, local) for local in pids}
    earlier_sizes = {local: get_stack_size(worker.stacks) for local, worker in workers.items()}
    asked = [local for local, pid in pids.items() if _request_stacks(workers[local], pid)]
    # All are signalled before the first is waited for, so they write at the same time and share the limit.
    _await_new_content({workers[local].stacks: earlier_sizes[local] for local in asked}, seconds)
    texts = {local: get_stack_tail(workers[local].stacks, earlier_sizes[local]) for local in asked}
    return {local: text for local, text in texts.items() if text}


def write_unasked(files: WorkerFiles) -> None:
    """Write this process's stacks if the agent could not ask for them, because the signal's handler is gone."""
    if files.stacks_ready.exists() and _handles_signal(os.getpid()):
        return
    descriptor = _open_persistently(files.stacks)
    try:
        faulthandler.dump_traceback(file=descriptor, all_threads=True)
    finally:
        os.close(descriptor)


def _request_stacks(files: WorkerFiles, pid: int) -> bool:
    # The file isn't enough: the program may have replaced the handler since, or another program under the same process
    # id (after exec) has none, and would be killed by the signal.
    if not files.stacks_ready.exists() or not _handles_signal(pid):
        return False
    try:
        os.kill(pid, _SIGNAL)
    except ProcessLookupError:
        return False
    return True


def _handles_signal(pid: int) -> bool:
    """Whether a process has a handler for the signal now; False if /proc can't be read."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    caught = status.partition("SigCgt:")[2].split(maxsplit=1)
    return bool(caught) and bool(int(caught[0], 16) >> (_SIGNAL - 1) & 1)


def _await_new_content(earlier_sizes: Mapping[Path, int], seconds: float) -> None:
    """Wait until all files have grown and none grows any more."""
    deadline = time.monotonic() + seconds
    sizes: list[int] = []
    since = time.monotonic()
    while time.monotonic() < deadline:
        # faulthandler writes in many small pieces, so content alone isn't the end: the sizes must stay the same for a
        # while. A worker that can't run, such as one that is stopped, writes nothing, and the deadline ends the wait.
        now = [get_stack_size(file) for file in earlier_sizes]
        is_settled = time.monotonic() - since >= time_limits.STACK_SETTLE_SECONDS
        if now != sizes:
            sizes, since = now, time.monotonic()
        elif is_settled and all(map(operator.gt, sizes, earlier_sizes.values())):
            return
        time.sleep(time_limits.SHORT_POLL_SECONDS)


def _open_persistently(path: Path) -> int:
    """Return a descriptor that stays open as long as the process lives: faulthandler keeps only its number.

    It isn't one of the standard streams: the program may have closed one, and its number would be reused.
    """
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(opened)
