"""A process beside each worker that reports its death, and ends it if nothing else can interrupt it.

It is forked before the worker has connections, keeps none of its files, and lives until the worker's call is over. If
torch elastic's agent does not host the store, another such process of the first rank does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from firstfault_torch.budgets import (
    MONITOR_LINGER_S,
    MONITOR_PATIENCE_S,
    MONITOR_START_S,
    MONITOR_STORE_S,
    OUTCOME_LOOK_S,
)
from firstfault_torch.inprocess.abort import open_sockets
from firstfault_torch.inprocess.exception import InternalError
from firstfault_torch.inprocess.monitor.progress import Phase, Progress
from firstfault_torch.inprocess.store import Fault, FaultKind, Iteration, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OVER", "MonitorProcess", "Timeouts", "host_store"]

OVER = "firstfault/inprocess/over"
"""Set in a store whose first rank has ended: no further call may begin there, so it is another job's."""

_QUIET_LOOKS = 3
"""Looks without a connection after which the store's host ends."""
_ESTABLISHED = "01"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds; see `InProcessRestart`."""

    soft: float
    hard: float
    interval: float
    heartbeat_interval: float
    heartbeat: float
    grace: float


class MonitorProcess:
    """The monitor process of this worker, as the worker sees it.

    Args:
        progress: where the worker says what it does.
        initial_rank: the worker's.
        prefix: of the call in the store.
        connect: makes a connection to the store, in the monitor process.
        timeouts: when to act.
        logfile: where it logs; None: nowhere.

    Raises:
        firstfault_torch.inprocess.exception.InternalError: it does not start.
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        *,
        progress: Progress,
        initial_rank: int,
        prefix: str,
        connect: Callable[[], Any],
        timeouts: Timeouts,
        logfile: str | None = None,
    ) -> None:
        self._progress = progress
        watcher = _Watcher(os.getpid(), progress, initial_rank, prefix, connect, timeouts)
        self.pid = _start_detached(watcher.begin, watcher.watch, f"the monitor process of rank {initial_rank}", logfile)

    def close(self) -> None:
        """End it."""
        self._progress.phase = Phase.CLOSED
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


_hosts: set[tuple[str, int]] = set()
"""Addresses of the stores that processes started by this one host."""


def host_store(create: Callable[[], Any], address: tuple[str, int]) -> None:
    """Host a store in a process of its own, which outlives this one as long as anything is connected to the store.

    Args:
        create: makes the store, in that process.
        address: host and port; a store that this process has started there is used again.

    Raises:
        firstfault_torch.inprocess.exception.InternalError: it does not start, for example because the port is taken.
    """
    if address not in _hosts:
        host = _Host(os.getpid(), create, address[1])
        _start_detached(host.begin, host.stay, f"the process that hosts the store at port {address[1]}", None)
        _hosts.add(address)


def _start_detached(begin: Callable[[], None], run: Callable[[], None], name: str, logfile: str | None) -> int:
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


class _Process:
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


@dataclass
class _Host:
    """What runs in the process that hosts a store."""

    worker: int
    create: Callable[[], Any]
    port: int

    def begin(self) -> None:
        """Host the store."""
        self._process = _Process(self.worker)
        # torch's store resolves the address of each client in the thread that serves all others
        os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
        self._server = self.create()

    def stay(self) -> None:
        """Stay while the worker lives, and then while others are connected."""
        while not self._process.has_died(MONITOR_LINGER_S):
            pass
        self._server.set(OVER, "1")
        before: set[str] = set()
        quiet = 0
        while quiet < _QUIET_LOOKS:
            now = _connections(self.port)
            quiet = 0 if now & before else quiet + 1  # ranks of the next job connect again and again, and leave
            before = now
            time.sleep(OUTCOME_LOOK_S)


def _connections(port: int) -> set[str]:
    """Return the ports of other processes' connections to a port of this one; torch's store connects to itself."""
    wanted = f"{port:04X}"
    served: set[str] = set()
    own: set[str] = set()
    inodes = {str(inode) for _, inode in open_sockets()}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, remote, state, _, _, _, _, _, inode, *_ = line.split()
                here, there = local.rpartition(":")[2], remote.rpartition(":")[2]
                if state == _ESTABLISHED and here == wanted:
                    served.add(there)
                elif there == wanted and inode in inodes:
                    own.add(here)
    return served - own


