"""Parts of the verdicts of `evidence`: reasons with their failures, suspects and counts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from firstfault.evidence.classification import ClassifiedFailure, FailureClass
from firstfault.evidence.diagnosis import Diagnosis
from firstfault.model import JobErrors, Reason, Suspect, WorkerError
from firstfault.strategies.headlines import name_process

STRATEGY_NAME = "evidence"
MAX_SUSPECTS = 10
MAX_FAILURES_PER_REASON = 8
"""Failures that a sentence about all failures refers to."""


def get_time_sort_key(item: ClassifiedFailure) -> tuple[object, ...]:
    """Return the sort key of failures by their recorded times;
    failures without a time come last.
    """
    return item.failure.timestamp_ns or 1 << 62, item.failure.rank or 0, repr(item.failure)


def get_failures(classified: Iterable[ClassifiedFailure]) -> tuple[WorkerError, ...]:
    """Return the failures without their classes."""
    return tuple(item.failure for item in classified)


def sample_failures(classified: Iterable[ClassifiedFailure]) -> tuple[WorkerError, ...]:
    """Return as many failures as a sentence about all of them refers to."""
    return get_failures(islice(classified, MAX_FAILURES_PER_REASON))


def to_suspects(classified: Iterable[ClassifiedFailure], when: str = "") -> list[Suspect]:
    """Return failures as suspects: "rank 3 on worker-1 was killed by SIGKILL, later"."""
    items = ((name_process(item.failure), item) for item in classified)
    return [
        Suspect(f"{process} {item.why}{when}", item.failure.rank, item.node)
        for process, item in items
    ]


def explain_wrong_clocks(diagnosis: Diagnosis) -> list[Reason]:
    """Return a reason for each wrong clock, with failures of its nodes."""
    reasons = []
    for text, names in diagnosis.clocks.describe_wrong_clocks():
        nodes = set(names)
        failures = (failure for failure in diagnosis.job.failures if failure.node in nodes)
        reasons.append(Reason(text, tuple(islice(failures, MAX_FAILURES_PER_REASON))))
    return reasons


def count_class(
    classified: Iterable[ClassifiedFailure], job: JobErrors, failure_class: FailureClass
) -> int:
    """Return the number of failures of a class. An unread document has the class of the
    read ones of its fault.
    """
    members = [item for item in classified if item.failure_class is failure_class]
    return len(members) + len(job.unopened_like(*{item.failure.fingerprint for item in members}))
