"""Helper processes of a rank that inherit none of its files: the monitor process,
and the host of the ranks' store.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from firstfault_inprocess.exception import InternalError
from firstfault_torch.guard import retry_shortage, try_call
from firstfault_torch.time_limits import (
    DETACHED_POLL_SECONDS,
    MONITOR_START_TIMEOUT_SECONDS,
    RESOURCE_SHORTAGE_TIMEOUT_SECONDS,
)

_HELPER_NAME = "ff-inprocess"
"""How the kernel calls a helper: the name of its main thread,
which stays readable while it's a zombie.
"""


def start_detached(
    begin: Callable[[], None],
    run: Callable[[], None],
    name: str,
    logfile: str | None,
) -> None:
    """Run `begin`, then `run` in a grandchild that has none of this process's files;
    return after `begin`.

    Raises:
        firstfault_inprocess.exception.InternalError: `begin` raised.
        OSError: for a while, the system allowed no further process.
    """
    ours, its = socket.socketpair()
    with ours, its:
        # Double fork: the middle process ends at once, so the helper becomes a child of init or of
        # a subreaper. The program can't reap it by waiting for any child, and gets no SIGCHLD at
        # its end.
        middle = _fork()
        if middle == 0:
            try_call(lambda: _run_detached(begin, run, its, logfile))
            os._exit(0)  # nothing may run the worker's handlers at exit
        # Without our copy, recv() returns an empty answer as soon as the helper has ended without
        # one.
        its.close()
        ours.settimeout(MONITOR_START_TIMEOUT_SECONDS)
        answer = b""
        with contextlib.suppress(TimeoutError):
            while more := ours.recv(4096):
                answer += more
        # After the answer: a middle process that hangs, on a lock that a thread of this process
        # held at the fork, must not keep the worker waiting.
        _reap(middle)
    if answer != b"ok":
        raise InternalError(
            f"{name} didn't start: {answer.decode(errors='replace') or 'it does not answer'}"
        )


def _reap(child: int) -> None:
    """Reap a child, which has ended or is about to; kill it if it stays."""
    deadline = time.monotonic() + MONITOR_START_TIMEOUT_SECONDS
    # no child: the program ignores SIGCHLD, or has a handler that waits for all
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)  # the number is still its own: nothing has reaped it
                os.waitpid(child, 0)
                return
            time.sleep(DETACHED_POLL_SECONDS)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork while threads run; the child uses nothing that they may have
        # locked
        warnings.simplefilter("ignore", DeprecationWarning)
        # A machine that is out of processes for a moment must not keep the function from being
        # called.
        return retry_shortage(os.fork, RESOURCE_SHORTAGE_TIMEOUT_SECONDS)


def _run_detached(
    begin: Callable[[], None],
    run: Callable[[], None],
    answer: socket.socket,
    logfile: str | None,
) -> None:
    # Its own session: a signal to the worker's process group, such as Ctrl-C, doesn't reach the
    # helper.
    os.setsid()
    if _fork() > 0:
        return
    # The program's handlers were inherited, and would run its code here; so was asyncio's
    # descriptor for wake-ups.
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGCHLD,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)

    def prepare() -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(_HELPER_NAME, encoding="ascii")
        _redirect_output(logfile)
        close_files(keep=answer.fileno())
        begin()

    _, error = try_call(prepare, Exception)
    if error is not None:
        answer.sendall(f"{type(error).__name__}: {error}".encode())
        return
    # After `begin`: the worker continues only when the helper watches it, or the store listens.
    answer.sendall(b"ok")
    answer.close()
    log_error(try_call(run)[1])


def log_error(error: BaseException | None) -> None:
    """Write an exception to such a process's log."""
    if error is not None:
        log_line("".join(traceback.format_exception(error)).rstrip())


def log_line(text: str) -> None:
    """Write a text to such a process's log."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _redirect_output(logfile: str | None) -> None:
    log = os.open(logfile or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def close_files(keep: int = -1) -> None:
    """Close everything that was inherited: an open end of a pipe would hide the
    worker's death from its agent.
    """
    # As a list: descriptors are closed in the loop. The listing's own is in it, and closed already.
    for number in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number != keep:  # noqa: PLR2004 - stdin, stdout, stderr
            with contextlib.suppress(OSError):
                os.close(number)


def reap_adopted_helpers() -> None:
    """Reap ended helpers that this process has adopted, as the first process of a container.

    Elsewhere init does that. No other child is touched: its parent's code waits for it.
    """
    if os.getpid() != 1:
        return
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError, ValueError):
            for pid in map(int, children.read_text(encoding="ascii").split()):
                if f"({_HELPER_NAME})" in Path(f"/proc/{pid}/stat").read_text(
                    encoding="ascii", errors="replace"
                ):
                    os.waitpid(pid, os.WNOHANG)


class DetachedProcess:
    """A process that isn't necessarily a child, and that can be waited for and signalled.

    Process ids are used again, so `started`, the start time, is needed to identify the process. It
    is read now if `started` is None.
    """

    def __init__(self, number: int, started: int | None = None) -> None:
        self.number = number
        self.started = read_start_time(number) if started is None else started
        self._has_ended = not self.started
        self._descriptor: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, or a sandbox
            self._descriptor = os.pidfd_open(number)
            # If the number already belongs to another process, this descriptor is that one's.
            # Checked after it was opened: if the process is there now, it was there at that time,
            # too.
            try:
                self._has_ended = read_start_time(number) != self.started
            except OSError:
                self.close()

    def await_death(self, seconds: float) -> bool:
        """Wait at most this many seconds for its end; return whether it has ended."""
        if self._has_ended:
            return (
                True  # it had ended before it could be looked up, so there is nothing to wait for
            )
        # The kernel makes a pidfd readable when the process ends, even before its parent has reaped
        # it.
        if self._descriptor is not None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            self._has_ended = bool(poll.poll(seconds * 1000))
            return self._has_ended
        deadline = time.monotonic() + seconds
        while not self._look_for_death() and (remaining_seconds := deadline - time.monotonic()) > 0:
            time.sleep(min(remaining_seconds, DETACHED_POLL_SECONDS))
        return self._has_ended

    def send(self, number: int) -> None:
        """Send the process a signal unless it has ended, because its id may be reused by now."""
        if self.await_death(0):
            return
        if self._descriptor is not None:
            try:
                signal.pidfd_send_signal(self._descriptor, number)
            except ProcessLookupError:
                return
            except OSError:  # a sandbox that allows to open such a descriptor, but not this
                pass
            else:
                return
        # Without a free descriptor neither can be opened: what isn't proven to be that process gets
        # no signal.
        with contextlib.suppress(OSError):
            if read_start_time(self.number) == self.started:
                os.kill(self.number, number)

    def _look_for_death(self) -> bool:
        # If its start time can't be read, it counts as there: only what is proven dead may be
        # reported or reaped.
        with contextlib.suppress(OSError):
            self._has_ended = read_start_time(self.number) != self.started
        return self._has_ended

    def close(self) -> None:
        """Close the descriptor. No other method may be called afterwards."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_start_time(process: int) -> int:
    """Return when a process started, in clock ticks since boot, or 0 if it has ended.

    Raises:
        OSError: the time can't be read, for example because the descriptors are used up. That
            proves nothing about the process.
    """
    try:
        # proc(5): the name in parentheses may contain spaces and parentheses, so count from the
        # last one. A zombie has ended; field 22 is the start time.
        state, *fields = (
            Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        )
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if state in "ZX" else int(fields[18])
