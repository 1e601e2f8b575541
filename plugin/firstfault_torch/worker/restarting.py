"""Calls the task function with in-process restarts, and records the faults from which the ranks go on."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from firstfault_torch.inprocess.call import CallWrapper
from firstfault_torch.inprocess.exception import HealthCheckError, RankLost, RestartAbort, RestartError
from firstfault_torch.inprocess.rank_assignment import RankDiscarded
from firstfault_torch.worker.recording import recorded

if TYPE_CHECKING:
    from collections.abc import Callable

    from firstfault_torch.engine import Engine
    from firstfault_torch.inprocess.call import Interruption
    from firstfault_torch.inprocess.options import InProcessRestart
    from firstfault_torch.worker.recording import WorkerMonitor

__all__ = ["Restarted", "call_with_restarts", "run_with_restarts"]

_ALONE = (HealthCheckError, RankLost, RankDiscarded)
"""With these one rank leaves, and the others go on."""


class Restarted(NamedTuple):
    """What a rank returned."""

    value: Any
    rank: int | None
    """Its rank in the last iteration; None for a reserve, which returns nothing."""


def run_with_restarts(engine: Engine, options: InProcessRestart, function: Callable[..., Any], *args: Any) -> Restarted:
    """Call ``function(*args)`` with restarts in a worker process; an exception is recorded and passes unchanged."""
    with recorded(engine) as monitor:
        return call_with_restarts(options, partial(function, *args), monitor)


def call_with_restarts(options: InProcessRestart, function: Callable[[], Any], monitor: WorkerMonitor) -> Restarted:
    """Call the function until all ranks have completed.

    Raises:
        BaseException: what the function raised last, if the ranks do not go on; a RestartAbort or RestartError on a
            rank whose function raised nothing of itself.
    """
    try:
        with CallWrapper(options, _Faults(monitor)) as call:
            value = call(function, (), {})
            return Restarted(value, call.state.active_rank)
    except RestartAbort as abort:
        error: BaseException = abort
        if isinstance(abort.__cause__, Exception) and not isinstance(abort.__cause__, RestartError):
            error = abort.__cause__  # the user's own, which tells more
    except RestartError as restart:
        monitor.others_go_on = isinstance(restart, _ALONE)
        error = restart
    except BaseException as own:  # noqa: BLE001 - it is raised below
        monitor.others_go_on = True
        error = own
    # outside of the handlers: they would become its context
    raise error


class _Faults:
    """Keeps an exception on record until it is known whether the ranks go on.

    Args:
        monitor: of this process.
    """

    def __init__(self, monitor: WorkerMonitor) -> None:
        self._monitor = monitor

    def raised(self, error: BaseException) -> None:
        """Record an exception as one that may still be handled."""
        self._monitor.in_flight.seen(error)

    def went_on(self, interruption: Interruption) -> None:
        """Withdraw it: the job goes on."""
        del interruption
        self._monitor.in_flight.reconcile(None)
