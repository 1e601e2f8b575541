"""The decorator that adds in-process restarts to a function, and one call of the function.

A call calls the function again in the same process after each fault, until all ranks have
completed.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import gc
import inspect
import itertools
import os
import threading
import time
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from typing_extensions import Self

from firstfault.model.failure import RESTARTED
from firstfault_inprocess.exception import (
    HealthCheckError,
    InternalError,
    RankLost,
    RestartAbort,
    RestartError,
    one_line,
)
from firstfault_inprocess.hooks import Compose, destroy_process_groups
from firstfault_inprocess.monitor.process import MonitorProcess
from firstfault_inprocess.monitor.thread import MonitorThread, find_own_error
from firstfault_inprocess.options import InProcessOptions
from firstfault_inprocess.progress import ProgressStamper, RankPhase, SharedProgress, find_position
from firstfault_inprocess.rank_assignment import Mode, RankAssignmentCtx, RankDiscarded, State
from firstfault_inprocess.store import (
    GONE,
    Fault,
    FaultKind,
    Iteration,
    IterationEnd,
    recovered_key,
    round_prefix,
)
from firstfault_inprocess.store_host import Connections, StoreHost
from firstfault_torch import watchdog
from firstfault_torch.compat.torch_worker import serve_env_rendezvous
from firstfault_torch.guard import logger, suppress_internal_errors, try_call
from firstfault_torch.time_limits import (
    SIGNAL_HANDLER_INTERVAL_SECONDS,
    THREAD_JOIN_TIMEOUT_SECONDS,
)

_TAKEN_FOR_LOST = "rank {} was considered lost, and the remaining ranks continue without it"
_LOST = "the store of the in-process restart is lost"
_calls = itertools.count()
_current: list[CallWrapper] = []
_lost: set[int] = set()
"""Ranks that were lost in calls of this process;
after that a further call can't number the remaining ranks.
"""


def current_call() -> CallWrapper | None:
    """Return the call that runs in this process; None outside of one."""
    return _current[-1] if _current else None


@dataclass(frozen=True)
class Interruption:
    """A fault from which the ranks continued."""

    iteration: int
    """The one that was interrupted."""
    faults: tuple[Fault, ...]
    """In the order in which they were reported."""
    world_before: int
    world_after: int
    seconds: float
    """From the moment at which this rank learned of the interruption,
    until it called the function again.
    """
    first: bool
    """Whether this rank is the one that speaks for all: the lowest that continues."""


class Observer(Protocol):
    """Learns of this rank's faults while they happen."""

    def raised(self, error: BaseException) -> None:
        """The function raised without being interrupted; the remaining ranks have been informed."""

    def recovered(self, interruption: Interruption) -> None:
        """All ranks that are left call the function again."""

    def collectives_begun(self) -> int | None:
        """Return how many collectives this rank has begun; None:
        unknown. Runs in another thread.
        """


