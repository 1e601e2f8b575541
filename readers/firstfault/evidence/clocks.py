"""When something happened, as an interval: clocks differ, and a death is noticed after it happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.model import Subject, Writer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault.model import JobErrors, WorkerError

__all__ = ["Clocks", "Interval", "Offset"]

_S = 1_000_000_000
_NOTICED_NS = _S // 4
"""How long an agent may take to notice a worker's death."""
_SPOKEN_NS = 60 * _S
"""How long before a worker's death the exception may have been raised of which its agent tells."""
_LOST_NS = 2 * _S
"""How long others may take to notice an agent's."""
_WHOLE_S = _S
"""The storage's times are often whole seconds."""
_COPIED_S = 60
"""Seconds; documents that were stored so much later than they were recorded, on all nodes, are copies."""
_NAMED = 3
"""Nodes whose clocks are spoken of."""
_UNKNOWN_NS = 3600 * _S
"""How wrong a clock may be of which nothing is known."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A moment that is known to lie between two; nanoseconds."""

    low: int
    high: int

    def before(self, other: Interval) -> bool:
        """Whether it certainly was before the other."""
        return self.high < other.low

    def ahead_ns(self, other: Interval) -> int:
        """Return by how much it was certainly before the other; 0 if that is not certain."""
        return max(other.low - self.high, 0)


@dataclass(frozen=True, slots=True)
class Offset:
    """How much a node's clock is ahead of the storage's, nanoseconds, between two bounds."""

    low: int = -_UNKNOWN_NS
    high: int = _UNKNOWN_NS
    is_known: bool = False
    """Whether it is bounded on both sides by more than a guess."""


