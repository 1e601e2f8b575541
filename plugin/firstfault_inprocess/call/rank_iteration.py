"""One rank's part in one iteration."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from firstfault_inprocess.call.recovery import Observer
from firstfault_inprocess.call.session import CallSession
from firstfault_inprocess.exception import (
    HealthCheckError,
    InternalError,
    RankLost,
    RestartAbort,
    RestartError,
    one_line,
)
from firstfault_inprocess.monitor.thread import MonitorThread, find_own_error
from firstfault_inprocess.progress import RankPhase, find_position
from firstfault_inprocess.rank_assignment import Mode, RankDiscarded, State
from firstfault_inprocess.store import Fault, FaultKind, Iteration, IterationEnd
from firstfault_torch.guard import suppress_internal_errors
from firstfault_torch.time_limits import (
    SIGNAL_HANDLER_INTERVAL_SECONDS,
    THREAD_JOIN_TIMEOUT_SECONDS,
)

STORE_LOST_MESSAGE = "the store of the in-process restart is lost"
_RANK_LOST_MESSAGE = "rank {} was considered lost, and the remaining ranks continue without it"


class RankIteration:
    """One iteration on this rank: what it runs there, and what it reports to its peers.

    __init__    RUNNING: the monitor thread waits for the outcome
    call        runs the function, until it returns, raises or is interrupted
    complete    COMPLETED: wait for the peers
    end         ENDING: report the fault; wait for the end of the abort
    arrive      ARRIVED, when all ranks have; returns those that don't continue
    leave       LEFT, in place of `arrive`, or when a step after it raises
    """

    def __init__(self, session: CallSession, state: State, observer: Observer | None) -> None:
        self._session = session
        self._options = session.options
        self._progress = session.progress
        self._state = state
        self._observer = observer
        self._has_said_that_it_leaves = False
        self._iteration = session.begin_iteration(state)
        # After begin_iteration(): a peer may have interrupted this iteration already. The thread
        # then sets `interrupted` at once, and SharedProgress.begin() would erase it.
        self._monitor = MonitorThread(
            self._iteration.with_connection(session.watching),
            self._progress,
            partial(self._abort, self._iteration.with_connection(session.watching)),
            self._options,
            session.atomic_lock,
        )

    @property
    def is_completed(self) -> bool:
        """Whether all ranks have completed."""
        return self._monitor.outcome is IterationEnd.COMPLETED

    def call(self, function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Return what the function returns and None, or None and what it raised."""
        return self._monitor.call(function)

    def complete(self) -> BaseException | None:
        """Count this rank as completed and wait for the remaining ranks;
        return an error if they take too long. A reserve waits without a limit.
        """
        # Before the store is called: outside of RUNNING a slow store doesn't count as a stall of
        # the function.
        self._progress.phase = RankPhase.COMPLETED
        # the thread sees that, too
        with contextlib.suppress(dist.DistNetworkError, dist.DistStoreError):
            self._iteration.complete()
        limit = (
            self._options.seconds("completion_timeout")
            if self._state.mode is Mode.ACTIVE
            else float("inf")
        )
        deadline = time.monotonic() + limit
        while not self._monitor.known.wait(SIGNAL_HANDLER_INTERVAL_SECONDS):
            if time.monotonic() > deadline:
                late = RestartError(
                    f"not all ranks completed within {limit:g} s (completion_timeout)"
                )
                # The last rank may complete at the same moment: the store keeps the outcome that
                # was set first.
                outcome = self._iteration.interrupt(self._describe(FaultKind.EXCEPTION, late))
                if outcome is IterationEnd.INTERRUPTED:
                    return late
                deadline = float("inf")  # they have, just now
        return None

    def find_own_error(self, error: BaseException | None) -> BaseException | None:
        """Return the function's own exception, or None if it was only interrupted."""
        return find_own_error(error, is_interrupted=self._monitor.known.is_set())

    def end(self, error: BaseException | None, own: BaseException | None) -> float:
        """Report what the function raised, and wait until the collectives are aborted.

        Returns:
            When this rank learned of the interruption, by the monotonic clock.

        Raises:
            RestartAbort: the store's host is gone.
            BaseException: the function's own error, if this rank can't continue after it.
        """
        learned = self._progress.interrupted or time.monotonic()
        # From here the monitor process no longer measures stalls, only the way to the barrier
        # (`ending_seconds`).
        self._progress.phase = RankPhase.ENDING
        leaves = isinstance(own, HealthCheckError) or not isinstance(own, Exception | None)
        # Rank 3 raises first: no outcome yet, its report interrupts all ranks. Rank 5 raises within
        # `last_call_wait`: its fault is reported, too. After the abort, an exception may only be
        # the abort's effect: no report.
        if (
            error is not None
            and not self._monitor.aborted.is_set()
            and (own is not None or not self._monitor.known.is_set())
        ):
            # first, so that all peers abort in the meantime
            self._has_said_that_it_leaves = leaves
            kind = FaultKind.LEFT if leaves else FaultKind.EXCEPTION
            self._iteration.interrupt(self._describe(kind, error))
            if self._observer is not None and isinstance(own, Exception):
                with suppress_internal_errors("recording a fault"):
                    self._observer.raised(own)
        # The monitor thread may still be aborting the process groups that the call destroys next.
        self._monitor.aborted.wait(self._options.seconds("hard_timeout"))
        if self._monitor.outcome is IterationEnd.LOST:
            raise RestartAbort(f"{STORE_LOST_MESSAGE}: the process that hosted it is gone") from own
        if own is not None and leaves:
            raise own
        return learned

    def arrive(self, own: BaseException | None) -> frozenset[int]:
        """Wait for all ranks at the end of the iteration; return those that don't continue.

        Raises:
            RankLost: the remaining ranks continue without this one.
        """
        state = self._state
        # A peer's monitor process may have missed this rank's heartbeats and arrived for it. A
        # second arrival would open the barrier before another rank has ended its iteration.
        if state.rank in self._iteration.gone():
            raise RankLost(_RANK_LOST_MESSAGE.format(state.initial_rank)) from own
        # ARRIVED after arrive(): if this process dies in between, its monitor process arrives once
        # more, and the barrier may open one rank early. In the reverse order no rank might arrive,
        # and all ranks would wait for barrier_timeout.
        self._iteration.arrive()
        self._progress.phase = RankPhase.ARRIVED
        gone = self._iteration.await_all(self._session.barrier_timeout)
        # The next iteration's thread uses the same connection.
        if not self._monitor.join(THREAD_JOIN_TIMEOUT_SECONDS):
            raise InternalError("the thread that monitors the iteration doesn't end")
        # Checked again: this rank may have been given up after the first check.
        if state.rank in gone:
            raise RankLost(_RANK_LOST_MESSAGE.format(state.initial_rank)) from own
        return gone

    def faults(self) -> list[Fault]:
        """Return the faults of the iteration, in the order in which they were reported."""
        return self._iteration.faults()

    def lose_store(self) -> None:
        """Leave without informing the peers, because the store is lost."""
        # LEFT ends the heartbeats and keeps the monitor process from reporting a death; peers that
        # still reach the store miss the heartbeats.
        self._progress.phase = RankPhase.LEFT

    def leave(self, error: BaseException) -> None:
        """Take no part in further iterations; the remaining ranks continue."""
        if isinstance(error, RankDiscarded | RankLost):
            self._progress.phase = RankPhase.LEFT  # the remaining ranks know it
        with suppress_internal_errors("leaving an in-process restart"):
            fault = self._describe(FaultKind.LEFT, error)
            if self._progress.phase == RankPhase.ARRIVED:
                # The barrier may be open already. In the next iteration nobody arrives for this
                # rank until its heartbeats are missed. the remaining ranks count on this one: they
                # learn in the next iteration that it left
                following = self._session.open_iteration(
                    self._iteration.number + 1,
                    self._iteration.world_size,
                )
                following.interrupt(fault)
            elif self._progress.phase != RankPhase.LEFT:
                if not self._has_said_that_it_leaves:
                    self._iteration.interrupt(fault)
                # leave() before arrive(): the last arrival reads who is gone, and this may be the
                # last one. LEFT before arrive(): otherwise the monitor process might arrive a
                # second time for this rank.
                self._iteration.leave(self._state.rank)
                self._progress.phase = RankPhase.LEFT
                self._iteration.arrive()

    def close(self) -> None:
        """Hold the connections no longer."""
        self._iteration.drop_connection()
        self._monitor.close()

    def _describe(self, kind: FaultKind, error: BaseException) -> Fault:
        return Fault(
            self._state.rank,
            kind,
            one_line(error),
            time.time_ns(),
            self._state.initial_rank,
        )

    # --- in the monitor thread --------------------------------------------------------------------

    def _abort(self, iteration: Iteration) -> None:
        """Unblock the main thread; if this rank makes no progress, write its position first."""
        # Before the abort: the abort moves the main thread away from where it hangs.
        with suppress_internal_errors("storing where a rank is"):
            stalled = self._progress.stalled_seconds
            if stalled >= self._options.seconds("soft_timeout") / 2:
                self._locate(iteration, stalled)
        try:
            if self._options.abort is not None:
                self._options.abort(self._state)
        finally:
            self._session.connections.shut_down()

    def _locate(self, iteration: Iteration, stalled: float) -> None:
        begun = self._observer.collectives_begun() if self._observer is not None else None
        position = find_position(threading.main_thread().ident or 0, begun)
        rank = self._progress.rank
        if position is None:
            return
        iteration.put_position(rank, position)
        faults = iteration.faults() if not position.waits else []
        if faults and all(
            fault.kind is FaultKind.SOFT_TIMEOUT and fault.rank != rank for fault in faults
        ):
            # its peers wait for this rank, and their collectives began earlier than its own stall
            what = f"no progress for {stalled:.1f} s"
            iteration.report(
                Fault(rank, FaultKind.SOFT_TIMEOUT, what, time.time_ns(), self._state.initial_rank)
            )
