"""When failures happened, as intervals: clocks differ, and agents notice exits late."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from firstfault.evidence.clocks.intervals import (
    NS_PER_SECOND,
    Interval as Interval,
    bound_failure_time,
)
from firstfault.evidence.clocks.offsets import (
    STORAGE_RESOLUTION_NS,
    Offset as Offset,
    measure_offsets,
)
from firstfault.model import JobErrors, WorkerError

_MIN_COPY_DELAY_SECONDS = 60
"""If all nodes' documents were stored this many seconds after they were recorded, they are copies.
"""
_MAX_CLOCK_SENTENCES = 3
"""Maximum number of wrong clocks that get a separate sentence."""
_NEVER_NS = 1 << 100
"""Later than any time."""


class Clocks:
    """Orders an attempt's failures.

    Two processes of one boot share a monotonic clock. Otherwise wall clocks are corrected by each
    node's offset from the storage's clock: the receipt has the duration of the upload, and the
    object has the time of its end by the storage's clock. The precision is that of the object's
    time, often a second.
    """

    def __init__(self, job: JobErrors) -> None:
        self._offsets = measure_offsets(job)

    def get_offset(self, node: str) -> Offset:
        """Return how much a node's clock is ahead of the storage's."""
        return self._offsets.get(node, Offset())

    def is_before(self, first: WorkerError, second: WorkerError) -> bool:
        """Whether one failure certainly happened before another."""
        return self.get_certain_gap_ns(first, second) > 0

    def get_certain_gap_ns(self, first: WorkerError, second: WorkerError) -> int:
        """Return the minimum time from the first failure to the second, nanoseconds;
        0 if their order isn't certain.
        """
        if _share_a_clock(first, second):
            return bound_failure_time(first.monotonic_ns or 0, first).get_min_gap_ns(
                bound_failure_time(second.monotonic_ns or 0, second)
            )
        first_moment = self._bound_storage_time(first)
        second_moment = self._bound_storage_time(second)
        return (
            0
            if first_moment is None or second_moment is None
            else first_moment.get_min_gap_ns(second_moment)
        )

    def bound_time_between(self, first: WorkerError, second: WorkerError) -> Interval | None:
        """Return the bounds of the time from the first record to the second, in nanoseconds.
        Negative values mean that the second record is the earlier one.

        None if a failure has no recorded time, or the offset of a node's clock isn't known.
        """
        if _share_a_clock(first, second):
            gap_ns = (second.monotonic_ns or 0) - (first.monotonic_ns or 0)
            return Interval(gap_ns, gap_ns)
        if first.timestamp_ns is None or second.timestamp_ns is None:
            return None
        gap_ns = second.timestamp_ns - first.timestamp_ns
        if first.node and first.node == second.node and first.boot_id == second.boot_id:
            return Interval(gap_ns, gap_ns)
        first_offset = self.get_offset(first.node)
        second_offset = self.get_offset(second.node)
        if not (first_offset.is_known and second_offset.is_known):
            return None
        return Interval(
            gap_ns + first_offset.low - second_offset.high,
            gap_ns + first_offset.high - second_offset.low,
        )

    @staticmethod
    def get_max_notice_delay_ns(failure: WorkerError) -> int:
        """Return how much older than its record a failure may be, nanoseconds;
        0 if the failed process recorded it.
        """
        return -bound_failure_time(0, failure).low

    def _bound_storage_time(self, failure: WorkerError) -> Interval | None:
        if failure.timestamp_ns is None:
            return None
        moment = bound_failure_time(failure.timestamp_ns, failure)
        offset = self.get_offset(failure.node)
        return Interval(moment.low - offset.high, moment.high - offset.low)

    def may_be_first(self, failures: Sequence[WorkerError]) -> list[bool]:
        """Return for each failure whether it may have been the first. Takes linear time."""
        moments = [
            (failure, _get_clock(failure), self._bound_storage_time(failure))
            for failure in failures
        ]
        earliest = _Earliest(
            (clock, item.monotonic_ns, moment.high if moment else _NEVER_NS)
            for item, clock, moment in moments
        )
        may_be_first = []
        for failure, clock, moment in moments:
            earliest_elsewhere = earliest.find_elsewhere(clock)
            # certainly later: another failure's upper bound lies before this one's lower bound
            is_later_here = (
                clock
                and earliest.by_clock[clock]
                < bound_failure_time(failure.monotonic_ns or 0, failure).low
            )
            is_later_elsewhere = (
                earliest_elsewhere is not None
                and moment is not None
                and earliest_elsewhere < moment.low
            )
            may_be_first.append(not is_later_here and not is_later_elsewhere)
        return may_be_first

    def make_before_all_check(
        self, failures: Sequence[WorkerError]
    ) -> Callable[[WorkerError], bool]:
        """Return a function that checks whether a failure certainly happened before all of these,
        in constant time.
        """
        moments = ((failure, self._bound_storage_time(failure)) for failure in failures)
        earliest = _Earliest(
            (
                _get_clock(item),
                bound_failure_time(item.monotonic_ns or 0, item).low,
                moment.low if moment else -_NEVER_NS,
            )
            for item, moment in moments
        )

        def is_before_all(failure: WorkerError) -> bool:
            clock = _get_clock(failure)
            moment = self._bound_storage_time(failure)
            earliest_elsewhere = earliest.find_elsewhere(clock)
            is_first_here = not clock or (failure.monotonic_ns or 0) < earliest.by_clock.get(
                clock, _NEVER_NS
            )
            return is_first_here and (
                earliest_elsewhere is None
                or (moment is not None and moment.high < earliest_elsewhere)
            )

        return is_before_all

    def describe_wrong_clocks(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return sentences about clocks that are certainly wrong, each with the names of its nodes.

        The worst clocks get a sentence each; the last sentence counts the remaining clocks.
        """
        seconds_behind = [-offset.low // NS_PER_SECOND for offset in self._offsets.values()]
        # copying the folder delays all objects by the same time; wrong clocks would differ from
        # each other
        if len(seconds_behind) > 1 and min(seconds_behind) >= _MIN_COPY_DELAY_SECONDS >= max(
            seconds_behind
        ) - min(seconds_behind):
            moved = f"about {min(seconds_behind)} s after their faults"
            text = f"all documents were stored {moved}: copies, or all clocks are behind"
            return [(text, tuple(self._offsets))]
        wrong_offsets = sorted(
            (-max(offset.low, -offset.high), node, offset)
            for node, offset in self._offsets.items()
            if offset.low > STORAGE_RESOLUTION_NS or offset.high < -STORAGE_RESOLUTION_NS
        )
        sentences: list[tuple[str, tuple[str, ...]]] = [
            (
                f"the clock of {node} is {_describe_wrong_clock(offset)}; times are corrected",
                (node,),
            )
            for _, node, offset in wrong_offsets[:_MAX_CLOCK_SENTENCES]
        ]
        unlisted_nodes = tuple(node for _, node, _ in wrong_offsets[_MAX_CLOCK_SENTENCES:])
        others = (
            "1 more clock is"
            if len(unlisted_nodes) == 1
            else f"{len(unlisted_nodes)} more clocks are"
        )
        return (
            [*sentences, (f"{others} wrong, by less", unlisted_nodes)]
            if unlisted_nodes
            else sentences
        )


class _Earliest:
    """The earliest of many moments, by each monotonic clock and by the storage's clock."""

    def __init__(self, moments: Iterable[tuple[str, int | None, int]]) -> None:
        """Take for each moment the name of its monotonic clock, the time by it,
        and the time by the storage's clock.
        """
        self.by_clock: dict[str, int] = {}
        stored: dict[str, int] = {}
        for clock, ticks, moment in moments:
            self.by_clock[clock] = min(ticks or 0, self.by_clock.get(clock, _NEVER_NS))
            stored[clock] = min(moment, stored.get(clock, _NEVER_NS))
        # two clocks are enough: `find_elsewhere` excludes one
        self._stored = sorted((moment, clock) for clock, moment in stored.items())[:2]

    def find_elsewhere(self, clock: str) -> int | None:
        """Return the earliest time by the storage's clock, without moments by `clock`, or None if
        there is no such moment.
        """
        return next((moment for moment, other in self._stored if not clock or other != clock), None)


def _get_clock(failure: WorkerError) -> str:
    """Return the id of the boot that a failure's monotonic time counts from, or an empty string if
    it has no monotonic time.
    """
    return failure.boot_id if failure.monotonic_ns is not None else ""


def _share_a_clock(first: WorkerError, second: WorkerError) -> bool:
    """Whether both failures have a time by the monotonic clock of the same boot."""
    return _get_clock(first) != "" and _get_clock(first) == _get_clock(second)


def _describe_wrong_clock(offset: Offset) -> str:
    direction = "ahead of" if offset.low > 0 else "behind"
    if offset.is_known:
        seconds = abs(offset.low + offset.high) / 2 / NS_PER_SECOND
        return f"{direction} the storage's by about {seconds:.0f} s"
    min_seconds = max(offset.low, -offset.high) / NS_PER_SECOND
    return f"{direction} the storage's by at least {min_seconds:.0f} s"
