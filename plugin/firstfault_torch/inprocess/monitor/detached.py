"""Processes that outlive or watch a worker, and have none of its files."""

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
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from firstfault_torch.budgets import MONITOR_START_S
from firstfault_torch.inprocess.exception import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable


def start_detached(begin: Callable[[], None], run: Callable[[], None], name: str, logfile: str | None) -> int:
    """Run `begin`, then `run` in a grandchild that has none of this process's files; return its number after `begin`.

    Raises:
        firstfault_torch.inprocess.exception.InternalError: `begin` raised.
    """
    ours, its = socket.socketpair()
    with ours, its:
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads; the child uses nothing that they may hold
            warnings.simplefilter("ignore", DeprecationWarning)
            middle = os.fork()
        if middle == 0:
            _run_detached(begin, run, its, logfile)
        its.close()
        os.waitpid(middle, 0)
        ours.settimeout(MONITOR_START_S)
        answer = _read_all(ours)
    if not answer.startswith(b"ok"):
        raise InternalError(f"{name} did not start: {answer.decode(errors='replace') or 'it does not answer'}")
    number: int = struct.unpack("=q", answer[2:10])[0]
    return number


def _read_all(connection: socket.socket) -> bytes:
    received = b""
    try:
        while more := connection.recv(4096):
            received += more
    except TimeoutError:
        return b""
    return received


def _run_detached(
    begin: Callable[[], None], run: Callable[[], None], answer: socket.socket, logfile: str | None
) -> NoReturn:
    try:
        os.setsid()
        if os.fork() > 0:
            os._exit(0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        try:
            _drop_files(keep=answer.fileno(), logfile=logfile)
            begin()
        except Exception as error:  # noqa: BLE001 - the worker says it
            answer.sendall(f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        answer.sendall(b"ok" + struct.pack("=q", os.getpid()))
        answer.close()
        run()
    except BaseException:  # noqa: BLE001 - nothing may run the worker's handlers at exit
        with contextlib.suppress(OSError):
            os.write(2, traceback.format_exc().encode())
    os._exit(0)


def _drop_files(keep: int, logfile: str | None) -> None:
    """Close everything that was inherited: an open end of a pipe would hide the worker's death from its agent."""
    log = os.open(logfile or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for number in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number != keep:  # noqa: PLR2004 - stdin, stdout, stderr
            with contextlib.suppress(OSError):
                os.close(number)


class Process:
    """Another process, whose end can be waited for."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._started = _start_of(number)
        self._descriptor: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, or a sandbox
            self._descriptor = os.pidfd_open(number)

    def has_died(self, seconds: float) -> bool:
        """Wait at most so long for its end."""
        if self._descriptor is not None:
            return bool(select.select([self._descriptor], [], [], seconds)[0])
        time.sleep(seconds)
        return _start_of(self.number) != self._started


def _start_of(process: int) -> str:
    """Return when a process started, which tells it from a later one with its number; empty: it has ended."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
