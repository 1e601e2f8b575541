"""The monitor process of a rank: it reports the rank's death, and ends a rank that hangs.

Peers consider a rank lost if its monitor process becomes unresponsive. So that process has a
standby, its child: if either dies, such as by the OOM killer, the survivor takes over or starts a
new one, without touching the rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from firstfault_inprocess.detached import (
    DetachedProcess,
    close_files,
    log_error,
    log_line,
    read_start_time,
    start_detached,
)
from firstfault_inprocess.monitor.heartbeats import HeartbeatRing
from firstfault_inprocess.monitor.store_calls import StoreCalls
from firstfault_inprocess.options import InProcessOptions
from firstfault_inprocess.progress import RankPhase, SharedProgress
from firstfault_inprocess.store import Fault, FaultKind, Iteration, IterationEnd
from firstfault_torch import time_limits
from firstfault_torch.guard import try_call


class MonitorProcess:
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
        self._options = options
        # Before the fork: afterwards the number might already belong to another process.
        self._worker = os.getpid()
        self._worker_started = read_start_time(os.getpid())
        self._standby: int | None = None
        self._store_calls = StoreCalls(connect)
        self._heartbeats = HeartbeatRing(
            progress,
            initial_rank,
            options,
            self._open_iteration,
        )
        self._reported = -1
        self._killed = False

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
                return  # no process is free at the moment: the next check tries again
        if child == 0:
            log_error(try_call(self._stand_by)[1])
            os._exit(0)
        self._standby = child

    def _stand_by(self) -> None:
        """Wait for the end of the monitor process;
        become the monitor process if the call isn't over.
        """
        close_files()  # the connection to the store and the answer to the worker are the parent's
        self._standby = None
        self._store_calls.forget()
        self._heartbeats.forget()
        monitor = DetachedProcess(self._progress.monitor, self._progress.monitor_started)
        while not monitor.await_death(time_limits.MONITOR_LINGER_SECONDS):
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
        checked_at = time.monotonic()
        while not self._process.await_death(interval):
            # `close` sets this just before it kills this process: no check may report or kill a
            # worker with a finished call.
            if self._progress.phase == RankPhase.CLOSED:
                return
            # CLOCK_MONOTONIC advances while a process is stopped by a signal or by a frozen cgroup.
            # That may happen during the check, too, so all counts since the check before; calls to
            # the store may have taken their limit.
            now = time.monotonic()
            late = now - checked_at - interval
            if late > time_limits.FROZEN_WATCHDOG_SECONDS + self._store_calls.take_limits():
                self._postpone(late)
            checked_at = now
            # Whatever fails in one check, such as for want of memory, the next one tries again: if
            # this process ended, the peers would consider a healthy worker lost.
            log_error(try_call(partial(self._check_worker, checked_at), Exception)[1])
            log_error(try_call(self._keep_standby, Exception)[1])
        # The worker has died, and the shared memory has its last phase. In IDLE, LEFT and CLOSED no
        # report is due.
        if self._progress.phase not in {RankPhase.IDLE, RankPhase.CLOSED, RankPhase.LEFT}:
            self._store_calls.make(self._report_death, patient=True)
        # For the standby: there is nothing left to watch or to report.
        self._progress.phase = RankPhase.CLOSED

    # --- the worker -------------------------------------------------------------------------------

    def _check_worker(self, awake: float) -> None:
        """Report a worker that makes no progress, end it, or send a heartbeat.

        `awake`: when this process wasn't frozen, in seconds of the monotonic clock.
        """
        progress = self._progress
        stalled, ending = progress.stalled_seconds, progress.ending_seconds
        # If this process was frozen since then, so was its worker: the next check moves the
        # deadlines.
        if time.monotonic() - awake > time_limits.FROZEN_WATCHDOG_SECONDS:
            return
        # Once per iteration, unless the store didn't take the report: then the next check tries
        # again.
        if stalled > self._options.seconds("soft_timeout") and self._reported != progress.iteration:
            what = f"no progress for {stalled:.1f} s"
            if self._store_calls.make(partial(self._report, FaultKind.SOFT_TIMEOUT, what)):
                self._reported = progress.iteration
        if max(stalled, ending) > self._options.seconds("hard_timeout"):
            what = (
                f"no progress for {stalled:.1f} s"
                if stalled > ending
                else f"not interrupted for {ending:.1f} s"
            )
            # Reported before the kill, so that the fault has its reason. If the store didn't take
            # it, `_report_death` reports the death instead.
            self._killed = self._store_calls.make(
                partial(self._report, FaultKind.HARD_TIMEOUT, what)
            )
            self._kill()
        takes_part = progress.phase not in {RankPhase.IDLE, RankPhase.LEFT, RankPhase.CLOSED}
        if takes_part and self._heartbeats.is_due:
            self._store_calls.make(self._heartbeats.beat)

    def _postpone(self, seconds: float) -> None:
        """Move all deadlines: while this process was frozen,
        its worker and all peers may have been frozen, too.
        """
        now = time.monotonic()
        for name in ("automatic", "manual", "interrupted"):
            stamp = getattr(self._progress, name)
            setattr(self._progress, name, stamp and min(stamp + seconds, now))
        self._heartbeats.postpone(seconds)

    def _kill(self) -> None:
        """Let the worker end itself on SIGTERM, then kill it."""
        # A stopped process handles SIGTERM only after SIGCONT; SIGKILL ends it in any case.
        self._process.send(signal.SIGCONT)
        self._process.send(signal.SIGTERM)
        if not self._process.await_death(self._options.seconds("termination_grace_time")):
            self._process.send(signal.SIGKILL)
            self._process.await_death(time_limits.MONITOR_LINGER_SECONDS)

    def _report_death(self) -> None:
        """Report the worker's death in the iteration in which its peers can still act on it."""
        # Three cases. Died before it arrived: leave and arrive for it. Died at the barrier, others
        # still on the way: it has arrived, so only leave. Died after the barrier opened: too late
        # for this iteration.
        iteration = self._open_iteration()
        rank = self._progress.rank
        agreed = iteration.agreed()
        if agreed is not None and rank not in agreed:
            # all had arrived: it counts as a fault of the next iteration, in which it has its new
            # rank
            fault = self._fault(FaultKind.PROCESS_EXITED, "between two iterations", rank)
            following = Iteration(
                self._store_calls.connection,
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
            iteration.interrupt(self._fault(FaultKind.PROCESS_EXITED, "its process ended"))
        # leave() before arrive(): the last arrival reads who is gone. If the barrier opens before
        # leave(), the peers count on the dead rank until they miss its heartbeats.
        iteration.leave(rank)
        if self._progress.phase != RankPhase.ARRIVED:
            iteration.arrive()

    def _report(self, kind: FaultKind, what: str) -> None:
        self._open_iteration().interrupt(self._fault(kind, what))

    def _fault(self, kind: FaultKind, what: str, rank: int | None = None) -> Fault:
        rank = self._progress.rank if rank is None else rank
        return Fault(rank, kind, what, time.time_ns(), self._initial_rank)

    def _open_iteration(self) -> Iteration:
        return Iteration(
            self._store_calls.connection,
            self._prefix,
            self._progress.iteration,
            self._progress.world_size,
        )
