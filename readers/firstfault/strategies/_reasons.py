"""Reasons that both parts of the strategy ``evidence`` give."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from firstfault.model import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from firstfault.evidence.classification import ClassifiedFailure, FailureClass
    from firstfault.evidence.clocks import Clocks
    from firstfault.model import JobErrors, Verdict, WorkerError

__all__ = ["MAX_SUSPECTS", "NAME", "about_clocks", "count_of", "failures_of", "first_few", "with_category"]

NAME = "evidence"
MAX_SUSPECTS = 10
_FEW = 8
"""Failures that a sentence about all of them refers to."""


def failures_of(classified: Iterable[ClassifiedFailure]) -> tuple[WorkerError, ...]:
    """Return the failures themselves."""
    return tuple(item.failure for item in classified)


def first_few(classified: Iterable[ClassifiedFailure]) -> tuple[WorkerError, ...]:
    """Return as many failures as a sentence about all of them refers to."""
    return failures_of(islice(classified, _FEW))


def about_clocks(job: JobErrors, clocks: Clocks) -> list[Reason]:
    """Return a reason for each wrong clock, with failures of its node."""
    return [
        Reason(text, tuple(islice((failure for failure in job.failures if failure.node in nodes), _FEW)))
        for text, nodes in ((text, set(names)) for text, names in clocks.sentences())
    ]


def count_of(classified: Iterable[ClassifiedFailure], job: JobErrors, failure_class: FailureClass) -> int:
    """Return how many failures have this class; an unopened one has the class of the opened ones with its fault."""
    have = [item for item in classified if item.failure_class is failure_class]
    prints = {item.failure.fingerprint for item in have}
    return len(have) + sum(len(job.unopened_like(fingerprint)) for fingerprint in prints)


def with_category(verdict: Verdict, root: ClassifiedFailure) -> Verdict:
    """Return the verdict with the root's more precise category, unless its writer claims a specific one."""
    keeps = root.failure.recoverable or root.failure.category not in {"", "user_code", "exit"}
    # only an agent's own report makes a node preempted or lost, never a text
    keeps = keeps or root.category in {"preemption", "node_lost"}
    return replace(verdict, category=root.category) if root.category and not keeps else verdict
