"""Failures in time: how much later than the root cause each was, as far as the clocks tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.evidence.clocks import Interval
from firstfault.report.words import State, duration

if TYPE_CHECKING:
    from firstfault.evidence.clocks import Clocks
    from firstfault.model import JobErrors, Verdict, WorkerError

_TENTH = 10


@dataclass(frozen=True, slots=True)
class Event:
    """One failure of the judged round, and when it happened after the root cause."""

    failure: WorkerError
    state: State
    at_ns: int | None
    """Nanoseconds after the origin, the best estimate; negative: before. None: not known."""
    bounds: Interval | None
    """Bounds of that time; None: the clocks could not be compared."""
    is_origin: bool = False
    """Times are counted from it."""
    from_root: bool = True
    """As `Cascade.from_root`."""

    @property
    def key(self) -> tuple[str, State]:
        """Its group: its fault and its state. A fault without a fingerprint has a group of its own."""
        return (self.failure.fingerprint or f"#{id(self.failure)}", self.state)

    @property
    def brief(self) -> str:
        """How much later, for a drawing: "+42 ms", "+0.2 s to +1.2 s"; "~ +42 ms" if clocks were not compared."""
        if self.at_ns is None:
            return ""
        if self.bounds is None:
            return f"~ {_signed(self.at_ns)}"
        if (self.bounds.high - self.bounds.low) * _TENTH <= abs(self.at_ns) or self.bounds.low == self.bounds.high:
            return _signed(self.at_ns)
        return f"{_signed(self.bounds.low)} to {_signed(self.bounds.high)}"

    @property
    def later(self) -> str:
        """How much later, in words; empty if not known, and for the origin."""
        if self.at_ns is None or self.is_origin:
            return ""
        text = f"{_moved(self.at_ns)} by its own node's clock" if self.bounds is None else later_text(self.bounds)
        return text if self.from_root else f"{text}, counted from the first failure"

    @property
    def until(self) -> str:
        """The latest possible time, for a drawing."""
        if self.bounds is None:
            return self.brief
        return _signed(self.bounds.high)

    @property
    def is_ordered(self) -> bool:
        """Whether it is known to be before or after the origin."""
        return self.bounds is None or self.is_origin or self.bounds.low >= 0 or self.bounds.high <= 0


def later_text(bounds: Interval) -> str:
    """Return bounds of a time difference, nanoseconds, in words."""
    low, high = bounds.low, bounds.high
    if (high - low) * _TENTH <= abs(low + high) // 2:
        return _moved((low + high) // 2)
    if low >= 0:
        return f"{duration(low)} to {duration(high)} later"
    if high <= 0:
        return f"{duration(high)} to {duration(low)} earlier"
    return f"between {duration(low)} earlier and {duration(high)} later"


def origin_of(job: JobErrors, verdict: Verdict) -> WorkerError | None:
    """Return the failure from which times are counted: the root cause, if its time is known.

    For a rank that hung only the time of its stop is known, so times are counted from the first failure instead; the
    end of a deadline is a time.
    """
    root = verdict.root
    is_timed = root is not None and root.timestamp_ns is not None
    began = verdict.category != "hang" or (root is not None and root.expired is not None)
    if root is not None and is_timed and not root.stopped_by_agent and began:
        return root
    timed = [failure for failure in job.failures if failure.timestamp_ns is not None and failure is not root]
    return timed[0] if timed else root


def event_of(failure: WorkerError, state: State, origin: WorkerError | None, clocks: Clocks) -> Event:
    """Return a failure with its time after the origin."""
    if origin is None:
        return Event(failure, state, None, None)
    apart = Interval(0, 0) if failure is origin else clocks.later(origin, failure)
    if apart is not None:
        # an agent notices an exit late, but knows when it stopped a process
        early = 0 if failure.stopped_by_agent else clocks.noticed_after_ns(failure)
        late = 0 if failure is origin or origin.stopped_by_agent else clocks.noticed_after_ns(origin)
        return Event(failure, state, (apart.low + apart.high) // 2, Interval(apart.low - early, apart.high + late))
    if failure.timestamp_ns is None or origin.timestamp_ns is None:
        return Event(failure, state, None, None)
    return Event(failure, state, failure.timestamp_ns - origin.timestamp_ns, None)


def event_order(event: Event) -> tuple[object, ...]:
    """Return the sort key of events: the root cause first, then by time."""
    failure = event.failure
    return (
        event.state is not State.ROOT,
        event.at_ns is None,
        event.at_ns or 0,
        failure.timestamp_ns or 0,
        failure.rank if failure.rank is not None else 1 << 62,
        failure.node,
        failure.message,
    )


def _signed(nanoseconds: int) -> str:
    return "0" if nanoseconds == 0 else f"{'+' if nanoseconds > 0 else '-'}{duration(nanoseconds)}"


def _moved(nanoseconds: int) -> str:
    if nanoseconds == 0:
        return "at the same time"
    return f"{duration(nanoseconds)} {'later' if nanoseconds > 0 else 'earlier'}"
