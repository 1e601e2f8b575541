"""What watches a rank from outside its main thread: the monitor process, and two threads.

The monitor process reports the rank's death, and ends the rank if nothing else can interrupt it. It
is forked before the rank has connections, closes all inherited files, and ends after the rank's
call. The two share memory with the rank's phase and the time of its last progress. One thread
writes that time; the other interrupts the main thread.

Peers consider a rank lost if its monitor process becomes unresponsive. So that process has a
standby, its child: if either dies, such as by the OOM killer, the survivor takes over or starts a
new one, without touching the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import os
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from firstfault_inprocess.detached import (
    DetachedProcess,
    close_files,
    log_error,
    log_line,
    read_start_time,
    start_detached,
)
from firstfault_inprocess.exception import RankShouldRestart
from firstfault_inprocess.options import InProcessOptions
from firstfault_inprocess.progress import RankPhase, SharedProgress, find_position
from firstfault_inprocess.store import Fault, FaultKind, Iteration, IterationEnd
from firstfault_torch import time_limits
from firstfault_torch.guard import (
    logger,
    start_daemon,
    start_in_thread,
    suppress_internal_errors,
    try_call,
)

_FOREVER = dt.timedelta(days=30)
"""Longer than any iteration: each ends with an outcome, or with the store."""
_INSTRUCTIONS = 1000
_STAYS = (
    "in-process restart: this rank is still at %s, after %s; "
    "if it has not left the function within %g s (hard_timeout), its monitor process ends it"
)

_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_exception.restype = ctypes.c_int


# --- the monitor process --------------------------------------------------------------------------


class Watcher:
    """The monitor process of a worker: what runs in it, and how the worker starts and ends it.

    It looks at `progress`, and calls `connect` for a connection to the store.
    """

    def __init__(
        self,
        progress: SharedProgress,
        initial_rank: int,
        prefix: str,
        connect: Callable[[], Any],
        options: InProcessOptions,
    ) -> None:
        self._progress = progress
        self._initial_rank = initial_rank
        self._prefix = prefix
        self._connect = connect
        self._options = options
        # Before the fork: afterwards the number might already belong to another process.
        self._worker = os.getpid()
        self._worker_started = read_start_time(os.getpid())
        self._standby: int | None = None
        self._connection: Any = None
        self._reported = -1
        self._killed = False
        self._beats: dict[tuple[int, int], tuple[int, float]] = {}
        self._next_beat = 0.0
        self._store_thread: _StoreThread | None = None

    def start(self) -> None:
        """Start the monitor process of this worker, or raise an InternalError."""
        logfile = (self._options.monitor_process_logfile or "").format(
            rank=self._initial_rank
        ) or None
        name = f"the monitor process of rank {self._initial_rank}"
        start_detached(self.begin, self.watch, name, logfile)

    @property
    def pid(self) -> int:
        """The process id of the monitor process."""
        return self._progress.monitor

    def close(self) -> None:
        """End the monitor process; its standby then ends, too."""
        # Before the signal: if this process dies in between, the monitor process does not report a
        # death.
        self._progress.phase = RankPhase.CLOSED
        # The monitor process may have died during the call, days ago, and its number may be another
        # process's.
        monitor = DetachedProcess(self._progress.monitor, self._progress.monitor_started)
        monitor.send(signal.SIGKILL)
        monitor.close()

    # --- in the monitor process -------------------------------------------------------------------

    def begin(self) -> None:
        """Open the worker's process, and start the standby,
        as long as this process has no threads.
        """
        self._process = DetachedProcess(self._worker, self._worker_started)
        self._progress.monitor = os.getpid()
        self._progress.monitor_started = read_start_time(os.getpid())
        self._keep_standby()

    def _keep_standby(self) -> None:
        """Start a standby if there is none, or if it has died."""
        if self._standby is not None:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self._standby, os.WNOHANG)[0] == 0:
                    return
            self._standby = None
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork while threads run; the child uses nothing of theirs
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                child = os.fork()
            except (OSError, MemoryError):
                return  # no process is free at the moment: the next look tries again
        if child == 0:
            log_error(try_call(self._stand_by)[1])
            os._exit(0)
        self._standby = child

    def _stand_by(self) -> None:
        """Wait for the end of the monitor process;
        become the monitor process if the call isn't over.
        """
        close_files()  # the connection to the store and the answer to the worker are the parent's
        self._standby = self._connection = self._store_thread = None
        self._beats = {}
        monitor = DetachedProcess(self._progress.monitor, self._progress.monitor_started)
        while not monitor.has_died(time_limits.MONITOR_LINGER_SECONDS):
            pass
        monitor.close()
        if self._progress.phase == RankPhase.CLOSED:
            return
        log_line(f"the monitor process {monitor.number} has died; this process takes over")
        self.begin()
        self.watch()

    def watch(self) -> None:
        """Watch until the worker's call is over."""
        interval = self._options.seconds("monitor_process_interval")
        began = time.monotonic()
        while not self._process.has_died(interval):
            # `close` sets this just before it kills this process: no look may report or kill a
            # worker with a finished call.
            if self._progress.phase == RankPhase.CLOSED:
                return
            # CLOCK_MONOTONIC advances while a process is stopped by a signal or by a frozen cgroup.
            # The wait then takes far longer than `interval`.
            late = time.monotonic() - began - interval
            if late > time_limits.FROZEN_WATCHDOG_SECONDS:
                self._postpone(late)
            # Whatever fails in one look, such as for want of memory, the next one tries again: if
            # this process ended, the peers would consider a healthy worker lost.
            log_error(try_call(self._look, Exception)[1])
            log_error(try_call(self._keep_standby, Exception)[1])
            began = time.monotonic()
        # The worker has died, and the shared memory has its last phase. In IDLE, LEFT and CLOSED no
        # report is due.
        if self._progress.phase not in {RankPhase.IDLE, RankPhase.CLOSED, RankPhase.LEFT}:
            self._with_store(self._report_death, patient=True)
        # For the standby: there is nothing left to watch or to report.
        self._progress.phase = RankPhase.CLOSED

    # --- the worker -------------------------------------------------------------------------------

    def _look(self) -> None:
        progress = self._progress
        stalled, ending = progress.stalled_seconds, progress.ending_seconds
        # Once per iteration, unless the store didn't take the report: then the next look tries
        # again.
        if stalled > self._options.seconds("soft_timeout") and self._reported != progress.iteration:
            what = f"no progress for {stalled:.1f} s"
            if self._with_store(partial(self._report, FaultKind.SOFT_TIMEOUT, what)):
                self._reported = progress.iteration
        if max(stalled, ending) > self._options.seconds("hard_timeout"):
            what = (
                f"no progress for {stalled:.1f} s"
                if stalled > ending
                else f"not interrupted for {ending:.1f} s"
            )
            # Reported before the kill, so that the fault has its reason. If the store didn't take
            # it, `_report_death` reports the death instead.
            self._killed = self._with_store(partial(self._report, FaultKind.HARD_TIMEOUT, what))
            self._kill()
        takes_part = progress.phase not in {RankPhase.IDLE, RankPhase.LEFT, RankPhase.CLOSED}
        if takes_part and time.monotonic() >= self._next_beat:
            self._with_store(self._send_heartbeat)

    def _with_store(self, call: Callable[[], None], *, patient: bool = False) -> bool:
        """Call what needs the store; return whether it succeeded, or may still succeed.

        A store that is lost or frozen must not keep the worker from being killed, so a thread makes
        the calls. The store's thread is also slow, because it resolves the address of each client:
        torch's libuv store waits for the name service then. If `patient`, wait for the call before,
        which may take long.
        """
        usual, long = (
            time_limits.MONITOR_STORE_TIMEOUT_SECONDS,
            time_limits.MONITOR_REPORT_TIMEOUT_SECONDS,
        )
        # An earlier call may still be in C++ on this connection, which only one thread may use at a
        # time.
        if self._store_thread is not None and not self._store_thread.idle.wait(
            long if patient else 0
        ):
            if not patient:
                return False
            self._connection = None  # it may wait for ever on that one
            self._store_thread.end()
            self._store_thread = None
        # One thread for all calls, not one for each: heartbeats continue while the system allows no
        # further thread.
        if self._store_thread is None:
            with contextlib.suppress(RuntimeError, MemoryError):
                self._store_thread = _StoreThread()
        # Set by the thread. If the wait below times out first, a call that fails later has counted
        # as a success.
        failed = threading.Event()

        def run() -> None:
            _, error = try_call(call, Exception)
            if error is not None:  # the worker notices a lost store without help
                failed.set()
                self._connection = None
                log_error(error)

        if self._store_thread is None:
            # There was never a thread. A store that blocks then delays the end of a worker that
            # hangs, which does less harm than no heartbeats.
            run()
        else:
            self._store_thread.begin(run)
            self._store_thread.idle.wait(long if patient else usual)
        return not failed.is_set()

    def _postpone(self, seconds: float) -> None:
        """Move all deadlines: while this process was frozen,
        its worker and all peers may have been frozen, too.
        """
        now = time.monotonic()
        for name in ("automatic", "manual", "interrupted"):
            stamp = getattr(self._progress, name)
            setattr(self._progress, name, stamp and min(stamp + seconds, now))
        # A list first: the thread of `_with_store` may add a rank at the same time, which would end
        # an iteration over the dict.
        self._beats = {
            key: (beats, since + seconds) for key, (beats, since) in list(self._beats.items())
        }

    def _kill(self) -> None:
        """Let the worker end itself on SIGTERM, then kill it."""
        # A stopped process handles SIGTERM only after SIGCONT; SIGKILL ends it in any case.
        self._process.send(signal.SIGCONT)
        self._process.send(signal.SIGTERM)
        if not self._process.has_died(self._options.seconds("termination_grace_time")):
            self._process.send(signal.SIGKILL)
            self._process.has_died(time_limits.MONITOR_LINGER_SECONDS)

    def _report_death(self) -> None:
        """Report the worker's death in the iteration in which its peers can still act on it."""
        # Three cases. Died before it arrived: leave and arrive for it. Died at the barrier, others
        # still on the way: it has arrived, so only leave. Died after the barrier opened: too late
        # for this iteration.
        iteration = self._iteration()
        rank = self._progress.rank
        agreed = iteration.agreed()
        if agreed is not None and rank not in agreed:
            # all had arrived: it counts as a fault of the next iteration, in which it has its new
            # rank
            fault = self._fault(FaultKind.TERMINATED, "between two iterations", rank)
            following = Iteration(
                self._connection,
                self._prefix,
                iteration.number + 1,
                iteration.world_size,
            )
            # The preceding rank's monitor process leaves and arrives there for the dead rank, once
            # it misses the heartbeats.
            following.interrupt(fault)
            return
        if iteration.outcome() is IterationEnd.COMPLETED:
            # If the dead rank was the last to complete, it may not have come as far as waking its
            # peers.
            iteration.wake_peers()
            return
        if not self._killed:
            iteration.interrupt(self._fault(FaultKind.TERMINATED, "its process ended"))
        # leave() before arrive(): the last arrival reads who is gone. If the barrier opens before
        # leave(), the peers count on the dead rank until they miss its heartbeats.
        iteration.leave(rank)
        if self._progress.phase != RankPhase.ARRIVED:
            iteration.arrive()

    def _report(self, kind: FaultKind, what: str) -> None:
        self._iteration().interrupt(self._fault(kind, what))

    def _fault(self, kind: FaultKind, what: str, rank: int | None = None) -> Fault:
        rank = self._progress.rank if rank is None else rank
        return Fault(rank, kind, what, time.time_ns(), self._initial_rank)

    def _iteration(self) -> Iteration:
        if self._connection is None:
            self._connection = self._connect()
        return Iteration(
            self._connection,
            self._prefix,
            self._progress.iteration,
            self._progress.world_size,
        )

    # --- peers ------------------------------------------------------------------------------------

    def _send_heartbeat(self) -> None:
        """Send a heartbeat, and look for the next rank's;
        report a rank that hasn't sent one for too long.
        """
        now = time.monotonic()
        # A ring: each monitor process checks the next rank only, at the same cost for any world
        # size. Behind a silent rank it also checks the following ones, because nobody else does.
        self._next_beat = now + self._options.seconds("heartbeat_interval")
        iteration = self._iteration()
        rank = self._progress.rank
        world = self._progress.world_size
        iteration.beat(rank, self._initial_rank)
        for step in range(1, world):
            other = (rank + step) % world
            # After COMPLETED monitor processes end one by one, and silence is normal.
            if (
                not self._is_silent(iteration, other, now)
                or iteration.outcome() is IterationEnd.COMPLETED
            ):
                return
            # Another monitor process may have reported the rank: arriving twice would open the
            # barrier too early.
            if other in iteration.gone():
                continue  # its monitor process is gone too, so this one checks the next rank
            began_as = iteration.initial_rank(other)
            what = "no heartbeat of its monitor process"
            iteration.interrupt(
                Fault(other, FaultKind.UNRESPONSIVE, what, time.time_ns(), began_as)
            )
            iteration.leave(other)
            iteration.arrive()

    def _is_silent(self, iteration: Iteration, other: int, now: float) -> bool:
        """Whether a rank has sent nothing for so long."""
        key = (iteration.number, other)
        beats, since = self._beats.get(key, (-1, now))
        # The time counts from this process's own first look in the iteration, so clocks of other
        # hosts don't matter.
        current = iteration.beats(other)
        if current != beats:
            self._beats[key] = (current, now)
            return False
        return now - since >= self._options.seconds("heartbeat_timeout")