class Clocks:
    """Orders an attempt's failures.

    Two processes of one boot share a monotonic clock. Otherwise wall clocks are corrected by what the storage's clock
    says about each node: a receipt tells how long an upload took, so the object's time gives the moment of the fault on
    the storage's clock, no finer than its whole seconds.
    """

    def __init__(self, job: JobErrors) -> None:
        self._offsets = _offsets(job)

    def offset(self, node: str) -> Offset:
        """Return how much a node's clock is ahead of the storage's."""
        return self._offsets.get(node, Offset())

    def before(self, first: WorkerError, second: WorkerError) -> bool:
        """Whether one failure certainly happened before another."""
        return self.gap_ns(first, second) > 0

    def gap_ns(self, first: WorkerError, second: WorkerError) -> int:
        """Return by how much one failure certainly happened before another, nanoseconds; 0 if that is not certain."""
        if _share_a_clock(first, second):
            return _around(first.monotonic_ns or 0, first).ahead_ns(_around(second.monotonic_ns or 0, second))
        one, other = self._on_storage(first), self._on_storage(second)
        if one is None or other is None:
            return 0
        return one.ahead_ns(other)

    def later(self, first: WorkerError, second: WorkerError) -> Interval | None:
        """Return between which bounds a failure was recorded after another, nanoseconds; negative: before.

        None if that is not known: one carries no time, or nothing is known about a clock.
        """
        if _share_a_clock(first, second):
            apart = (second.monotonic_ns or 0) - (first.monotonic_ns or 0)
            return Interval(apart, apart)
        if first.timestamp_ns is None or second.timestamp_ns is None:
            return None
        apart = second.timestamp_ns - first.timestamp_ns
        if first.node and first.node == second.node and first.boot_id == second.boot_id:
            return Interval(apart, apart)
        one, other = self.offset(first.node), self.offset(second.node)
        if not (one.is_known and other.is_known):
            return None
        return Interval(apart + one.low - other.high, apart + one.high - other.low)

    @staticmethod
    def noticed_after_ns(failure: WorkerError) -> int:
        """Return how long before it was recorded a failure may have happened, nanoseconds; 0 of one's own word."""
        return -_around(0, failure).low

    def _on_storage(self, failure: WorkerError) -> Interval | None:
        if failure.timestamp_ns is None:
            return None
        moment, offset = _around(failure.timestamp_ns, failure), self.offset(failure.node)
        return Interval(moment.low - offset.high, moment.high - offset.low)

    def contenders(self, failures: Sequence[WorkerError]) -> list[bool]:
        """Return of each failure whether none of the others certainly happened before it; linear in their number."""
        # the earliest end of each boot by its own clock, and of each boot by the storage's
        own: dict[str, int] = {}
        stored: dict[str, int] = {}
        places = [(_boot(failure, index), failure, self._on_storage(failure)) for index, failure in enumerate(failures)]
        for boot, failure, moment in places:
            if failure.monotonic_ns:
                own[boot] = min(own.get(boot, failure.monotonic_ns), failure.monotonic_ns)
            if moment is not None:
                stored[boot] = min(stored.get(boot, moment.high), moment.high)
        ends = sorted((high, boot) for boot, high in stored.items())[:2]
        found = []
        for boot, failure, moment in places:
            here = (
                failure.monotonic_ns is not None and own.get(boot, 1 << 63) < _around(failure.monotonic_ns, failure).low
            )
            others = next((high for high, other in ends if other != boot), None)
            elsewhere = moment is not None and others is not None and others < moment.low
            found.append(not here and not elsewhere)
        return found

    def sentences(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return a sentence for each node whose clock is known to be wrong by more than the storage can tell, with it.

        Those that are wrong by most, and how many more there are, with their names.
        """
        moved = self._stored_later()
        if moved is not None:
            text = f"all documents were stored some {moved} s after they were recorded: copied, or all clocks behind"
            return [(text, tuple(self._offsets))]
        wrong = sorted(
            (-max(offset.low, -offset.high), node, offset)
            for node, offset in self._offsets.items()
            if offset.low > _WHOLE_S or offset.high < -_WHOLE_S
        )
        said: list[tuple[str, tuple[str, ...]]] = [
            (f"the clock of {node} is {_how_wrong(offset)}; times are corrected", (node,))
            for _, node, offset in wrong[:_NAMED]
        ]
        more = tuple(node for _, node, _ in wrong[_NAMED:])
        others = "so is that of one more node" if len(more) == 1 else f"so are those of {len(more)} more nodes"
        return [*said, (f"{others}, by less", more)] if more else said

    def _stored_later(self) -> int | None:
        """By how many seconds the storage's times are later than all nodes' own, if by the same: a copy has new ones.

        It says nothing about one node's clock beside another's.
        """
        behind = [-offset.low // _S for offset in self._offsets.values()]
        if len(behind) < 2 or min(behind) < _COPIED_S or max(behind) - min(behind) > _COPIED_S:  # noqa: PLR2004 - nodes
            return None
        return min(behind)


def _share_a_clock(first: WorkerError, second: WorkerError) -> bool:
    """Whether both have read the monotonic clock of one boot."""
    is_same = bool(first.boot_id) and first.boot_id == second.boot_id
    return is_same and first.monotonic_ns is not None and second.monotonic_ns is not None


def _how_wrong(offset: Offset) -> str:
    where = "ahead of" if offset.low > 0 else "behind"
    if offset.is_known:
        return f"{where} the storage's by about {abs(offset.low + offset.high) / 2 / _S:.0f} s"
    return f"{where} the storage's by at least {max(offset.low, -offset.high) / _S:.0f} s"


def _boot(failure: WorkerError, index: int) -> str:
    """Whose monotonic clock a failure's is; its own if that is not known."""
    return failure.boot_id if failure.boot_id and failure.monotonic_ns else f"#{index}"


def _around(moment_ns: int, failure: WorkerError) -> Interval:
    """The failure's own moment: what a process says about itself is exact, what is said about it is late."""
    if failure.writer in {Writer.WORKER, Writer.STOCK}:
        late = 0 if failure.subject is Subject.WORKER else _LOST_NS
    elif failure.exception is not None and failure.subject is Subject.WORKER:
        late = _SPOKEN_NS
    else:
        late = _LOST_NS if failure.subject is Subject.AGENT and failure.category == "node_lost" else _NOTICED_NS
    return Interval(moment_ns - late, moment_ns)


def _offsets(job: JobErrors) -> dict[str, Offset]:
    took = {
        receipt.name: receipt.fault_to_durable_ns
        for entry in job.roster
        for receipt in entry.receipts
        if receipt.durable and receipt.fault_to_durable_ns is not None
    }
    lows: dict[str, int] = {}
    highs: dict[str, int] = {}
    for failure in job.failures:
        recorded, node = failure.timestamp_ns, failure.node
        document = failure.documents[0] if failure.documents else None
        if recorded is None or document is None or document.last_modified_ns is None:
            continue
        stored = document.last_modified_ns
        whole = _WHOLE_S if stored % _S == 0 else _S // 20
        delay = took.get(document.name)
        # the object's time lies between the start of its upload and the storage's answer
        low = recorded + (failure.upload_delay_ns or 0) - stored - whole
        lows[node] = max(low, lows.get(node, low))
        if delay is not None:
            high = max(recorded + delay - stored, low)
            highs[node] = min(high, highs.get(node, high))
    return {
        node: _between(low, highs[node]) if node in highs else Offset(low, max(_UNKNOWN_NS, low + _UNKNOWN_NS))
        for node, low in lows.items()
    }


def _between(low: int, high: int) -> Offset:
    """Where two bounds contradict each other, neither is believed more than the distance between them."""
    return Offset(min(low, high), max(low, high), is_known=True)
