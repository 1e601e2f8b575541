"""NVIDIA's in-process restart, whose faults firstfault keeps on record; needs the extra ``nvrx``.

    from firstfault_torch.inprocess.nvrx import Wrapper  # instead of nvidia_resiliency_ext.inprocess.Wrapper

It uses the hooks of `nvidia_resiliency_ext.inprocess.Wrapper`, release 0.4.1. firstfault's own
`firstfault_torch.inprocess.Wrapper` does more: the ranks also survive the loss of one under our agent.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from firstfault.errors import UsageError
from firstfault_torch.guard import guarded
from firstfault_torch.inprocess.exception import one_line
from firstfault_torch.inprocess.job import RecordedFaults, root_of
from firstfault_torch.inprocess.store import GONE, Fault, FaultKind
from firstfault_torch.inprocess.wrap import Interruption
from firstfault_torch.worker.recording import current_monitor

try:
    from nvidia_resiliency_ext import inprocess
except ModuleNotFoundError as missing:
    if not str(missing.name).startswith("nvidia_resiliency_ext"):
        raise
    raise UsageError(
        "firstfault_torch.inprocess.nvrx needs NVIDIA's package: pip install 'firstfault[nvrx]'"
    ) from missing


_KINDS = {
    "EXCEPTION": FaultKind.EXCEPTION,
    "BASE_EXCEPTION": FaultKind.LEFT,
    "SOFT_TIMEOUT": FaultKind.SOFT_TIMEOUT,
    "HARD_TIMEOUT": FaultKind.HARD_TIMEOUT,
    "UNRESPONSIVE": FaultKind.UNRESPONSIVE,
}
"""Others, such as a monitor process that failed, count as the end of the rank's process."""


class Wrapper(inprocess.Wrapper):
    """NVIDIA's ``Wrapper``, with the same arguments and behaviour.

    While firstfault records in this process, an exception of the function is a document that is withdrawn when the
    ranks call the function again, and each restart is on record (``firstfault show --recovered URI``). If the restarts
    end with a ``RestartAbort``, its cause is this rank's last exception.

    Args:
        options: as of ``nvidia_resiliency_ext.inprocess.Wrapper``.

    Raises:
        TypeError, ValueError: as it does.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._call = call = _Call()
        # a composition calls its last member first
        abort = _Abort(call)
        self.abort: Any = abort if self.abort is None else inprocess.Compose(self.abort, abort)
        self.rank_assignment: Any = inprocess.Compose(self.rank_assignment, _RankAssignment(call))
        initialize = _Initialize(call)
        self.initialize: Any = initialize if self.initialize is None else inprocess.Compose(initialize, self.initialize)

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with restarts; the function itself if they are not enabled."""
        if not self.enabled:
            return fn
        call = self._call
        with_restarts = super().__call__(call.noting(fn))

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            call.begin()
            try:
                return with_restarts(*args, **kwargs)
            except inprocess.exception.RestartAbort as abort:
                if abort.__cause__ is None:
                    abort.__cause__ = call.error
                raise
            finally:
                call.error = None

        return wrapped


class _Call:
    """What this rank saw of one call of the wrapped function."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the call before."""
        monitor = current_monitor()
        self._records = RecordedFaults(monitor) if monitor is not None else None
        self.error: BaseException | None = None
        """What the function raised in the last iteration; None if it was interrupted."""
        self.interrupted: float | None = None
        """When this rank learned of the interruption, by the monotonic clock."""
        self._iteration = -1
        self._what = ""
        self._wall_ns = 0
        self._faults: tuple[Fault, ...] = ()
        self._world_before = 0

    def noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function; its exceptions are recorded before the wrapper tells the other ranks."""

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                with guarded("recording a fault"):
                    self._note(error)
                raise

        return noted

    def _note(self, error: Exception) -> None:
        self.interrupted = self.interrupted or time.monotonic()
        self.error, self._what, self._wall_ns = error, one_line(error), time.time_ns()
        if self._records is not None:
            self._records.raised(error)

    def ends(self, context: Any) -> None:
        """Note which ranks failed in the iteration that ends."""
        state, store = context.state, context.store
        self._world_before = state.world_size
        records = store.get_interruption_records()
        initial = [int(rank) for rank in store.get_initial_ranks([record.rank for record in records])]
        self._faults = tuple(
            Fault(
                record.rank,
                _KINDS.get(record.interruption.name, FaultKind.TERMINATED),
                self._what if first == state.initial_rank else "",
                self._wall_ns if first == state.initial_rank else time.time_ns(),
                first,
            )
            for record, first in zip(records, initial, strict=True)
        )

    def continues(self, state: Any) -> None:
        """Keep the restart on record: on the rank that failed, which knows why, or on rank 0 if that one is gone."""
        before, self._iteration = self._iteration, state.iteration
        self.error = None
        if self._records is None or state.iteration == before or before < 0:
            return
        root = root_of(self._faults)
        speaks = state.rank == 0 if root is None or root.kind in GONE else root.initial_rank == state.initial_rank
        seconds = time.monotonic() - self.interrupted if self.interrupted is not None else 0.0
        self._records.recovered(
            Interruption(before, self._faults, self._world_before, state.world_size, seconds, first=speaks)
        )
        self.interrupted, self._what, self._wall_ns, self._faults = None, "", 0, ()

    @property
    def was_called(self) -> bool:
        """Whether the function's first iteration has begun."""
        return self._iteration >= 0


class _Abort(inprocess.abort.Abort):
    def __init__(self, call: _Call) -> None:
        self._call = call

    def __call__(self, state: Any) -> Any:
        self._call.interrupted = self._call.interrupted or time.monotonic()
        return state


class _RankAssignment(inprocess.rank_assignment.RankAssignment):
    def __init__(self, call: _Call) -> None:
        self._call = call

    def __call__(self, ctx: Any) -> Any:
        if self._call.was_called:
            with guarded("noting the faults of an iteration"):
                self._call.ends(ctx)
        return ctx


class _Initialize(inprocess.initialize.Initialize):
    def __init__(self, call: _Call) -> None:
        self._call = call

    def __call__(self, state: Any) -> Any:
        with guarded("keeping a record of a restart"):
            self._call.continues(state)
        return state