class _StoreThread:
    """A thread of the monitor process that makes one call after another.

    Raises:
        RuntimeError, MemoryError: the system allows no further thread.
    """

    def __init__(self) -> None:
        self.idle = threading.Event()
        """Set while no call is in progress."""
        self.idle.set()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="firstfault-store", daemon=True).start()

    def begin(self, call: Callable[[], None]) -> None:
        """Begin a call, which must not raise; the one before must have ended."""
        self.idle.clear()
        self._calls.put(call)

    def end(self) -> None:
        """Let the thread end, after a call in progress."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self.idle.set()


# --- the threads ----------------------------------------------------------------------------------


class MonitorThread:
    """Waits for the outcome of one iteration.

        waiting     COMPLETED: the thread ends; INTERRUPTED or LOST: `known` is set -> last call
        last call   waits for `last_call_wait`, then for the end of an `atomic` block -> aborting
        aborting    `abort` unblocks the main thread; `aborted` is set -> raising
        raising     RankShouldRestart in the thread that made it, every `monitor_thread_interval`,
                    because its code may catch any exception; `stop_raising` is called there -> the
                    thread ends

    The iteration has a connection of this thread only. `progress` gets the time of the
    interruption.
    """

    def __init__(
        self,
        iteration: Iteration,
        progress: SharedProgress,
        abort: Callable[[], Any],
        options: InProcessOptions,
        atomic: threading.RLock,
    ) -> None:
        self._iteration = iteration
        self._progress = progress
        self._abort = abort
        self._last_call_wait = options.seconds("last_call_wait")
        self._interval = options.seconds("monitor_thread_interval")
        self._soft_timeout = options.seconds("soft_timeout")
        self._hard_timeout = options.seconds("hard_timeout")
        self._atomic = atomic
        self._main = threading.get_ident()
        self._lock = threading.Lock()
        self._may_raise = False
        self._has_raised = False
        self._left = threading.Event()
        self.outcome: IterationEnd | None = None
        """How the iteration ended; None while it hasn't."""
        self.known = threading.Event()
        """Set when the outcome is known."""
        self.aborted = threading.Event()
        """Set when nothing is left to abort."""
        patience = time_limits.RESOURCE_SHORTAGE_TIMEOUT_SECONDS
        self._thread = start_daemon(self._run, "firstfault-restart", patience)

    def _run(self) -> None:
        with suppress_internal_errors("watching an iteration"):
            try:
                self.outcome = self._iteration.await_outcome(_FOREVER)
            # Without the store this rank can't learn who continues: the main thread raises
            # RestartAbort.
            except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
                logger.warning(
                    "lost the store of the in-process restart: %s", str(error).partition("\n")[0]
                )
                self.outcome = IterationEnd.LOST
            # Before `known`: the main thread reads the time as soon as `known` wakes it.
            if self.outcome is not IterationEnd.COMPLETED:
                self._progress.interrupted = time.monotonic()
            self.known.set()
            if self.outcome is not IterationEnd.COMPLETED:
                self._interrupt()
        # Also after an internal error above: the main thread waits for both events.
        self.known.set()
        self.aborted.set()

    def _interrupt(self) -> None:
        # One cause often makes several ranks raise within milliseconds. After the abort an
        # exception may be its effect, so let these ranks report first.
        time.sleep(self._last_call_wait)
        is_held = False
        # An `atomic` block delays the abort, too, so that its collectives aren't aborted. Short
        # waits: the lock isn't needed once the main thread has left the function.
        while not is_held and not self._left.is_set():
            is_held = self._atomic.acquire(timeout=self._interval)
        try:
            # First the abort, then the exception: Python raises it only when the main thread runs
            # bytecode again, and a collective or a wait for the store keeps that thread in C++.
            with suppress_internal_errors("aborting the collectives"):
                self._abort()
            self.aborted.set()
            late = time.monotonic() + (self._hard_timeout - self._soft_timeout) / 2
            while not self._left.is_set():
                if time.monotonic() > late:
                    late = float("inf")
                    # in a separate thread: the main thread may hold a log's lock
                    start_in_thread(self._log_stuck_main_thread, "reporting that a rank stays")
                # `stop_raising` clears the flag under the same lock: after that no exception is set
                # any more. The exception is set again in each round, because the program may have
                # caught the last one.
                with self._lock:
                    if self._may_raise:
                        self._has_raised = True
                        _set_exception(self._main, RankShouldRestart)
                self._left.wait(self._interval)
        finally:
            if is_held:
                self._atomic.release()

    def _log_stuck_main_thread(self) -> None:
        """Log where the main thread is: if it doesn't leave,
        the monitor process ends this process from outside.
        """
        position = find_position(self._main)
        faults = "; ".join(map(str, self._iteration.faults()[:3]))
        logger.warning(_STAYS, position and position.text, faults, self._hard_timeout)

    def begin(self) -> None:
        """Allow the interruption of the main thread; call it there,
        where RankShouldRestart is handled.
        """
        self._may_raise = True

    def stop_raising(self) -> None:
        """Raise nothing in the main thread from now on; call it there, until it returns."""
        # First without the lock: from here the monitor thread sets at most one more exception, if
        # it has already read the flag.
        self._may_raise = False
        # With the lock: it has left its block. One exception may still be pending in this thread.
        # Python may raise it in any line of this method, so the caller catches it and calls again.
        with self._lock:
            self._may_raise = False
        # Whether the last exception was raised already or is still pending can't be read: so
        # another one replaces it and is caught here.
        if self._has_raised:
            _take_back()
        # Last, after the pending exception is gone: an interruption before this line lets the
        # caller repeat the method.
        self._left.set()

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end; False if it still runs."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Hold the connection no longer, if the thread has ended."""
        # A thread that still runs keeps the connection: it may be in a call on it.
        if self.join(time_limits.MONITOR_CLOSE_TIMEOUT_SECONDS):
            self._iteration.close()
            self._abort = lambda: None


def _take_back() -> None:
    """Leave no exception of another thread pending in this one.

    A new one takes the pending one's place and is caught here. To set none instead would remove the
    exception, but not Python's sign that there is one: with a debugger, a profiler or coverage,
    Python 3.11 would wait for it for ever.
    """
    with contextlib.suppress(RankShouldRestart):
        # CPython keeps one pending exception per thread: a second call replaces the first.
        _set_exception(threading.get_ident(), RankShouldRestart)
        for _ in range(_INSTRUCTIONS):  # Python raises it at one of the next jumps
            pass
