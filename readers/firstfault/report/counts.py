"""Sentences about the whole cascade: the victims, how exactly times are known, and how many nodes reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.evidence.clocks import Interval
from firstfault.model import Scope, Subject
from firstfault.report.events import later_text
from firstfault.report.words import State, counted, duration

if TYPE_CHECKING:
    from firstfault.evidence.clocks import Clocks
    from firstfault.model import Verdict
    from firstfault.report.cascade import Cascade

_FEW = 5
_MS = 1_000_000


def followers_text(verdict: Verdict, cascade: Cascade, clocks: Clocks) -> str:
    """Return who failed after the root cause and how much later; empty if no rank is certainly a victim."""
    if verdict.scope is Scope.UNDETERMINED:
        return ""
    if not cascade.events:
        return str(verdict.victims.count or "")
    stopped, victims = cascade.count(State.STOPPED), cascade.count(State.VICTIM)
    after = [event for event in cascade.events if event.state in {State.VICTIM, State.STOPPED}]
    agents = sum(event.failure.subject is Subject.AGENT for event in after)
    waited = verdict.category == "hang" and (verdict.root is None or verdict.root.expired is None)
    what = "timed out waiting" if waited else "lost a peer"
    parts = [f"{victims} {what}"] if victims else []
    parts += [f"{stopped} stopped by {'its agent' if stopped == 1 else 'their agents'}"] if stopped else []
    parts += [f"{counted(agents, 'agent')} failed after it"] if agents else []
    text = ", ".join(parts)
    timed = [event for event in after if event.at_ns is not None]
    if not timed or not parts:
        return text
    first, *others = timed
    bounds = [event.bounds for event in timed if event.bounds is not None]
    name = f"rank {first.failure.rank}" if first.failure.rank is not None else first.failure.node
    on = f" on {first.failure.node}" if first.failure.rank is not None and first.failure.node else ""
    if len(bounds) < len(timed):  # the clocks were not compared: the order is a guess
        said = f"; the first {first.later}" if first.later else ""
        return f"{text}{said}" + (f"; the last {others[-1].later}" if others else "")
    # the bounds of the first and the last failure are known even if their order is not
    start = Interval(min(item.low for item in bounds), min(item.high for item in bounds))
    end = Interval(max(item.low for item in bounds), max(item.high for item in bounds))
    is_first = all(clocks.before(first.failure, other.failure) for other in others)
    who = f" was {name}{on}," if is_first else ""
    if not cascade.from_root:
        text = f"{text}; the first was {name}{on}" if is_first else text
        return f"{text}; the last {later_text(end)} than the first" if end.low > 0 else text
    text = f"{text}; the first{who} {later_text(start)}"
    return f"{text}; the last {later_text(end)}" if others else text


def clocks_text(cascade: Cascade, clocks: Clocks) -> str:
    """Return how exactly times of different processes can be compared; empty if there is only one."""
    if len(cascade.events) < 2:  # noqa: PLR2004 - a pair
        return ""
    untimed = [event for event in cascade.events if event.at_ns is None]
    unknown = {event.failure.node for event in cascade.events if event.at_ns is not None and event.bounds is None}
    if unknown:  # the unknown clock may be the one that all are compared with
        timed = {event.failure.node for event in cascade.events if event.at_ns is not None}
        unknown = {node for node in timed if not clocks.offset(node).is_known} or unknown
    widths = [event.bounds.high - event.bounds.low for event in cascade.events if event.bounds is not None]
    said = []
    if untimed:
        said.append(f"{len(untimed)} of {len(cascade.events)} have no recorded time")
    if unknown:
        whose = ", ".join(sorted(unknown)) if len(unknown) <= _FEW and "" not in unknown else f"{len(unknown)} nodes"
        clock = "clock" if len(unknown) == 1 else "clocks"
        said.append(f"the {clock} of {whose} could not be checked")
    if max(widths, default=0) > _MS:
        said.append(f"times are known to within {duration(max(widths))}")
    elif not said:
        said.append("all processes use one clock")
    return "; ".join(said)


def coverage_text(verdict: Verdict, cascade: Cascade) -> str:
    """Return how many nodes reported; with what is missing, a comma follows the numbers."""
    coverage = verdict.coverage
    expected = coverage.expected if coverage.expected is not None else "an unknown number"
    text = f"{coverage.reported} of {expected}"
    if coverage.expected is not None and coverage.reported > coverage.expected:
        text = f"{coverage.reported}, more than the {coverage.expected} that were expected"
    parts = [] if coverage.complete else ["incomplete"]
    silent = sum(node.state is State.UNREPORTED for node in cascade.nodes)
    if silent and coverage.expected is not None and coverage.reported + silent > coverage.expected:
        parts.append(f"{silent} more joined and sent no report")
    missing = cascade.count(State.UNREPORTED)
    if missing and coverage.expected is not None and coverage.reported >= coverage.expected:
        parts.append(f"{counted(missing, 'rank')} sent no report")
    if coverage.unreadable:
        parts.append(f"{counted(coverage.unreadable, 'document')} could not be read")
    if not verdict.settled:
        parts.append("waiting for the others timed out")
    return ", ".join([text, *parts])
