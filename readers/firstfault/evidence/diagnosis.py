"""What the failures of one attempt say, judged once: their classes, the clocks, and the accusations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.evidence.accusations import accusations_of
from firstfault.evidence.classification import classify_failures
from firstfault.evidence.clocks import Clocks

if TYPE_CHECKING:
    from firstfault.evidence.accusations import Accusations
    from firstfault.evidence.classification import ClassifiedFailure
    from firstfault.model import JobErrors

__all__ = ["Diagnosis", "diagnose"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is known about the failures of an attempt before a strategy picks the root cause."""

    classified: tuple[ClassifiedFailure, ...]
    """One for each of `JobErrors.failures`, in the same order."""
    clocks: Clocks
    """Bounds for the difference between any two failures' times."""
    accusations: Accusations
    """How often each rank and node is named by others."""


def diagnose(job: JobErrors) -> Diagnosis:
    """Classify the failures of the judged round. Pure: the same job gives the same diagnosis."""
    classified = classify_failures(job)
    return Diagnosis(classified, Clocks(job), accusations_of(job, classified))
