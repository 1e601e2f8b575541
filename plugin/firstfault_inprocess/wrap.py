"""The decorator that adds in-process restarts to a function, and one call of the function.

A call calls the function again in the same process after each fault, until all ranks have
completed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import threading
import time
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from typing_extensions import Self

from firstfault_inprocess.call.rank_hooks import RankHooks
from firstfault_inprocess.call.rank_iteration import STORE_LOST_MESSAGE, RankIteration
from firstfault_inprocess.call.recovery import Interruption, Observer, report_recovery
from firstfault_inprocess.call.session import CallSession
from firstfault_inprocess.exception import RestartAbort, RestartError
from firstfault_inprocess.hooks import destroy_process_groups
from firstfault_inprocess.options import InProcessOptions
from firstfault_inprocess.rank_assignment import Mode, State
from firstfault_inprocess.store import Fault
from firstfault_torch import watchdog
from firstfault_torch.guard import try_call

_current: list[CallWrapper] = []
_lost: set[int] = set()
"""Ranks that were lost in calls of this process;
after that a further call can't number the remaining ranks.
"""


def current_call() -> CallWrapper | None:
    """Return the call that runs in this process, or None outside of a call."""
    return _current[-1] if _current else None


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
        _check_that_a_call_may_begin()
        self._options = options
        self._observer = observer
        self._hooks = RankHooks(options, State.from_env())
        self._last_error: BaseException | None = None
        """What the function raised in the last iteration, or None if it was interrupted."""
        self._unrecovered: list[Fault] = []
        """Faults since the function was last called again."""
        self._session = CallSession(options, self.state)

    def __enter__(self) -> Self:
        _current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.remove(self)
        if self._session.is_in_forked_child:
            return
        self._session.close()
        # an exception that leaves holds this call in its frames: that must keep no connection open
        self._hooks.drop_exception()
        self._last_error = None

    # --- for the wrapped function -----------------------------------------------------------------

    @property
    def state(self) -> State:
        """The state of this rank."""
        return self._hooks.state

    @property
    def iteration(self) -> int:
        """Number of the iteration, from 0: how often the function was called before."""
        return self.state.iteration

    def ping(self) -> None:
        """Report progress; after the first call in an iteration the timeouts
        count from the last call.

        It costs well under a microsecond.
        """
        self._session.progress.manual = time.monotonic()

    @contextlib.contextmanager
    def atomic(self) -> Iterator[None]:
        """Do not interrupt this block: the restart waits until it is left,
        at most `hard_timeout`.
        """
        # a forked child, in which the thread that may hold the lock isn't there
        if self._session.is_in_forked_child:
            yield
            return
        # The monitor thread holds the lock from the abort until the main thread has left the
        # function: a block that would begin in that time ends here with RankShouldRestart. in short
        # waits, because an interruption can't reach a thread that waits for a lock
        while not self._session.atomic_lock.acquire(timeout=0.01):
            pass
        try:
            yield
        finally:
            self._session.atomic_lock.release()

    @contextlib.contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """Suspend `soft_timeout` and `hard_timeout` in this block, such as a long save."""
        if self._session.is_in_forked_child:  # it shares the worker's page
            yield
            return
        progress = self._session.progress
        progress.unguarded += 1
        try:
            yield
        finally:
            progress.guard_again()

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
        self._hooks.assign(self._session, frozenset())
        interruption: Interruption | None = None
        while True:
            value, interruption = self._iterate(partial(function, *args, **kwargs), interruption)
            if interruption is None:
                self._hooks.complete()
                return value
            gc.collect()

    def _iterate(
        self, function: Callable[[], Any], before: Interruption | None
    ) -> tuple[Any, Interruption | None]:
        """Call the function once; return its result, or how the iteration was interrupted."""
        iteration = RankIteration(self._session, self.state, self._observer)
        deadlines = watchdog.begun()
        try:
            value, error = iteration.call(partial(self._enter, function, before))
            if self._session.is_in_forked_child:
                if error is not None:
                    raise error
                return value, None
            if error is None:
                error = iteration.complete()
                # A peer may have failed while this rank waited: `value` is then dropped, and this
                # rank restarts, too.
                if error is None and iteration.is_completed:
                    return value, None
            watchdog.release_since(deadlines)  # the next iteration begins its own
            return None, self._recover(iteration, error)
        finally:
            iteration.close()

    def _enter(self, function: Callable[[], Any], before: Interruption | None) -> Any:
        """Initialize, check this rank's health, and call the function; a reserve waits."""
        # The cause is kept in no variable: it would hold the last iteration's frames.
        self._hooks.initialize(self._get_restart_cause(before))
        if self._last_error is not None:
            self._last_error = None
            gc.collect()  # it held the last iteration's frames, and all that they hold
        self._hooks.check_assignment()
        self._hooks.check_health()
        state = self.state
        if before is not None:
            # Only now: until here a hook or the health check may still end this rank.
            self._unrecovered = []
            report_recovery(
                replace(before, seconds=time.monotonic() - before.seconds, first=state.rank == 0),
                self._session,
                self._observer,
            )
            gc.collect()  # until then an observer held it, too
        return function() if state.mode is Mode.ACTIVE else None

    def _get_restart_cause(self, before: Interruption | None) -> BaseException | None:
        if before is None or self._last_error is not None:
            return self._last_error
        return RestartError("; ".join(map(str, before.faults[:3])))

    # --- after a fault ----------------------------------------------------------------------------

    def _recover(self, iteration: RankIteration, error: BaseException | None) -> Interruption:
        """End the interrupted iteration on this rank,
        and begin the next one when all others have.
        """
        try:
            return self._end_iteration(iteration, error)
        except (dist.DistNetworkError, dist.DistStoreError) as lost:
            # This rank can't inform its peers, so `leave` is skipped.
            iteration.lose_store()
            why = RestartAbort(f"{STORE_LOST_MESSAGE}: {str(lost).partition(chr(10))[0]}")
            raise why from lost if self._last_error is None else self._last_error
        except BaseException as leaving:
            iteration.leave(leaving)
            self._hooks.terminate()
            raise

    def _end_iteration(self, iteration: RankIteration, error: BaseException | None) -> Interruption:
        world_before = self.state.world_size
        self._last_error = own = iteration.find_own_error(error)
        learned = iteration.end(error, own)
        # Again, after the monitor thread: the function may have opened a connection since, in
        # init_process_group.
        self._session.connections.shut_down()
        destroy_process_groups(self._options.seconds("soft_timeout"))
        self._hooks.finalize(own)
        self._hooks.check_health()
        gone = iteration.arrive(own)
        self._unrecovered += iteration.faults()
        interruption = Interruption(
            iteration=self.state.iteration,
            faults=tuple(self._unrecovered),
            world_before=world_before,
            world_after=world_before - len(gone),
            seconds=learned,
            first=False,
        )
        _lost.update(gone)
        self._hooks.assign(self._session, gone)
        self._hooks.begin_next()
        return interruption


def _check_that_a_call_may_begin() -> None:
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
        """Return the function with restarts, or the function itself if they aren't enabled.

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
    return [
        name
        for name, kind in annotations.items()
        if name != "return" and (kind is CallWrapper or CallWrapper in typing.get_args(kind))
    ]