@dataclass
class _Watcher:
    """What runs in the monitor process."""

    worker: int
    progress: Progress
    initial_rank: int
    prefix: str
    connect: Callable[[], Any]
    timeouts: Timeouts

    def __post_init__(self) -> None:
        self._connection: Any = None
        self._reported = -1
        self._killed = False
        self._beats: dict[tuple[int, int], tuple[int, float]] = {}
        self._next_beat = 0.0
        self._asking: threading.Thread | None = None

    def begin(self) -> None:
        """Open the worker's process."""
        self._process = _Process(self.worker)

    def watch(self) -> None:
        """Watch until the worker's call is over."""
        while not self._process.has_died(self.timeouts.interval):
            if self.progress.phase is Phase.CLOSED:
                return
            self._look()
        if self.progress.phase not in {Phase.IDLE, Phase.CLOSED, Phase.LEFT}:
            self._with_store(self._report_death, patient=True)

    # --- the worker ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        progress, timeouts = self.progress, self.timeouts
        stalled, ending = progress.stalled_seconds, progress.ending_seconds
        if stalled > timeouts.soft and self._reported != progress.iteration:
            what = f"no progress for {stalled:.1f} s"
            if self._with_store(partial(self._report, FaultKind.SOFT_TIMEOUT, what)):
                self._reported = progress.iteration
        if max(stalled, ending) > timeouts.hard:
            what = f"no progress for {stalled:.1f} s" if stalled > ending else f"not interrupted for {ending:.1f} s"
            self._killed = self._with_store(partial(self._report, FaultKind.HARD_TIMEOUT, what))
            self._kill()
        if timeouts.heartbeat_interval and progress.phase not in {Phase.IDLE, Phase.LEFT, Phase.CLOSED}:
            self._with_store(self._beat)

    def _with_store(self, call: Callable[[], None], *, patient: bool = False) -> bool:
        """Call what needs the store; return whether it succeeded, or may still succeed.

        A store that is lost or frozen must not keep the worker from being killed. Its thread is also slow, because it
        resolves the address of each client: torch's libuv store waits for the name service then.

        Args:
            call: what to do.
            patient: wait for the call before, which may take long.
        """
        if self._asking is not None and self._asking.is_alive():
            if not patient:
                return False
            self._asking.join(MONITOR_PATIENCE_S)
            if self._asking.is_alive():
                self._connection = None  # it may wait for ever on that one

        failed = threading.Event()

        def run() -> None:
            try:
                call()
            except Exception:  # noqa: BLE001 - the worker learns of a lost store by itself
                failed.set()
                self._connection = None
                os.write(2, traceback.format_exc().encode())

        self._asking = threading.Thread(target=run, daemon=True)
        self._asking.start()
        self._asking.join(MONITOR_PATIENCE_S if patient else MONITOR_STORE_S)
        return not failed.is_set()

    def _kill(self) -> None:
        """Let the worker end itself on SIGTERM, then kill it."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._send(number)
        if not self._process.has_died(self.timeouts.grace):
            self._send(signal.SIGKILL)
            self._process.has_died(MONITOR_LINGER_S)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker, number)

    def _report_death(self) -> None:
        """Report the worker's death in the iteration in which the others can still act on it."""
        iteration, rank = self._iteration(), self.progress.rank
        agreed = iteration.agreed()
        if agreed is not None and rank not in agreed:
            # all had arrived: it counts as a fault of the next iteration, in which it has its new rank
            fault = self._fault(FaultKind.TERMINATED, "between two iterations", rank)
            following = Iteration(self._connection, self.prefix, iteration.number + 1, iteration.world_size)
            following.interrupt(fault)
            return
        if iteration.outcome() is Outcome.COMPLETED:
            return
        if not self._killed:
            iteration.interrupt(self._fault(FaultKind.TERMINATED, "its process ended"))
        iteration.leave(rank)
        if self.progress.phase is not Phase.ARRIVED:
            iteration.arrive()

    def _report(self, kind: FaultKind, what: str) -> None:
        self._iteration().interrupt(self._fault(kind, what))

    def _fault(self, kind: FaultKind, what: str, rank: int | None = None) -> Fault:
        rank = self.progress.rank if rank is None else rank
        return Fault(rank, kind, what, time.time_ns(), self.initial_rank)

    def _iteration(self) -> Iteration:
        if self._connection is None:
            self._connection = self.connect()
        return Iteration(self._connection, self.prefix, self.progress.iteration, self.progress.world_size)

    # --- the others ---------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Send a heartbeat, and look for the next rank's; report a rank of which nothing was heard for long."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + self.timeouts.heartbeat_interval
        iteration, rank, world = self._iteration(), self.progress.rank, self.progress.world_size
        iteration.beat(rank, self.initial_rank)
        for step in range(1, world):
            other = (rank + step) % world
            if not self._is_silent(iteration, other, now):
                return
            if iteration.outcome() is Outcome.COMPLETED:
                return
            if other in iteration.gone():
                continue  # its monitor process is gone too, so this one checks the next rank
            began_as = iteration.initial_rank(other)
            what = "no heartbeat of its monitor process"
            iteration.interrupt(Fault(other, FaultKind.UNRESPONSIVE, what, time.time_ns(), began_as))
            iteration.leave(other)
            iteration.arrive()

    def _is_silent(self, iteration: Iteration, other: int, now: float) -> bool:
        """Whether a rank has sent nothing for so long."""
        key = (iteration.number, other)
        beats, since = self._beats.get(key, (-1, now))
        current = iteration.beats(other)
        if current != beats:
            self._beats[key] = (current, now)
            return False
        return now - since >= self.timeouts.heartbeat


def _start_of(process: int) -> str:
    """Return when a process started, which tells it from a later one with its number; empty: it has ended."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
