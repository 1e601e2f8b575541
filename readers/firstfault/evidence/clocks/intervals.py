"""Bounds of a moment, and those of a failure's time."""

from __future__ import annotations

from dataclasses import dataclass

from firstfault.model import Subject, WorkerError, Writer

NS_PER_SECOND = 1_000_000_000
_MAX_EXIT_NOTICE_NS = NS_PER_SECOND // 4
"""How long an agent may take to notice a worker's exit."""
_MAX_REPORT_DELAY_NS = 60 * NS_PER_SECOND
"""How long before the worker's exit the exception in an agent's report may have been raised."""
_MAX_LOSS_NOTICE_NS = 2 * NS_PER_SECOND
"""How long the peers may take to notice that an agent is gone."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The bounds of a moment; nanoseconds."""

    low: int
    high: int

    def get_min_gap_ns(self, other: Interval) -> int:
        """Return the minimum time from this moment to `other`;
        0 if the intervals overlap or the order is reversed.
        """
        return max(other.low - self.high, 0)


def bound_failure_time(moment_ns: int, failure: WorkerError) -> Interval:
    """Return the bounds of a failure's time. They are exact if the failed process recorded
    `moment_ns`; otherwise the failure may have been earlier.
    """
    if failure.writer in {Writer.WORKER, Writer.STOCK}:
        max_delay_ns = 0 if failure.subject is Subject.WORKER else _MAX_LOSS_NOTICE_NS
    elif failure.exception is not None and failure.subject is Subject.WORKER:
        # the agent found the exception in torch's error file after the exit, which a slow teardown
        # may delay
        max_delay_ns = _MAX_REPORT_DELAY_NS
    else:
        max_delay_ns = (
            _MAX_LOSS_NOTICE_NS
            if failure.subject is Subject.AGENT and failure.category == "node_lost"
            else _MAX_EXIT_NOTICE_NS
        )
    return Interval(moment_ns - max_delay_ns, moment_ns)
