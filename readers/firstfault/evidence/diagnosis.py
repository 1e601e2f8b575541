"""What the failures of one attempt tell, judged once: their classes, the clocks, and the accusations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.evidence.accusations import accusations_of
from firstfault.evidence.classification import FailureClass, classify_failures
from firstfault.evidence.clocks import Clocks
from firstfault.model import Subject

if TYPE_CHECKING:
    from firstfault.evidence.accusations import Accusations
    from firstfault.evidence.classification import ClassifiedFailure
    from firstfault.evidence.first_fault import FirstFault
    from firstfault.model import JobErrors, WorkerError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rank or node that reported no fault of its own, and why it is likely to be the root cause."""

    why: str
    rank: int | None = None
    node: str = ""
    failure: WorkerError | None = None
    """Its agent's document about stopping it; None: there is none."""
    category: str = "hang"
    weight: int = 1
    """Number of independent reasons."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that is known about the failures of an attempt before a strategy picks the root cause."""

    job: JobErrors
    classified: tuple[ClassifiedFailure, ...]
    """One for each of `JobErrors.failures`, in the same order."""
    clocks: Clocks
    """Bounds for the difference between any two failures' times."""
    accusations: Accusations
    """How often each rank and node is named by others."""
    faults: tuple[ClassifiedFailure, ...] = ()
    """The faults that may be the root cause; set by `with_faults`."""
    first: FirstFault | None = None
    """The first of `faults`."""
    late: tuple[ClassifiedFailure, ...] = ()
    """Faults that cannot be the root cause: a rank had timed out before any of them; set by `with_faults`."""

    @property
    def workers(self) -> list[ClassifiedFailure]:
        """The failures of workers."""
        return [judged for judged in self.classified if judged.failure.subject is Subject.WORKER]

    @property
    def waits(self) -> list[ClassifiedFailure]:
        """The failures of ranks that timed out waiting."""
        return [judged for judged in self.classified if judged.waited]

    @property
    def unclear(self) -> list[ClassifiedFailure]:
        """The failures that may be cause or consequence, except on nodes whose agent lost its peers."""
        lost_peers = {item.failure.node for item in self.classified if item.failure.subject is Subject.AGENT}
        found = (item for item in self.classified if item.failure_class is FailureClass.UNCLEAR)
        return [item for item in found if item.failure.node not in lost_peers]

    @property
    def exits(self) -> list[ClassifiedFailure]:
        """Those of `unclear` that did not wait, and were not stopped because others had timed out."""
        has_waits = bool(self.waits)
        return [item for item in self.unclear if not item.waited and not (has_waits and item.failure.stopped_by_agent)]


def diagnose(job: JobErrors) -> Diagnosis:
    """Classify the failures of the judged round. Pure: the same job gives the same diagnosis."""
    classified = classify_failures(job)
    return Diagnosis(job, classified, Clocks(job), accusations_of(job, classified))
