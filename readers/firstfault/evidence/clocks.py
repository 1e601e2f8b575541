"""When failures happened, as intervals: clocks differ, and agents notice exits late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from firstfault.layout import ErrorKey
from firstfault.model import DocumentRef, JobErrors, Subject, WorkerError, Writer

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


STORAGE_RESOLUTION_NS = NS_PER_SECOND
"""Resolution of the storage's times, which are often whole seconds."""
_MAX_UNKNOWN_OFFSET_NS = 3600 * NS_PER_SECOND
"""How far off an unmeasured clock may be."""


@dataclass(frozen=True, slots=True)
class Offset:
    """How much a node's clock is ahead of the storage's, nanoseconds, between two bounds."""

    low: int = -_MAX_UNKNOWN_OFFSET_NS
    high: int = _MAX_UNKNOWN_OFFSET_NS
    is_known: bool = False
    """Whether both bounds were measured."""


def measure_offsets(job: JobErrors) -> dict[str, Offset]:
    """Return the offset of each node that has uploaded a document."""
    took = {
        receipt.name: receipt.fault_to_durable_ns
        for entry in job.roster
        for receipt in entry.receipts
        if receipt.durable and receipt.fault_to_durable_ns is not None
    }
    lows: dict[str, int] = {}
    highs: defaultdict[str, list[int]] = defaultdict(list)
    for node, document, recorded, upload_delay in _iter_uploads(job.failures):
        stored = document.last_modified_ns or 0
        resolution_ns = (
            STORAGE_RESOLUTION_NS if stored % NS_PER_SECOND == 0 else NS_PER_SECOND // 20
        )
        # The object's time lies between the start of its upload and the storage's answer. The start
        # bounds the offset from below, the receipt bounds it from above.
        low = recorded + upload_delay - stored - resolution_ns
        lows[node] = max(low, lows.get(node, low))
        if document.name in took:
            highs[node].append(max(recorded + took[document.name] - stored, low))
    offsets = {}
    for node, low in lows.items():
        # A document that was stored again because its first upload hung looks like one from a slow
        # clock. Its upper bound may then contradict another document's lower bound, and is ignored.
        agreed = [high for high in highs[node] if high >= low]
        unknown = max(_MAX_UNKNOWN_OFFSET_NS, low + _MAX_UNKNOWN_OFFSET_NS)
        offsets[node] = Offset(low, min(agreed, default=unknown), is_known=bool(agreed))
    return offsets


def _iter_uploads(failures: Sequence[WorkerError]) -> Iterator[tuple[str, DocumentRef, int, int]]:
    """Yield each stored document's node, reference, recorded time,
    and the minimum delay until its upload began.

    A failure merged from several documents has the earliest document's time, so each document's
    time comes from its name. The delay is known for a single document only: a process may write
    two, in flight and at its end.
    """
    for failure in failures:
        has_several = len(failure.documents) > 1
        for document in failure.documents:
            key = ErrorKey.parse(document.name) if has_several else None
            recorded = (
                key.timestamp_ns
                if key is not None
                else None
                if has_several
                else failure.timestamp_ns
            )
            if recorded is not None and document.last_modified_ns is not None:
                yield (
                    failure.node,
                    document,
                    recorded,
                    0 if has_several else failure.upload_delay_ns or 0,
                )


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
