"""Reports a fault from which the ranks continued."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from firstfault.model.failure import RESTARTED
from firstfault_inprocess.call.session import CallSession
from firstfault_inprocess.store import GONE, Fault, recovered_key
from firstfault_torch.guard import logger, suppress_internal_errors


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
    """Whether this rank reports for all: it is the lowest that continues."""


class Observer(Protocol):
    """Learns of this rank's faults while they happen."""

    def raised(self, error: BaseException) -> None:
        """The function raised without being interrupted; the remaining ranks have been informed."""

    def recovered(self, interruption: Interruption) -> None:
        """All ranks that are left call the function again."""

    def collectives_begun(self) -> int | None:
        """Return how many collectives this rank has begun, or None. Runs in another thread."""


def report_recovery(
    interruption: Interruption,
    session: CallSession,
    observer: Observer | None,
) -> None:
    """Report that the ranks have recovered from a fault,
    to the agents of lost ranks and to the observer.
    """
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
                session.store.set(recovered_key(fault.initial_rank), str(interruption.iteration))
        with suppress_internal_errors("reading where the ranks were"):
            ended = session.open_iteration(interruption.iteration, interruption.world_before)
            interruption = replace(interruption, faults=ended.add_positions(interruption.faults))
    if observer is not None:
        with suppress_internal_errors("recording that the ranks have recovered"):
            observer.recovered(interruption)
