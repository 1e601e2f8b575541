"""Stack dumps of workers by faulthandler, also while a worker is in a C call."""

from __future__ import annotations

import faulthandler
import operator
import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from firstfault.recorder.folder import NodeFolder, WorkerFiles, get_stack_size, get_stack_tail
from firstfault_torch import time_limits
from firstfault_torch.descriptors import move_up
from firstfault_torch.guard import try_call

_SIGNAL = int(signal.SIGRTMIN) + 12
_offered: dict[Path, int] = {}
"""The files of this process's stacks, each with the number that faulthandler writes to."""


def register_stacks(files: WorkerFiles) -> None:
    """Let the agent ask this process for its stacks, and write those of a fatal signal (SIGSEGV,
    SIGABRT) to a file.

    torch writes the latter to stderr; the agent prints them there after the process has ended. If
    the program has a handler for that signal, it is kept, and the process also writes its stacks
    when the signal arrives.
    """
    _offered.clear()  # a parent's, inherited by a fork
    _offered[files.fatal_stacks] = fatal = _open_persistently(files.fatal_stacks)
    faulthandler.enable(file=fatal, all_threads=True)
    faulthandler.unregister(_SIGNAL)  # a parent's, as above
    if _handles_signal(os.getpid()):
        return
    _offer_stacks(files, _open_persistently(files.stacks))


def restore_stacks(files: WorkerFiles) -> None:
    """Open the files of stacks again if the program has closed them; call it from time to time.

    faulthandler's handlers are C code, and write to a number without a look at what it is: before
    the agent sends its signal, it checks the number, but a fatal signal comes unasked.
    """
    for path, number in list(_offered.items()):
        if _leads_to(f"/proc/self/fd/{number}", path):
            continue
        # The same number, if it is free: faulthandler then has a file again, and nobody else gets
        # the number.
        opened, _ = try_call(partial(_open_persistently, path, number), OSError)
        if opened is None:
            # the node's folder is gone, or the process may open no more files: perhaps the next
            # time
            continue
        _offered[path] = opened
        if opened == number:
            continue
        # The program uses the number.
        if path == files.fatal_stacks and faulthandler.is_enabled():
            faulthandler.enable(file=opened, all_threads=True)
        elif (
            path == files.stacks
            and signal.getsignal(_SIGNAL) is signal.SIG_DFL
            and _handles_signal(os.getpid())
        ):
            # Python knows no handler, and the process has one: it's still faulthandler's.
            _offer_stacks(files, opened)


def write_at_sigterm(files: WorkerFiles) -> None:
    """Let SIGTERM write the stacks before it ends this process;
    a handler of the program's stays.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    asked = _open_persistently(files.stacks)
    faulthandler.register(signal.SIGTERM, file=asked, all_threads=True, chain=True)
    # a pool ends its processes so
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGTERM))


def ask_for_stacks(
    files: NodeFolder,
    round_: int,
    pids: dict[int, int],
    seconds: float,
) -> dict[int, str]:
    """Return the stacks of the living workers, by local rank as in `pids`,
    that together answer within `seconds`.
    """
    # A worker appends to one file for the whole round: after a stall's warning it holds an older
    # dump, which must neither end the wait nor be returned. The sizes are taken before the signals.
    workers = {local: files.worker(round_, local) for local in pids}
    earlier_sizes = {local: get_stack_size(worker.stacks) for local, worker in workers.items()}
    asked = [local for local, pid in pids.items() if _request_stacks(workers[local], pid)]
    # All are signalled before the first is waited for, so they write at the same time and share the
    # limit.
    _await_new_content({workers[local].stacks: earlier_sizes[local] for local in asked}, seconds)
    texts = {local: get_stack_tail(workers[local].stacks, earlier_sizes[local]) for local in asked}
    return {local: text for local, text in texts.items() if text}


def write_unasked(files: WorkerFiles) -> None:
    """Write this process's stacks if the agent could not ask for them: see `_may_be_asked`."""
    if _may_be_asked(files, os.getpid()):
        return
    descriptor = _open_persistently(files.stacks)
    try:
        faulthandler.dump_traceback(file=descriptor, all_threads=True)
    finally:
        os.close(descriptor)


def _offer_stacks(files: WorkerFiles, number: int) -> None:
    _offered[files.stacks] = number
    faulthandler.register(_SIGNAL, file=number, all_threads=True, chain=False)
    # Only now may the signal be sent: without a handler, a real-time signal ends the process.
    files.stacks_ready.write_text(str(number), encoding="ascii")


def _request_stacks(files: WorkerFiles, pid: int) -> bool:
    # Between this check and the signal's arrival the program could still close the number and open
    # a file there. That takes microseconds, and the process is about to be ended.
    if not _may_be_asked(files, pid):
        return False
    try:
        os.kill(pid, _SIGNAL)
    except ProcessLookupError:
        return False
    return True


def _may_be_asked(files: WorkerFiles, pid: int) -> bool:
    """Whether the signal makes a process write its stacks to its file, and does nothing else.

    The program may have replaced the handler since it was offered, or may have closed the file and
    opened its own under the number. Another program under the same process id (after exec) has
    neither, and the signal would end it.
    """
    try:
        number = int(files.stacks_ready.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False
    return _handles_signal(pid) and _leads_to(f"/proc/{pid}/fd/{number}", files.stacks)


def _leads_to(descriptor: str, path: Path) -> bool:
    """Whether a descriptor's entry in /proc is the file at `path`; False if either can't be read.

    A file without a name doesn't count: once it's gone, its inode's number may be another file's.
    """
    try:
        return os.path.samestat(os.stat(descriptor), path.stat())  # noqa: PTH116 - a name in /proc
    except OSError:
        return False


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
        # faulthandler writes in many small pieces, so content alone isn't the end: the sizes must
        # stay the same for a while. A worker that can't run, such as one that is stopped, writes
        # nothing, and the deadline ends the wait.
        now = [get_stack_size(file) for file in earlier_sizes]
        is_settled = time.monotonic() - since >= time_limits.STACK_SETTLE_SECONDS
        if now != sizes:
            sizes = now
            since = time.monotonic()
        elif is_settled and all(map(operator.gt, sizes, earlier_sizes.values())):
            return
        time.sleep(time_limits.STACK_POLL_SECONDS)


def _open_persistently(path: Path, number: int | None = None) -> int:
    """Return a descriptor that stays open as long as the process lives:
    faulthandler keeps only its number.

    It is a high one, because the program may close it, and its next files get the lowest free
    numbers. Or it is `number`, if that's free, or the next free one.
    """
    return move_up(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), number
    )
