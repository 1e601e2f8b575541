"""Restarts under firstfault's agent: a task's option,
and the record of the faults from which the ranks continue.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from firstfault.layout import ROSTER, restart_record_name
from firstfault.model import Place, RestartKind, RestartRecord
from firstfault_inprocess.call.recovery import Interruption
from firstfault_inprocess.exception import InternalError, RestartAbort, RestartError
from firstfault_inprocess.options import InProcessOptions
from firstfault_inprocess.store import BarrierTimeout, Fault, FaultKind
from firstfault_inprocess.wrap import CallWrapper, current_call
from firstfault_torch.guard import call_with_timeout, try_call

if TYPE_CHECKING:
    from firstfault_inprocess.survivors import SurvivingWorkers
    from firstfault_torch.agent.local_workers import LocalWorkers
    from firstfault_torch.agent.reporter import Reporter
    from firstfault_torch.engine import Engine
    from firstfault_torch.worker.worker_monitor import WorkerMonitor

_FATAL_KINDS = frozenset({FaultKind.PROCESS_EXITED, FaultKind.HARD_TIMEOUT, FaultKind.UNRESPONSIVE})
_HANG_KINDS = frozenset({FaultKind.SOFT_TIMEOUT, FaultKind.HARD_TIMEOUT})
_ERRORS_OF_ALL_RANKS = (BarrierTimeout, InternalError)
"""With these all ranks end; with other errors of a restart one rank leaves, and the rest continue.
"""
_NUMBERS_PER_ROUND = 1000
"""Added to an iteration's number for each round before."""


class Restarted(NamedTuple):
    """What a rank returned."""

    value: Any
    rank: int | None
    """Its rank in the last iteration, or None for a reserve, which returns nothing."""