class CallWrapper:
    """One call of a wrapped function; a parameter annotated with this class receives it.

        __init__    IDLE: fork the monitor process, find the store, meet all ranks -> RUNNING
        RUNNING     the function returns -> COMPLETED; raises or is interrupted -> ENDING
        COMPLETED   all ranks have returned -> return the value; a peer fails -> ENDING
        ENDING      abort, destroy groups, finalize, check health -> ARRIVED; a step raises -> LEFT
        ARRIVED     all ranks have arrived: new ranks, next iteration -> RUNNING; this rank was
                    given up as lost -> LEFT
        __exit__    CLOSED: the monitor process ends

    Raises:
        firstfault_inprocess.exception.RestartError: the call can't begin here.
    """

    def __init__(self, options: InProcessOptions, observer: Observer | None = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RestartError(
                "call the wrapped function in the main thread: only that can be interrupted"
            )
        if _current:
            raise RestartError(
                "don't call a wrapped function inside another one: its ranks couldn't rejoin"
            )
        if _lost:
            raise RestartError(
                f"rank {min(_lost)} was lost in an earlier call; call the function in new"
                " processes, or both in one"
            )
        if dist.is_initialized():
            raise RestartError(
                "call the wrapped function before init_process_group: it is called inside, once for"
                " each iteration"
            )
        self._options = options
        self._barrier_timeout = dt.timedelta(seconds=options.seconds("barrier_timeout"))
        self._observer = observer
        self._process = os.getpid()
        self._environment = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
        self.state = State.from_env()
        self._progress = SharedProgress()
        self._atomic = threading.RLock()
        self._connections = Connections()
        self._last_error: BaseException | None = None
        """What the function raised in the last iteration; None if it was interrupted."""
        self._unrecovered: list[Fault] = []
        """Faults since the function was last called again."""
        self._has_said_that_it_leaves = False
        self._iteration: Iteration | None = None
        self._prefix = f"{round_prefix()}/{next(_calls)}"
        self._stack = contextlib.ExitStack()
        # If a step below fails, the steps before it are undone in reverse order; `pop_all` hands
        # them to `__exit__`.
        with contextlib.ExitStack() as opening:
            # The forks come first, in StoreHost and MonitorProcess: their children must not inherit
            # a connection to the store, nor be forked while the stamping thread runs.
            meeting = StoreHost(options, self.state.rank, self._prefix)
            initial_rank = self.state.initial_rank
            self._monitor = MonitorProcess(
                self._progress,
                initial_rank,
                self._prefix,
                meeting.connect,
                options,
            )
            self._monitor.start()
            opening.callback(self._monitor.close)
            stamping = ProgressStamper(
                self._progress, options.seconds("progress_watchdog_interval")
            )
            opening.callback(stamping.end)
            self._store = meeting.begin()
            # A second connection: the monitor thread's wait blocks its connection for the whole
            # iteration.
            self._watching = meeting.connect()
            opening.callback(serve_env_rendezvous(self._meet))
            opening.callback(self._restore_environment)
            # Iteration -1 is only a barrier. The monitor process doesn't report a rank that dies in
            # phase IDLE: its peers raise BarrierTimeout here, or miss its heartbeats in iteration
            # 0.
            self._iteration = beginning = Iteration(
                self._store,
                self._prefix,
                -1,
                self.state.world_size,
            )
            beginning.arrive()
            beginning.await_all(self._barrier_timeout)
            self._stack = opening.pop_all()

    def __enter__(self) -> Self:
        _current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.remove(self)
        if os.getpid() != self._process:
            return  # a child that the function forked; monitor process and store are its parent's
        self._stack.close()
        # an exception that leaves holds this call in its frames: that must keep no connection open
        self.state = replace(self.state, fn_exception=None)
        self._last_error = self._iteration = self._store = self._watching = None

    # --- for the wrapped function -----------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """Number of the iteration, from 0: how often the function was called before."""
        return self.state.iteration

    def ping(self) -> None:
        """Report progress; after the first call in an iteration the timeouts
        count from the last call.

        It costs well under a microsecond.
        """
        self._progress.manual = time.monotonic()

    @contextlib.contextmanager
    def atomic(self) -> Iterator[None]:
        """Do not interrupt this block: the restart waits until it is left,
        at most `hard_timeout`.
        """
        # a forked child, in which the thread that may hold the lock isn't there
        if os.getpid() != self._process:
            yield
            return
        # The monitor thread holds the lock from the abort until the main thread has left the
        # function: a block that would begin in that time ends here with RankShouldRestart. in short
        # waits, because an interruption can't reach a thread that waits for a lock
        while not self._atomic.acquire(timeout=0.01):
            pass
        try:
            yield
        finally:
            self._atomic.release()

    @contextlib.contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """Let no time count in this block, such as a long save:
        neither `soft_timeout` nor `hard_timeout` ends it.
        """
        if os.getpid() != self._process:  # a forked child shares the worker's page
            yield
            return
        self._progress.unguarded += 1
        try:
            yield
        finally:
            self._progress.guard_again()

    # --- the call ---------------------------------------------------------------------------------

    def __call__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the function until all ranks have completed; return this rank's last result.

        Raises:
            RestartAbort: a limit was met, or the store was lost; its cause is the last exception of
                this rank.
            HealthCheckError: this rank isn't healthy.
            BaseException: what the function raised, if no restart handles it, such as SystemExit.
        """
        self._assign(frozenset())
        interruption: Interruption | None = None
        while True:
            value, interruption = self._iterate(partial(function, *args, **kwargs), interruption)
            if interruption is None:
                with suppress_internal_errors("calling `completion`"):
                    if self._options.completion is not None:
                        self._options.completion(self.state)
                return value
            gc.collect()

    def _iterate(
        self, function: Callable[[], Any], before: Interruption | None
    ) -> tuple[Any, Interruption | None]:
        """Call the function once; return its result, or how the iteration was interrupted."""
        state = self.state
        self._iteration = iteration = Iteration(
            self._store,
            self._prefix,
            state.iteration,
            state.world_size,
        )
        # Before the monitor thread starts: a peer may have interrupted this iteration already. The
        # thread then sets `interrupted` at once, and begin() would erase it.
        self._progress.begin(state.iteration, state.rank, state.world_size)
        os.environ.update(state.distributed_variables())
        monitor = MonitorThread(
            iteration.over(self._watching),
            self._progress,
            partial(self._abort, iteration.over(self._watching), state),
            self._options,
            self._atomic,
        )
        deadlines = watchdog.begun()
        try:
            value, error = monitor.call(partial(self._enter, function, before))
            if os.getpid() != self._process:  # a child that the function forked
                if error is not None:
                    raise error
                return value, None
            if error is None:
                # Before the store is called: outside of RUNNING a slow store doesn't count as a
                # stall of the function.
                self._progress.phase = RankPhase.COMPLETED
                # the thread sees that, too
                with contextlib.suppress(dist.DistNetworkError, dist.DistStoreError):
                    iteration.complete()
                error = self._await_completion(monitor, iteration)
                # A peer may have failed while this rank waited: `value` is then dropped, and this
                # rank restarts, too.
                if error is None and monitor.outcome is IterationEnd.COMPLETED:
                    return value, None
            watchdog.release_since(deadlines)  # the next iteration begins its own
            return None, self._recover(monitor, iteration, error)
        finally:
            iteration.close()
            monitor.close()

    def _enter(self, function: Callable[[], Any], before: Interruption | None) -> Any:
        """Initialize, check this rank's health, and call the function; a reserve waits."""
        options, state = self._options, self.state
        if options.initialize is not None:
            try:
                options.initialize(state)
            except RestartAbort as abort:
                if abort.__cause__ is None and before is not None:
                    others = RestartError("; ".join(map(str, before.faults[:3])))
                    raise abort from others if self._last_error is None else self._last_error
                raise
        if self._last_error is not None:
            self._last_error = None
            gc.collect()  # it held the last iteration's frames, and all that they hold
        if state.mode is Mode.INITIALIZED:
            raise RestartAbort(
                f"the rank assignment left rank {state.initial_rank} neither active nor a reserve; "
                "add ActivateAllRanks, or a rank filter"
            )
        if state.active_world_size == 0:
            raise RestartAbort(
                f"no rank is active: the rank assignment left none of {state.world_size} ranks"
            )
        self._check_health()
        if before is not None:
            # Only now: until here a hook or the health check may still end this rank.
            self._tell_recovery(
                replace(before, seconds=time.monotonic() - before.seconds, first=state.rank == 0)
            )
            gc.collect()  # until then an observer held it, too
        return function() if state.mode is Mode.ACTIVE else None

    def _tell_recovery(self, interruption: Interruption) -> None:
        """Report that the ranks have recovered from a fault,
        to the agents of lost ranks and to the observer.
        """
        self._unrecovered = []
        logger.warning(
            f"{RESTARTED} %d: %s; %d of %d ranks continue",
            interruption.iteration + 1,
            "; ".join(map(str, interruption.faults[:3])) or "interrupted",
            interruption.world_after,
            interruption.world_before,
        )
        if interruption.first:
            # The lowest rank writes for all. The agent of a lost rank reads this key later: without
            # it, the death counts as a failure of the job (`SurvivingWorkers`).
            for fault in interruption.faults:
                if fault.kind in GONE:
                    self._store.set(recovered_key(fault.initial_rank), str(interruption.iteration))
            with suppress_internal_errors("reading where the ranks were"):
                ended = Iteration(
                    self._store,
                    self._prefix,
                    interruption.iteration,
                    interruption.world_before,
                )
                interruption = replace(interruption, faults=ended.located(interruption.faults))
        if self._observer is not None:
            with suppress_internal_errors("recording that the ranks have recovered"):
                self._observer.recovered(interruption)

    def _check_health(self) -> None:
        if self._options.health_check is None:
            return
        try:
            self._options.health_check(self.state)
        except Exception as error:
            raise HealthCheckError(
                f"rank {self.state.initial_rank} is not healthy: {error}"
            ) from error

    def _await_completion(
        self, monitor: MonitorThread, iteration: Iteration
    ) -> BaseException | None:
        """Wait for the remaining ranks; return an error if they take too long. A reserve
        waits without a limit.
        """
        limit = (
            self._options.seconds("completion_timeout")
            if self.state.mode is Mode.ACTIVE
            else float("inf")
        )
        deadline = time.monotonic() + limit
        while not monitor.known.wait(SIGNAL_HANDLER_INTERVAL_SECONDS):
            if time.monotonic() > deadline:
                late = RestartError(
                    f"not all ranks completed within {limit:g} s (completion_timeout)"
                )
                # The last rank may complete at the same moment: the store keeps the outcome that
                # was set first.
                if (
                    iteration.interrupt(self._fault(FaultKind.EXCEPTION, late))
                    is IterationEnd.INTERRUPTED
                ):
                    return late
                deadline = float("inf")  # they have, just now
        return None

    # --- after a fault ----------------------------------------------------------------------------

    def _recover(
        self,
        monitor: MonitorThread,
        iteration: Iteration,
        error: BaseException | None,
    ) -> Interruption:
        """End the interrupted iteration on this rank,
        and begin the next one when all others have.
        """
        try:
            return self._end_iteration(monitor, iteration, error)
        except (dist.DistNetworkError, dist.DistStoreError) as lost:
            # This rank can't inform its peers, so `_leave` is skipped. LEFT ends its heartbeats and
            # keeps its monitor process from reporting a death; peers that still reach the store
            # miss the heartbeats.
            self._progress.phase = RankPhase.LEFT
            why = RestartAbort(f"{_LOST}: {str(lost).partition(chr(10))[0]}")
            raise why from lost if self._last_error is None else self._last_error
        except BaseException as leaving:
            self._leave(iteration, leaving)
            raise

    def _end_iteration(
        self,
        monitor: MonitorThread,
        iteration: Iteration,
        error: BaseException | None,
    ) -> Interruption:
        options, state = self._options, self.state
        self._last_error = own = find_own_error(error, is_interrupted=monitor.known.is_set())
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
            and not monitor.aborted.is_set()
            and (own is not None or not monitor.known.is_set())
        ):
            # first, so that all peers abort in the meantime
            self._has_said_that_it_leaves = leaves
            iteration.interrupt(
                self._fault(FaultKind.LEFT if leaves else FaultKind.EXCEPTION, error)
            )
            if self._observer is not None and isinstance(own, Exception):
                with suppress_internal_errors("recording a fault"):
                    self._observer.raised(own)
        # The monitor thread may still be aborting the process groups that are destroyed below.
        monitor.aborted.wait(options.seconds("hard_timeout"))
        if monitor.outcome is IterationEnd.LOST:
            raise RestartAbort(f"{_LOST}: the process that hosted it is gone") from own
        if own is not None and leaves:
            raise own
        # Again, after the monitor thread: the function may have opened a connection since, in
        # init_process_group.
        self._connections.shut_down()
        destroy_process_groups(options.seconds("soft_timeout"))
        self.state = replace(state, fn_exception=own)
        if options.finalize is not None:
            try:
                options.finalize(self.state)
            except (dist.DistNetworkError, dist.DistStoreError) as store_error:
                # it isn't this call's own store
                raise RuntimeError(f"`finalize` failed: {one_line(store_error)}") from store_error
        self._check_health()
        # A peer's monitor process may have missed this rank's heartbeats and arrived for it. A
        # second arrival would open the barrier before another rank has ended its iteration.
        if state.rank in iteration.gone():
            raise RankLost(
                _TAKEN_FOR_LOST.format(state.initial_rank)
            ) from own  # another one has arrived for it
        # ARRIVED after arrive(): if this process dies in between, its monitor process arrives once
        # more, and the barrier may open one rank early. In the reverse order no rank might arrive,
        # and all ranks would wait for barrier_timeout.
        iteration.arrive()
        self._progress.phase = RankPhase.ARRIVED
        gone = iteration.await_all(self._barrier_timeout)
        self._unrecovered += iteration.faults()
        faults = tuple(self._unrecovered)
        # The next iteration's thread uses the same connection.
        if not monitor.join(THREAD_JOIN_TIMEOUT_SECONDS):
            raise InternalError("the thread that monitors the iteration doesn't end")
        world, left = state.world_size, state.world_size - len(gone)
        interruption = Interruption(state.iteration, faults, world, left, learned, first=False)
        # Checked again: this rank may have been given up after the first check.
        if state.rank in gone:
            raise RankLost(_TAKEN_FOR_LOST.format(state.initial_rank)) from own
        _lost.update(gone)
        self._assign(gone)
        self.state = self.state.next()
        return interruption

    def _leave(self, iteration: Iteration, error: BaseException) -> None:
        """Take no part in further iterations; the remaining ranks continue."""
        if isinstance(error, RankDiscarded | RankLost):
            self._progress.phase = RankPhase.LEFT  # the remaining ranks know it
        with suppress_internal_errors("leaving an in-process restart"):
            fault = self._fault(FaultKind.LEFT, error)
            if self._progress.phase == RankPhase.ARRIVED:
                # The barrier may be open already. In the next iteration nobody arrives for this
                # rank until its heartbeats are missed. the remaining ranks count on this one: they
                # learn in the next iteration that it left
                Iteration(
                    self._store,
                    self._prefix,
                    iteration.number + 1,
                    iteration.world_size,
                ).interrupt(fault)
            elif self._progress.phase != RankPhase.LEFT:
                if not self._has_said_that_it_leaves:
                    iteration.interrupt(fault)
                # leave() before arrive(): the last arrival reads who is gone, and this may be the
                # last one. LEFT before arrive(): otherwise the monitor process might arrive a
                # second time for this rank.
                iteration.leave(self.state.rank)
                self._progress.phase = RankPhase.LEFT
                iteration.arrive()
        with suppress_internal_errors("calling `terminate`"):
            if self._options.terminate is not None:
                self._options.terminate(self.state)

    def _assign(self, gone: Collection[int]) -> None:
        """Give this rank its place among those that continue."""
        iteration: Any = self._iteration
        # All ranks get the same `gone`, so each computes its own new rank. The keys are those of
        # the ended iteration.
        exchange = partial(iteration.exchange, self._barrier_timeout)
        context = RankAssignmentCtx(self.state, iteration.part("assignment"), set(gone), exchange)
        parts = [
            part
            for part in (self._options.rank_filter, self._options.rank_assignment)
            if part is not None
        ]
        self.state = Compose(*parts)(context).state

    def _fault(self, kind: FaultKind, error: BaseException) -> Fault:
        return Fault(
            self.state.rank,
            kind,
            one_line(error),
            time.time_ns(),
            self.state.initial_rank,
        )

    def _abort(self, iteration: Iteration, state: Any) -> None:
        """Unblock the main thread; if this rank makes no progress, write its position first."""
        # In the monitor thread, before the abort: the abort moves the main thread away from where
        # it hangs.
        with suppress_internal_errors("storing where a rank is"):
            stalled = self._progress.stalled_seconds
            if stalled >= self._options.seconds("soft_timeout") / 2:
                self._locate(iteration, stalled)
        try:
            if self._options.abort is not None:
                self._options.abort(state)
        finally:
            self._connections.shut_down()

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
                Fault(rank, FaultKind.SOFT_TIMEOUT, what, time.time_ns(), self.state.initial_rank)
            )

    # --- the store --------------------------------------------------------------------------------

    def _meet(self, timeout: dt.timedelta | None) -> tuple[Any, int, int]:
        """Return where process groups of this iteration meet,
        on a connection that ends with the iteration.
        """
        iteration, state = self._iteration, self.state
        if iteration is None:
            raise InternalError("a process group was made before the first iteration")
        # A separate connection: `shut_down` ends a wait on it without breaking this rank's own.
        connection = self._connections.open(self._store.clone, getattr(self._store, "port", None))
        if timeout is not None:
            connection.set_timeout(timeout)
        return (
            iteration.over(connection).part("env"),
            state.active_rank or 0,
            state.active_world_size or 1,
        )

    def _restore_environment(self) -> None:
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Wrapper(InProcessOptions):
    """Calls a function again in the same processes after a fault on any rank,
    without the ranks that are gone.

    On a fault all ranks abort their collectives, agree on who continues, get new ranks and a new
    world size, and call the function again, until all have completed or a limit is met. Decorate
    the function that calls ``init_process_group``; all ranks call it in their main thread. A
    parameter annotated with `CallWrapper` receives the call.

    Raises:
        firstfault.errors.UsageError: an option isn't valid.
    """

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with restarts; the function itself if they aren't enabled.

        It may be called again, but not within a call, nor after a rank was lost.
        """
        if not self.enabled:
            return function
        names = _parameters_for_the_call(function)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with CallWrapper(self) as call:
                bound = inspect.signature(function).bind_partial(*args, **kwargs)
                bound.arguments.update(dict.fromkeys(names, call))
                return call(function, bound.args, bound.kwargs)

        return wrapped


def _parameters_for_the_call(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that are annotated with `CallWrapper`,
    or with that or None.
    """
    annotations = getattr(function, "__annotations__", {})
    if any(isinstance(annotation, str) for annotation in annotations.values()):
        hints, _ = try_call(lambda: typing.get_type_hints(function), Exception)
        if hints is None:  # the annotations name what isn't there
            return [name for name, annotation in annotations.items() if "CallWrapper" in annotation]
        annotations = hints
    found = [
        name
        for name, kind in annotations.items()
        if kind is CallWrapper or CallWrapper in typing.get_args(kind)
    ]
    return [name for name in found if name != "return"]
