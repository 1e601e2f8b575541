"""Groups of identical errors."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.evidence.failure_message import message_of
from firstfault.model import Scope
from firstfault.report.headline import headline_parts, line_of
from firstfault.report.words import State, ranks_text
from firstfault.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from firstfault.model import JobErrors, Verdict
    from firstfault.report.events import Event


_NOT_OPENED = "its documents were listed but not opened"


@dataclass(frozen=True, slots=True)
class Group:
    """Failures of one fault and one state."""

    number: int
    """Counted from 1."""
    state: State
    what: str
    """The failure in one or two words."""
    line: str
    """What happened to the first of them, in a line."""
    ranks: tuple[int, ...]
    """Ascending; with ranks whose documents were not opened."""
    nodes: tuple[str, ...]
    count: int
    """Processes, agents and files; more than `ranks` if some have no rank."""
    opened: int
    """How many of them have a document that was read."""
    first: Event | None
    """The earliest; None if none was opened."""

    @property
    def said(self) -> str:
        """What happened to the first of them, or the failure's name if nothing more is known."""
        return self.line or self.what

    def head(self, limit: int = 0) -> str:
        """Return its mark, size, state and ranks: "s 2 stopped by its agent, ranks 1-2"; `limit`: as `ranks_text`."""
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {ranks_text(self.ranks, limit)}" if self.ranks else ""
        return ", ".join(
            filter(None, [f"{self.state.mark} {self.count} {self.state.value}", ranks or "".join(self.nodes[:1])])
        )


def groups_of(job: JobErrors, verdict: Verdict, events: Sequence[Event]) -> list[Group]:
    """Return the groups of the events, and of documents that were not opened; not numbered yet."""
    found: dict[tuple[str, State], list[Event]] = defaultdict(list)
    states: dict[str, set[State]] = defaultdict(set)
    for event in events:
        found[event.key].append(event)
        states[event.key[0]].add(event.state)
    unopened = _unopened(job)
    groups = []
    for (print_, _), of_one in found.items():
        # unopened ranks have the state of their fault, if all its opened ranks have one state
        alike = unopened.pop(print_, ((), 0))[0] if len(states[print_]) == 1 else ()
        groups.append(_group(of_one, alike, verdict))
    for ranks, count in unopened.values():
        groups.append(Group(0, State.UNCLEAR, "not opened", _NOT_OPENED, ranks, (), max(count, len(ranks)), 0, None))
    return groups


def _unopened(job: JobErrors) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return by fingerprint the unopened ranks, and the number of unopened documents without a rank."""
    opened = {failure.rank for failure in job.failures}
    ranks: dict[str, set[int]] = defaultdict(set)
    counts: dict[str, int] = defaultdict(int)
    for group in job.unopened:
        ranks[group.fingerprint] |= set(group.ranks) - opened
        counts[group.fingerprint] += group.count if not group.ranks else 0
    return {
        print_: (tuple(sorted(ranks[print_])), counts[print_]) for print_ in counts if ranks[print_] or counts[print_]
    }


def _group(events: Sequence[Event], unopened: tuple[int, ...], verdict: Verdict) -> Group:
    first = events[0]
    ranks = {event.failure.rank for event in events if event.failure.rank is not None} | set(unopened)
    what, line = printable(message_of(first.failure).what), line_of(first.failure)
    if first.state is State.ROOT and first.failure.stopped_by_agent:
        # the reason for stopping it is not its fault
        what, line = headline_parts(verdict)
    elif first.state is State.STOPPED and len({line_of(event.failure) for event in events}) > 1:
        line = f"{first.failure.sent_signals[0].signal}, sent by their agents after the failure"
    return Group(
        number=0,
        state=first.state,
        what=what,
        line=line,
        ranks=tuple(sorted(ranks)),
        nodes=tuple(sorted({event.failure.node for event in events if event.failure.node})),
        count=len(events) + len(unopened),
        opened=len(events),
        first=first,
    )


def with_unreported(groups: list[Group], ranks: Mapping[State, Sequence[int]], verdict: Verdict) -> tuple[Group, ...]:
    """Return the groups with those of ranks without a document, numbered: the root cause's first, then by size.

    Args:
        groups: as `groups_of` returns them.
        ranks: without a document, by state.
        verdict: on the job.
    """
    is_shown = any(group.state is State.ROOT for group in groups)
    if verdict.scope in {Scope.NODE, Scope.EXTERNAL} and verdict.node and not is_shown:
        groups.append(Group(0, State.ROOT, *headline_parts(verdict), (), (verdict.node,), 1, 0, None))
    for state in (State.ROOT, State.SUSPECT, State.UNREPORTED):
        missing = tuple(ranks.get(state, ()))
        texts = headline_parts(verdict) if state is State.ROOT else ("no report", "its error document is missing")
        if missing:
            groups.append(Group(0, state, *texts, missing, (), len(missing), 0, None))
    groups.sort(key=lambda group: (group.state is not State.ROOT, -group.count, group.ranks[:1], group.what))
    return tuple(replace(group, number=number) for number, group in enumerate(groups, 1))
