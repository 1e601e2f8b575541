"""The monitor process beside each worker: it reports the worker's death, and ends it if nothing else can interrupt it.

It is forked before the worker has connections, closes all inherited files, and ends after the worker's call. The two
share memory with the worker's phase and the time of its last progress.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import mmap
import os
import select
import signal
import socket
import struct
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from firstfault_torch.budgets import MONITOR_LINGER_S, MONITOR_PATIENCE_S, MONITOR_START_S, MONITOR_STORE_S
from firstfault_torch.guard import caught
from firstfault_torch.inprocess.exception import InternalError
from firstfault_torch.inprocess.store import Fault, FaultKind, Iteration, Outcome

if TYPE_CHECKING:
    from typing_extensions import Self

    from firstfault_torch.inprocess.options import InProcessOptions


# --- where a worker is ------------------------------------------------------------------------------------------------


class Phase(enum.IntEnum):
    """Where a worker is within a call of the wrapped function."""

    IDLE = 0
    RUNNING = 1
    """In the wrapped function, or in a hook before it."""
    ENDING = 2
    """The iteration was interrupted, and the worker has not arrived at the barrier."""
    ARRIVED = 3
    COMPLETED = 4
    """The function has returned, and the worker waits for the others."""
    LEFT = 5
    """It takes part in no further iteration."""
    CLOSED = 6
    """The call is over."""


class Progress(ctypes.Structure):
    """What a worker writes and its monitor process reads, without a system call.

    Times are seconds of the monotonic clock; 0: none.
    """

    _fields_: ClassVar = [
        *((name, ctypes.c_double) for name in ("automatic", "manual", "interrupted")),
        *((name, ctypes.c_int64) for name in ("phase", "iteration", "rank", "world_size")),
    ]
    automatic: float
    """When the main thread last executed Python code."""
    manual: float
    """When the program last called `ping` in this iteration."""
    interrupted: float
    """When this worker learned that the iteration was interrupted."""
    phase: int
    """A `Phase`."""
    iteration: int
    rank: int
    """In this iteration."""
    world_size: int
    """Of this iteration."""

    def __new__(cls) -> Self:
        """Return a progress in memory that this process shares with those that it forks."""
        return cls.from_buffer(mmap.mmap(-1, ctypes.sizeof(cls)))

    def begin(self, iteration: int, rank: int, world_size: int) -> None:
        """Begin an iteration."""
        self.automatic, self.manual, self.interrupted = time.monotonic(), 0.0, 0.0
        self.iteration, self.rank, self.world_size = iteration, rank, world_size
        self.phase = Phase.RUNNING

    @property
    def stalled_seconds(self) -> float:
        """How long the worker has made no progress, by the clock that is further behind; 0 outside of the function."""
        if self.phase != Phase.RUNNING:
            return 0.0
        times = [stamp for stamp in (self.automatic, self.manual) if stamp]
        return time.monotonic() - min(times) if times else 0.0

    @property
    def ending_seconds(self) -> float:
        """How long this worker has been on its way from an interrupted function to the barrier."""
        if self.phase not in {Phase.RUNNING, Phase.ENDING} or not self.interrupted:
            return 0.0
        return time.monotonic() - self.interrupted


# --- processes that have none of a worker's files ---------------------------------------------------------------------


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
            caught(lambda: _run_detached(begin, run, its, logfile))
            os._exit(0)  # nothing may run the worker's handlers at exit
        its.close()
        os.waitpid(middle, 0)
        ours.settimeout(MONITOR_START_S)
        answer = b""
        with contextlib.suppress(TimeoutError):
            while more := ours.recv(4096):
                answer += more
    if not answer.startswith(b"ok"):
        raise InternalError(f"{name} did not start: {answer.decode(errors='replace') or 'it does not answer'}")
    number: int = struct.unpack("=q", answer[2:10])[0]
    return number


def _run_detached(
    begin: Callable[[], None], run: Callable[[], None], answer: socket.socket, logfile: str | None
) -> None:
    os.setsid()
    if os.fork() > 0:
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)

    def prepare() -> None:
        _drop_files(keep=answer.fileno(), logfile=logfile)
        begin()

    _, error = caught(prepare, Exception)
    if error is not None:
        answer.sendall(f"{type(error).__name__}: {error}".encode())
        return
    answer.sendall(b"ok" + struct.pack("=q", os.getpid()))
    answer.close()
    _log(caught(run)[1])


def _log(error: BaseException | None) -> None:
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


# --- the monitor process ----------------------------------------------------------------------------------------------


class Watcher:
    """The monitor process of a worker: what runs in it, and how the worker starts and ends it.

    It looks at `progress`, and calls `connect` for a connection to the store.
    """

    def __init__(
        self,
        progress: Progress,
        initial_rank: int,
        prefix: str,
        connect: Callable[[], Any],
        options: InProcessOptions,
    ) -> None:
        self.pid: int | None = None
        self._progress = progress
        self._initial_rank = initial_rank
        self._prefix = prefix
        self._connect = connect
        self._options = options
        self._worker = os.getpid()
        self._connection: Any = None
        self._reported = -1
        self._killed = False
        self._beats: dict[tuple[int, int], tuple[int, float]] = {}
        self._next_beat = 0.0
        self._asking: threading.Thread | None = None

    def start(self) -> None:
        """Start the monitor process of this worker, or raise an InternalError."""
        logfile = (self._options.monitor_process_logfile or "").format(rank=self._initial_rank) or None
        name = f"the monitor process of rank {self._initial_rank}"
        self.pid = start_detached(self.begin, self.watch, name, logfile)

    def close(self) -> None:
        """End the monitor process."""
        self._progress.phase = Phase.CLOSED
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    # --- in the monitor process -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Open the worker's process."""
        self._process = Process(self._worker)

    def watch(self) -> None:
        """Watch until the worker's call is over."""
        while not self._process.has_died(self._options.seconds("monitor_process_interval")):
            if self._progress.phase == Phase.CLOSED:
                return
            self._look()
        if self._progress.phase not in {Phase.IDLE, Phase.CLOSED, Phase.LEFT}:
            self._with_store(self._report_death, patient=True)

    # --- the worker ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        progress = self._progress
        stalled, ending = progress.stalled_seconds, progress.ending_seconds
        if stalled > self._options.seconds("soft_timeout") and self._reported != progress.iteration:
            what = f"no progress for {stalled:.1f} s"
            if self._with_store(partial(self._report, FaultKind.SOFT_TIMEOUT, what)):
                self._reported = progress.iteration
        if max(stalled, ending) > self._options.seconds("hard_timeout"):
            what = f"no progress for {stalled:.1f} s" if stalled > ending else f"not interrupted for {ending:.1f} s"
            self._killed = self._with_store(partial(self._report, FaultKind.HARD_TIMEOUT, what))
            self._kill()
        if progress.phase not in {Phase.IDLE, Phase.LEFT, Phase.CLOSED}:
            self._with_store(self._beat)

    def _with_store(self, call: Callable[[], None], *, patient: bool = False) -> bool:
        """Call what needs the store; return whether it succeeded, or may still succeed.

        A store that is lost or frozen must not keep the worker from being killed. Its thread is also slow, because it
        resolves the address of each client: torch's libuv store waits for the name service then. If `patient`, wait for
        the call before, which may take long.
        """
        if self._asking is not None and self._asking.is_alive():
            if not patient:
                return False
            self._asking.join(MONITOR_PATIENCE_S)
            if self._asking.is_alive():
                self._connection = None  # it may wait for ever on that one

        failed = threading.Event()

        def run() -> None:
            _, error = caught(call, Exception)
            if error is not None:  # the worker learns of a lost store by itself
                failed.set()
                self._connection = None
                _log(error)

        self._asking = threading.Thread(target=run, daemon=True)
        self._asking.start()
        self._asking.join(MONITOR_PATIENCE_S if patient else MONITOR_STORE_S)
        return not failed.is_set()

    def _kill(self) -> None:
        """Let the worker end itself on SIGTERM, then kill it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._worker, signal.SIGCONT)
            os.kill(self._worker, signal.SIGTERM)
            if not self._process.has_died(self._options.seconds("termination_grace_time")):
                os.kill(self._worker, signal.SIGKILL)
                self._process.has_died(MONITOR_LINGER_S)

    def _report_death(self) -> None:
        """Report the worker's death in the iteration in which the others can still act on it."""
        iteration, rank = self._iteration(), self._progress.rank
        agreed = iteration.agreed()
        if agreed is not None and rank not in agreed:
            # all had arrived: it counts as a fault of the next iteration, in which it has its new rank
            fault = self._fault(FaultKind.TERMINATED, "between two iterations", rank)
            following = Iteration(self._connection, self._prefix, iteration.number + 1, iteration.world_size)
            following.interrupt(fault)
            return
        if iteration.outcome() is Outcome.COMPLETED:
            return
        if not self._killed:
            iteration.interrupt(self._fault(FaultKind.TERMINATED, "its process ended"))
        iteration.leave(rank)
        if self._progress.phase != Phase.ARRIVED:
            iteration.arrive()

    def _report(self, kind: FaultKind, what: str) -> None:
        self._iteration().interrupt(self._fault(kind, what))

    def _fault(self, kind: FaultKind, what: str, rank: int | None = None) -> Fault:
        rank = self._progress.rank if rank is None else rank
        return Fault(rank, kind, what, time.time_ns(), self._initial_rank)

    def _iteration(self) -> Iteration:
        if self._connection is None:
            self._connection = self._connect()
        return Iteration(self._connection, self._prefix, self._progress.iteration, self._progress.world_size)

    # --- the others ---------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Send a heartbeat, and look for the next rank's; report a rank of which nothing was heard for long."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + self._options.seconds("heartbeat_interval")
        iteration, rank, world = self._iteration(), self._progress.rank, self._progress.world_size
        iteration.beat(rank, self._initial_rank)
        for step in range(1, world):
            other = (rank + step) % world
            if not self._is_silent(iteration, other, now) or iteration.outcome() is Outcome.COMPLETED:
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
        return now - since >= self._options.seconds("heartbeat_timeout")
