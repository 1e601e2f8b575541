"""Helper processes of a rank that inherit none of its files: the monitor process, and the host of the ranks' store."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from firstfault_torch.guard import try_call
from firstfault_torch.inprocess.exception import InternalError
from firstfault_torch.time_limits import MONITOR_START_TIMEOUT_SECONDS


def start_detached(begin: Callable[[], None], run: Callable[[], None], name: str, logfile: str | None) -> int:
    """Run `begin`, then `run` in a grandchild that has none of this process's files; return its number after `begin`.

    Raises:
        firstfault_torch.inprocess.exception.InternalError: `begin` raised.
    """
    ours, its = socket.socketpair()
    with ours, its:
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork while threads run; the child uses nothing that they may have locked
            warnings.simplefilter("ignore", DeprecationWarning)
            # Double fork: the middle process ends at once, so the helper becomes a child of init or of a subreaper. The
            # program can't reap it by waiting for any child, and gets no SIGCHLD at its end.
            middle = os.fork()
        if middle == 0:
            try_call(lambda: _run_detached(begin, run, its, logfile))
            os._exit(0)  # nothing may run the worker's handlers at exit
        # Without our copy, recv() returns an empty answer as soon as the helper has ended without one.
        its.close()
        with contextlib.suppress(ChildProcessError):  # the program ignores SIGCHLD, or has a handler that waits for all
            os.waitpid(middle, 0)
        ours.settimeout(MONITOR_START_TIMEOUT_SECONDS)
        answer = b""
        with contextlib.suppress(TimeoutError):
            while more := ours.recv(4096):
                answer += more
    if not answer.startswith(b"ok"):
        raise InternalError(f"{name} didn't start: {answer.decode(errors='replace') or 'it does not answer'}")
    number: int = struct.unpack("=q", answer[2:10])[0]
    return number


def _run_detached(
    begin: Callable[[], None], run: Callable[[], None], answer: socket.socket, logfile: str | None
) -> None:
    # Its own session: a signal to the worker's process group, such as Ctrl-C, doesn't reach the helper.
    os.setsid()
    if os.fork() > 0:
        return
    # The program's handlers were inherited, and would run its code here; so was asyncio's descriptor for wake-ups.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)

    def prepare() -> None:
        _drop_files(keep=answer.fileno(), logfile=logfile)
        begin()

    _, error = try_call(prepare, Exception)
    if error is not None:
        answer.sendall(f"{type(error).__name__}: {error}".encode())
        return
    # After `begin`: the worker continues only when the helper watches it, or the store listens. The pid is sent,
    # because the worker can't see the pid of a grandchild.
    answer.sendall(b"ok" + struct.pack("=q", os.getpid()))
    answer.close()
    log_error(try_call(run)[1])


def log_error(error: BaseException | None) -> None:
    """Write an exception to such a process's log."""
    if error is not None:
        with contextlib.suppress(OSError):
            os.write(2, "".join(traceback.format_exception(error)).encode())


def _drop_files(keep: int, logfile: str | None) -> None:
    """Close everything that was inherited: an open end of a pipe would hide the worker's death from its agent."""
    log = os.open(logfile or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # As a list: descriptors are closed in the loop. The listing's own is in it, and closed already.
    for number in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number != keep:  # noqa: PLR2004 - stdin, stdout, stderr
            with contextlib.suppress(OSError):
                os.close(number)


class DetachedProcess:
    """A process that isn't necessarily a child, and that can be waited for."""

    def __init__(self, number: int) -> None:
        self.number = number
        # For kernels before 5.3, which have no pidfd: pid and start time identify a process.
        self._started = _read_start_time(number)
        self._descriptor: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, or a sandbox
            self._descriptor = os.pidfd_open(number)

    def has_died(self, seconds: float) -> bool:
        """Wait at most this many seconds for its end."""
        if not self._started:
            return True  # it had ended before it could be looked up, so there is nothing to wait for
        # The kernel makes a pidfd readable when the process ends, even before its parent has reaped it.
        if self._descriptor is not None:
            return bool(select.select([self._descriptor], [], [], seconds)[0])
        time.sleep(seconds)
        return _read_start_time(self.number) != self._started


def _read_start_time(process: int) -> str:
    """Return when a process started, which identifies it although numbers are used again; empty: it has ended."""
    try:
        # proc(5): the name in parentheses may contain spaces and parentheses, so count from the last one. A zombie
        # has ended; field 22 is the start time.
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