@dataclass(frozen=True)
class InProcessRestart(InProcessOptions):
    """The options of a task's restarts, and what the agent and the workers need of them."""

    def run(self, engine: Engine, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` with restarts in a worker process;
        an exception is recorded and passes unchanged.
        """
        from firstfault_torch.worker.worker_monitor import (  # noqa: PLC0415 - only firstfault's agent needs it
            recorded,
        )

        with recorded(engine) as monitor:
            return self.call(partial(function, *args), monitor)

    def call(self, function: Callable[[], Any], monitor: WorkerMonitor) -> Restarted:
        """Call a function with restarts in a worker that already records,
        until all ranks have completed.

        Raises:
            BaseException: what the function raised last, if the ranks don't continue; a
                RestartAbort or RestartError on a rank where the function itself raised nothing.
        """

        def called() -> Restarted:
            with CallWrapper(self, RecordedFaults(monitor)) as call:
                return Restarted(call(function, (), {}), call.state.active_rank)

        result, error = try_call(called)
        if error is None:
            return cast("Restarted", result)
        # The agent must learn whether its other workers continue. RestartAbort: all ranks end
        # alike. A plain RestartError or one of `_ERRORS_OF_ALL_RANKS`: the call can't continue on
        # any rank. Any other error takes out only this rank.
        if isinstance(error, RestartAbort):
            cause = error.__cause__
            if isinstance(cause, Exception) and not isinstance(cause, RestartError):
                raise cause  # the user's own, which has the details
        elif isinstance(error, RestartError):
            monitor.others_continue = type(error) is not RestartError and not isinstance(
                error, _ERRORS_OF_ALL_RANKS
            )
        else:
            monitor.others_continue = True
        raise error

    def by_last_rank(self, results: Mapping[int, Restarted | None]) -> dict[int, Any]:
        """Return what the workers returned, by the rank that each had in the last iteration."""
        values = {
            item.rank: item.value
            for item in results.values()
            if item is not None and item.rank is not None
        }
        # none: each of them called sys.exit(0)
        return values or dict.fromkeys(results)

    def survivors(
        self,
        workers: LocalWorkers,
        rank_of: Callable[[int], int | None],
        reporter: Reporter,
    ) -> SurvivingWorkers:
        """Return the object that monitors the workers of a node in place of torch."""
        from firstfault_inprocess.survivors import (  # noqa: PLC0415 - only the agent needs it
            SurvivingWorkers,
        )

        return SurvivingWorkers(workers, rank_of, reporter)


class RecordedFaults:
    """Keeps an exception on record until it is known whether the ranks continue."""

    def __init__(self, monitor: WorkerMonitor) -> None:
        self._monitor = monitor
        monitor.in_flight.without_async_exceptions = _block_interruptions

    def raised(self, error: BaseException) -> None:
        """Record an exception as one that may still be handled."""
        # Kept back, not discarded: if the ranks don't continue, it becomes this worker's document.
        self._monitor.in_flight.record_seen(error)
        self._monitor.in_flight.keep_handled(error)

    @staticmethod
    def collectives_begun() -> int | None:
        """Return how many collectives this rank has begun, or None without a flight recorder."""
        from firstfault_torch.worker.process_state import (  # noqa: PLC0415 - as below
            read_collective_progress,
        )

        groups = read_collective_progress()
        return sum(group.enqueued for group in groups) if groups else None

    def recovered(self, interruption: Interruption) -> None:
        """Withdraw it: the job continues. One rank keeps a record of the restart,
        in the background.
        """
        self._monitor.in_flight.withdraw_kept()
        node_context, place = self._monitor.node_context, self._monitor.place
        if interruption.first and node_context is not None:
            # they import protobuf, which only a recording worker has loaded
            from firstfault.wire.json_schemas import restart_to_json  # noqa: PLC0415
            from firstfault_torch.node.document_writer import put_on_node  # noqa: PLC0415

            record = _record(interruption, place)
            name = restart_record_name(record.kind.value, record.number, place.group_rank or 0)
            data = restart_to_json(record)
            deadline = node_context.upload_deadline_seconds
            put = partial(put_on_node, f"{ROSTER}/{name}", data, node_context, deadline)
            # 0 s: start the upload in a thread and don't wait. The rank is about to call the
            # function again.
            call_with_timeout(put, 0, "keeping a record of a restart")


def _block_interruptions() -> AbstractContextManager[None]:
    call = current_call()
    return call.atomic() if call is not None else nullcontext()


def _record(interruption: Interruption, place: Place) -> RestartRecord:
    root = find_root_fault(interruption.faults)
    return RestartRecord(
        kind=RestartKind.IN_PROCESS,
        number=interruption.iteration + _NUMBERS_PER_ROUND * place.round,
        headline=str(root) if root is not None else "",
        restart=True,
        reason=f"the ranks that were left called the function again, as {place.node} reports",
        rank=root.initial_rank if root is not None else None,
        category="hang" if root is not None and root.kind in _HANG_KINDS else "",
        timestamp_ns=root.wall_ns if root is not None else None,
        lost_seconds=round(interruption.seconds, 3),
        world_size_before=interruption.world_before,
        world_size_after=interruption.world_after,
    )


def find_root_fault(faults: Sequence[Fault]) -> Fault | None:
    """Return the fault that caused all others: a process that ended or was killed,
    else the first that was reported.

    A rank that lost its peer raises, and may report that before the peer's monitor process does.
    Among ranks without progress, the cause is the rank outside of any collective, or else the rank
    that had begun the fewest. If there is one, exceptions after the first report of no progress
    don't count: these ranks were torn out of a collective.
    """
    # Rank 3 hangs outside of collectives, rank 0 waits for it in one. Both report a stall, perhaps
    # rank 0 first, and the abort makes others raise: only rank 3 `waits` for nobody.
    stalls = [fault for fault in faults if fault.kind is FaultKind.SOFT_TIMEOUT]
    if any(not fault.waits for fault in stalls):
        first = faults.index(stalls[0])
        faults = [
            fault
            for fault in faults
            if fault.kind is not FaultKind.EXCEPTION or faults.index(fault) < first
        ]
    # min() keeps the first of equals, so the order of the reports decides among equal faults.
    root = min(
        faults, key=lambda fault: (fault.kind not in _FATAL_KINDS, fault.waits), default=None
    )
    if root is None or root.kind is not FaultKind.SOFT_TIMEOUT:
        return root
    alike = [fault for fault in faults if fault.kind is root.kind and fault.waits == root.waits]
    return min(alike, key=lambda fault: sys.maxsize if fault.begun is None else fault.begun)
