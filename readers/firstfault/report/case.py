"""The input of a report, and values that several of its parts derive from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from firstfault.model import Decision, JobErrors, Scope, Subject, Verdict
from firstfault.model.failure import FROM_OUTSIDE
from firstfault.report.cascade import Cascade
from firstfault.report.engine_words import EngineWords

_MAX_TERMINATION_SPREAD_NS = 10_000_000_000
"""Kubernetes terminates the pods of a deleted job within seconds; their clocks may differ too."""


@dataclass(frozen=True, slots=True)
class Case:
    """The input of a report."""

    job: JobErrors
    verdict: Verdict
    decision: Decision
    cascade: Cascade
    engine: EngineWords
    """The words for what ran the job."""
    uri: str
    """URI of the attempt's documents; empty if unknown."""
    logs: Mapping[str, str]
    """Local log files by node; they replace the engine's commands."""

    @property
    def is_alone(self) -> bool:
        """Whether there is only one document, and it names no rank and no node:
        it is known what failed, not where.
        """
        return (
            self.verdict.scope is Scope.UNDETERMINED
            and len(self.job.failures) == 1
            and self.verdict.node is None
        )


def find_machine(job: JobErrors, verdict: Verdict) -> str:
    """Return the machine of the verdict's node, from its process or from any entry of that node, or
    an empty string if it is unknown.
    """
    if verdict.root is not None and verdict.root.place.machine:
        return verdict.root.place.machine
    return next(
        (
            place.machine
            for place in reversed(job.places)
            if place.node == verdict.node and place.machine
        ),
        "",
    )


@dataclass(frozen=True, slots=True)
class TerminatedNodes:
    """How many of a job's nodes were terminated from outside."""

    count: int
    expected: int | None
    at_once: bool

    @property
    def are_all(self) -> bool:
        """Whether all nodes of a job with several nodes were terminated:
        perhaps a person aborted the job.
        """
        return self.count > 1 and self.count == self.expected


def count_terminated_nodes(job: JobErrors) -> TerminatedNodes:
    """Count the nodes with agents that got a signal from outside."""
    agents = [
        item
        for item in job.failures
        if item.subject is Subject.AGENT and item.category in FROM_OUTSIDE
    ]
    times = [item.timestamp_ns for item in agents]
    known = [time for time in times if time is not None]
    # an agent without a time may be the late one: every time must be known
    at_once = (
        bool(known)
        and len(known) == len(times)
        and max(known) - min(known) <= _MAX_TERMINATION_SPREAD_NS
    )
    return TerminatedNodes(
        len({(item.node, item.place.group_rank) for item in agents}), job.coverage.expected, at_once
    )
