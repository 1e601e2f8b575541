"""An adapter that records the faults of NVIDIA's in-process restart; needs the extra ``nvrx``.

    from firstfault_inprocess.nvrx import Wrapper  # instead of
    nvidia_resiliency_ext.inprocess.Wrapper

It uses the hooks of `nvidia_resiliency_ext.inprocess.Wrapper`, releases 0.4.1 and 0.7.0.
firstfault's own `firstfault_inprocess.Wrapper` does more: the ranks also survive the loss of one
under our agent.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from firstfault.errors import UsageError
from firstfault_inprocess.call.recovery import Interruption
from firstfault_inprocess.exception import one_line
from firstfault_inprocess.job import RecordedFaults, find_root_fault
from firstfault_inprocess.store import GONE, Fault, FaultKind
from firstfault_torch.guard import suppress_internal_errors
from firstfault_torch.worker.worker_monitor import current_monitor

try:
    from nvidia_resiliency_ext import inprocess
except ModuleNotFoundError as missing:
    if not str(missing.name).startswith("nvidia_resiliency_ext"):
        raise
    raise UsageError(
        "firstfault_inprocess.nvrx needs NVIDIA's package: pip install 'firstfault[nvrx]'"
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

    While firstfault records in this process, an exception of the function is a document that is
    withdrawn when the ranks call the function again, and each restart is on record (``firstfault
    show --recovered URI``). If the restarts end with a ``RestartAbort``, its cause is this rank's
    last exception.

    Raises:
        TypeError, ValueError: as it does.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._call = call = _Call()
        # NVRx offers no observer: firstfault's hooks note the time of the abort, the faults between
        # two iterations, and that the function is about to be called again. a composition calls its
        # last member first
        self.abort: Any = (
            call.aborts if self.abort is None else inprocess.Compose(self.abort, call.aborts)
        )
        self.rank_assignment: Any = inprocess.Compose(self.rank_assignment, call.ends)
        self.initialize: Any = (
            call.continues
            if self.initialize is None
            else inprocess.Compose(call.continues, self.initialize)
        )

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with restarts, or the function itself if they aren't enabled."""
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
    """What the wrapper's hooks reported on this rank during one call of the wrapped function."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the call before."""
        monitor = current_monitor()
        self._records = RecordedFaults(monitor) if monitor is not None else None
        self.error: BaseException | None = None
        """What the function raised in the last iteration, or None if it was interrupted."""
        self._interrupted: float | None = None
        """When this rank learned of the interruption, by the monotonic clock."""
        self._iteration = -1
        self._what = ""
        self._wall_ns = 0
        self._faults: tuple[Fault, ...] = ()
        self._world_before = 0

    def noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function; its exceptions are recorded before the wrapper
        informs the remaining ranks.
        """

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                with suppress_internal_errors("recording a fault"):
                    self.error = error
                    self._what = one_line(error)
                    self._wall_ns = time.time_ns()
                    self.aborts(None)
                    if self._records is not None:
                        self._records.raised(error)
                raise

        return noted

    def aborts(self, state: Any) -> Any:
        """Note when the iteration was interrupted: the first hook of `abort`."""
        # On the rank that raised, `noting` has set it before NVRx's thread calls this hook: the
        # earlier time counts.
        self._interrupted = self._interrupted or time.monotonic()
        return state

    def ends(self, context: Any) -> Any:
        """Note which ranks failed in the iteration that ends: the first rank assignment,
        also before iteration 0.
        """
        # NVRx also assigns ranks before the first iteration, which has no faults.
        if self._iteration >= 0:
            with suppress_internal_errors("noting the faults of an iteration"):
                state, store = context.state, context.store
                self._world_before = state.world_size
                records = store.get_interruption_records()
                initial = [
                    int(rank)
                    for rank in store.get_initial_ranks([record.rank for record in records])
                ]
                self._faults = tuple(
                    Fault(
                        record.rank,
                        _KINDS.get(record.interruption.name, FaultKind.PROCESS_EXITED),
                        self._what if first == state.initial_rank else "",
                        self._wall_ns if first == state.initial_rank else time.time_ns(),
                        first,
                    )
                    for record, first in zip(records, initial, strict=True)
                )
        return context

    def continues(self, state: Any) -> Any:
        """Keep the restart on record: the last hook of `initialize`."""
        with suppress_internal_errors("keeping a record of a restart"):
            self._record(state)
        return state

    def _record(self, state: Any) -> None:
        """Record on the rank that failed, which knows why, or on rank 0 if that one is gone."""
        before, self._iteration = self._iteration, state.iteration
        self.error = None
        # `initialize` runs before each call of the function. A higher number than before is a
        # restart.
        if self._records is None or state.iteration == before or before < 0:
            return
        root = find_root_fault(self._faults)
        speaks = (
            state.rank == 0
            if root is None or root.kind in GONE
            else root.initial_rank == state.initial_rank
        )
        seconds = time.monotonic() - self._interrupted if self._interrupted is not None else 0.0
        interruption = Interruption(
            before,
            self._faults,
            self._world_before,
            state.world_size,
            seconds,
            first=speaks,
        )
        self._records.recovered(interruption)
        self._interrupted, self._what, self._wall_ns, self._faults = None, "", 0, ()
