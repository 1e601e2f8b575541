"""What the verdicts of `evidence` share: reasons with their failures, suspects, and counts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from firstfault.evidence.classification import ClassifiedFailure, FailureClass
from firstfault.evidence.diagnosis import Diagnosis
from firstfault.model import JobErrors, Reason, Suspect, WorkerError
from firstfault.strategies.headlines import who

NAME = "evidence"
MAX_SUSPECTS = 10
MAX_FAILURES_PER_REASON = 8
"""Failures that a sentence about all failures refers to."""


def by_time(judged: ClassifiedFailure) -> tuple[object, ...]:
    """Return the sort key of failures by their recorded times; those without one come last."""
    return judged.failure.timestamp_ns or 1 << 62, judged.failure.rank or 0, repr(judged.failure)


def failures_of(classified: Iterable[ClassifiedFailure]) -> tuple[WorkerError, ...]:
    """Return the failures themselves."""
    return tuple(item.failure for item in classified)


def suspects_of(classified: Iterable[ClassifiedFailure], when: str = "") -> list[Suspect]:
    """Return failures as suspects: "rank 3 on worker-1 was killed by SIGKILL, later"."""
    return [Suspect(f"{who(item.failure)} {item.why}{when}", item.failure.rank, item.node) for item in classified]


def first_few(classified: Iterable[ClassifiedFailure]) -> tuple[WorkerError, ...]:
    """Return as many failures as a sentence about all of them refers to."""
    return failures_of(islice(classified, MAX_FAILURES_PER_REASON))


def about_clocks(diagnosis: Diagnosis) -> list[Reason]:
    """Return a reason for each wrong clock, with failures of its node."""
    return [
        Reason(
            text,
            tuple(
                islice(
                    (failure for failure in diagnosis.job.failures if failure.node in nodes), MAX_FAILURES_PER_REASON
                )
            ),
        )
        for text, nodes in ((text, set(names)) for text, names in diagnosis.clocks.sentences())
    ]


def count_of(classified: Iterable[ClassifiedFailure], job: JobErrors, failure_class: FailureClass) -> int:
    """Return how many failures have this class; an unopened one has the class of the opened ones with its fault."""
    have = [item for item in classified if item.failure_class is failure_class]
    prints = {item.failure.fingerprint for item in have}
    return len(have) + len(job.unopened_like(*prints))
