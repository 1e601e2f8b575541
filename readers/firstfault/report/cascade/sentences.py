"""A cascade in a line each: who followed, how exact times are, and who reported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from firstfault.evidence.clocks import Clocks, Interval
from firstfault.model import Scope, Subject, Verdict
from firstfault.model.failure import OF_LOGS
from firstfault.report.cascade.records import Cascade, Event
from firstfault.report.formatting import MAX_LISTED_ITEMS, format_delay, later_text
from firstfault.report.states import State
from firstfault.utils.text import counted, duration

_INEXACT_NS = 1_000_000_000
"""Less exact times may put failures of one cascade into the wrong order, and are worth a row."""


def followers_text(verdict: Verdict, cascade: Cascade, clocks: Clocks) -> str:
    """Return who failed after the root cause, and how much later;
    empty if no rank is certainly a victim.
    """
    if verdict.scope is Scope.UNDETERMINED:
        return ""
    if not cascade.events:
        # the verdict alone is known, without its documents
        return str(verdict.victims.count or "")
    stopped = cascade.count(State.STOPPED)
    victims = cascade.count(State.VICTIM)
    followers = [event for event in cascade.events if event.state in {State.VICTIM, State.STOPPED}]
    agents = sum(event.failure.subject is Subject.AGENT for event in followers)
    waited = verdict.category == "hang" and (verdict.root is None or verdict.root.expired is None)
    what = "timed out waiting" if waited else "lost a peer"
    parts = [f"{victims} {what}"] if victims else []
    is_log = any(event.failure.place.engine == OF_LOGS for event in followers)
    stopper = "launcher" if is_log else "agent" if stopped == 1 else "agents"
    parts += (
        [f"{stopped} stopped by {'its' if stopped == 1 else 'their'} {stopper}"] if stopped else []
    )
    parts += [f"{counted(agents, 'agent')} failed"] if agents else []
    timed = [event for event in followers if event.at_ns is not None]
    if timed and parts:
        parts += _describe_delays(timed, cascade, clocks)
    return ", ".join(parts)


def _describe_delays(timed: Sequence[Event], cascade: Cascade, clocks: Clocks) -> Iterator[str]:
    """Yield how much later than the root cause the victims failed, and which of them failed first,
    if that's known.
    """
    first, *others = timed
    bounds = [event.bounds for event in timed if event.bounds is not None]
    if len(bounds) < len(timed):
        # the clocks weren't compared: times and order are a guess
        if first.delay:
            yield f"the first {first.delay}"
        return
    # the bounds of the first and the last failure are known even if their order isn't
    low = min(item.low for item in bounds)
    high = max(item.high for item in bounds)
    if cascade.from_root and low < 0 < high:
        # a victim that may be earlier: its agent noticed the root cause later, or another clock is
        # inexact
        yield f"within {duration(max(-low, high))} of the cause (times too inexact for an order)"
    elif cascade.from_root and (low < 0 or len(timed) == 1):
        yield later_text(Interval(low, high))
    elif cascade.from_root:
        yield f"{format_delay(low, high)} after the cause" if high > 0 else "at the same time"
    elif high > 0:
        # the time of the root cause is unknown: times are counted from the first victim
        yield f"within {duration(high)}"
    if others and all(clocks.is_before(first.failure, other.failure) for other in others):
        name = (
            f"rank {first.failure.rank}" if first.failure.rank is not None else first.failure.node
        )
        on = (
            f" on {first.failure.node}"
            if first.failure.rank is not None and first.failure.node
            else ""
        )
        yield f"first {name}{on}"


def clocks_text(cascade: Cascade, clocks: Clocks) -> str:
    """Return why times of different processes can't be compared exactly; empty if they can be."""
    untimed = [event for event in cascade.events if event.at_ns is None]
    unknown = {
        event.failure.node
        for event in cascade.events
        if event.at_ns is not None and event.bounds is None
    }
    timed_nodes = {event.failure.node for event in cascade.events if event.at_ns is not None}
    if (
        any(event.failure.place.engine == OF_LOGS for event in cascade.events)
        and len(timed_nodes - {""}) < 2  # noqa: PLR2004 - to compare
    ):
        unknown = set()  # in a log, a process without a node may be on any
    if unknown:  # the unknown clock may be the reference of all comparisons
        unknown = {node for node in timed_nodes if not clocks.get_offset(node).is_known} or unknown
    widths = [
        event.bounds.high - event.bounds.low for event in cascade.events if event.bounds is not None
    ]
    parts = []
    if untimed and len(cascade.events) > 1:
        parts.append(f"{len(untimed)} of {len(cascade.events)} failures have no time")
    if unknown and len(cascade.events) > 1:
        has_names = len(unknown) <= MAX_LISTED_ITEMS and "" not in unknown
        names = ", ".join(sorted(unknown)) if has_names else counted(len(unknown), "node")
        parts.append(f"couldn't compare the clock{'s' if len(unknown) > 1 else ''} of {names}")
    if max(widths, default=0) > _INEXACT_NS and len(cascade.events) > 1:
        parts.append(f"times are exact to {duration(max(widths))}")
    return ", ".join(parts)


def coverage_text(verdict: Verdict, cascade: Cascade) -> str:
    """Return how many nodes reported: "2 of 2 reported"; with what is missing, a comma follows."""
    coverage = verdict.coverage
    text = f"{coverage.reported} of {coverage.expected} reported"
    if coverage.expected is None:
        text = f"{coverage.reported} reported (total unknown)"
    elif coverage.reported > coverage.expected:
        text = f"{coverage.reported} reported ({coverage.expected} expected)"
    parts = [] if coverage.complete else ["incomplete"]
    failed = {event.failure.node for event in cascade.events}
    # a node with a document sent something, even if its last report is missing
    silent = sum(
        node.state is State.UNREPORTED and node.name not in failed for node in cascade.nodes
    )
    if silent and coverage.expected is not None and coverage.reported + silent > coverage.expected:
        parts.append(f"{silent} more started and sent nothing")
    missing = cascade.count(State.UNREPORTED)
    # a missing node's ranks are missing with it: mention silent ranks only if every node reported
    if missing and coverage.expected is not None and coverage.reported >= coverage.expected:
        parts.append(f"no report from {counted(missing, 'rank')}")
    if coverage.unreadable:
        parts.append(f"{counted(coverage.unreadable, 'document')} unreadable")
    if not verdict.settled:
        parts.append("timed out waiting for the rest")
    return ", ".join([text, *parts])
