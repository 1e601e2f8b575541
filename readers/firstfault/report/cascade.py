"""Who did what: the state of every rank and node, groups of identical errors, and how much later than the root cause.

Pure functions from what was read and concluded.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.assemble import silent_nodes
from firstfault.evidence.clocks import Clocks, Interval
from firstfault.evidence.standing import Standing, findings_of
from firstfault.model import Phase, Scope, Subject
from firstfault.report.words import State, duration
from firstfault.text import one_line, printable, sentence_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from firstfault.model import JobErrors, NodePresence, Verdict, WorkerError

__all__ = ["Cascade", "Event", "Group", "NodeState", "RankState", "cascade_of", "line_of"]

_LINE = 200
_TENTH = 10


@dataclass(frozen=True, slots=True)
class Event:
    """One failure of the round that is judged, and when it was, seen from the root cause."""

    failure: WorkerError
    state: State
    at_ns: int | None
    """Nanoseconds after the origin, as well as that is known; negative: before. None: no time is known."""
    bounds: Interval | None
    """Between which times after the origin it certainly was; None: the clocks were never compared."""

    @property
    def key(self) -> tuple[str, State]:
        """Whose group it is in: its fault and its state; a fault without a fingerprint is nobody else's."""
        return (self.failure.fingerprint or f"#{id(self.failure)}", self.state)

    @property
    def brief(self) -> str:
        """How much later, as short as can be: "+42 ms", "+0.2 s to +1.2 s", "~ +42 ms" by a clock nobody compared."""
        if self.at_ns is None:
            return ""
        if self.bounds is None:
            return f"~ {_signed(self.at_ns)}"
        if (self.bounds.high - self.bounds.low) * _TENTH <= abs(self.at_ns) or self.bounds.low == self.bounds.high:
            return _signed(self.at_ns)
        return f"{_signed(self.bounds.low)} to {_signed(self.bounds.high)}"

    @property
    def later(self) -> str:
        """How much later, in words; empty if nobody knows."""
        if self.at_ns is None:
            return ""
        if self.bounds is None:
            return f"{_moved(self.at_ns)} by its own node's clock"
        width = self.bounds.high - self.bounds.low
        if width * _TENTH <= abs(self.at_ns):
            return _moved(self.at_ns)
        if self.bounds.low >= 0:
            return f"{duration(self.bounds.low)} to {duration(self.bounds.high)} later"
        if self.bounds.high <= 0:
            return f"{duration(self.bounds.high)} to {duration(self.bounds.low)} earlier"
        return f"at most {duration(max(-self.bounds.low, self.bounds.high))} apart"


@dataclass(frozen=True, slots=True)
class Group:
    """Failures of one fault and one state."""

    number: int
    """Counted from 1."""
    state: State
    what: str
    """The failure in one or two words."""
    line: str
    """What the first of them said, in a line."""
    ranks: tuple[int, ...]
    """Ascending; of ranks that were not opened too."""
    nodes: tuple[str, ...]
    count: int
    """Processes, agents and files; more than `ranks` if some have none."""
    opened: int
    """Of how many a document was read."""
    first: Event | None
    """The earliest; None if none was opened."""


@dataclass(frozen=True, slots=True)
class RankState:
    """What became of one rank."""

    rank: int
    state: State
    node: str = ""
    local_rank: int | None = None
    group: int | None = None
    """Number of its group; None: it left no error."""
    later: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class NodeState:
    """What became of one node."""

    name: str
    state: State | None
    """ROOT or SUSPECT if the node itself is, SILENT if it was not heard to its end, FINISHED; None: it reported."""
    group_rank: int | None = None
    ranks: tuple[int, ...] = ()
    note: str = ""
    """What it says of the failure, or what is not known of it."""


@dataclass(frozen=True, slots=True)
class Cascade:
    """Everything that became of one attempt."""

    events: tuple[Event, ...] = ()
    """Root cause first, then by time."""
    groups: tuple[Group, ...] = ()
    """Those of the root cause first, then by size."""
    ranks: tuple[RankState, ...] = ()
    """By rank; all that anybody has spoken of."""
    nodes: tuple[NodeState, ...] = ()
    """By group rank and name."""
    world_size: int = 0
    """0: nobody said."""
    from_root: bool = True
    """Whether times are counted from the root cause; else from the first failure, since nobody saw the root's begin."""

    def count(self, state: State) -> int:
        """Return how many ranks are in a state."""
        return sum(item.state is state for item in self.ranks)

    def group(self, number: int | None) -> Group | None:
        """Return a group by its number, None if there is none."""
        return self.groups[number - 1] if number is not None and 0 < number <= len(self.groups) else None


def cascade_of(job: JobErrors, verdict: Verdict) -> Cascade:
    """Return what became of every rank and node of an attempt."""
    clocks = Clocks(job)
    states = _states(job, verdict)
    origin = _origin(job, verdict)
    events = [_event(failure, state, origin, clocks) for failure, state in zip(job.failures, states, strict=True)]
    events.sort(key=_order)
    groups = _groups(job, verdict, events)
    nodes = _nodes(job, verdict)
    ranks = _ranks(job, verdict, events, groups)
    return Cascade(tuple(events), groups, ranks, nodes, _world_size(job, ranks), origin is verdict.root)


def line_of(failure: WorkerError) -> str:
    """Return what a failure says, in a line, without who it was."""
    if failure.stopped_by_agent:
        sent = failure.sent_signals[0]
        return one_line(f"{sent.signal}: {sent.reason}", _LINE)
    if failure.exception is not None:
        name = failure.exception.type.rsplit(".", 1)[-1]
        text = sentence_of(failure.exception.message)
        return one_line(f"{name}: {text}" if text else name, _LINE)
    if failure.signal:
        return one_line(f"{failure.signal}, which its agent had not sent", _LINE)
    if failure.exit_code is not None:
        return f"exit code {failure.exit_code}, without an exception"
    return one_line(failure.message, _LINE) or failure.code


# --- states ---------------------------------------------------------------------------------------------------------


def _states(job: JobErrors, verdict: Verdict) -> list[State]:
    """The state of each failure, in their order."""
    if verdict.scope is not Scope.UNDETERMINED:
        return [_state(failure, verdict) for failure in job.failures]
    unclear = [finding.standing is not Standing.CONSEQUENCE for finding in findings_of(job)]
    found = [_state(failure, verdict) for failure in job.failures]
    return [
        State.UNCLEAR if state is State.VICTIM and may_be else state
        for state, may_be in zip(found, unclear, strict=True)
    ]


def _state(failure: WorkerError, verdict: Verdict) -> State:
    if failure is verdict.root or _is_of_the_root(failure, verdict):
        return State.ROOT
    if any(_is_suspect(failure, suspect.rank, suspect.node) for suspect in verdict.suspects):
        return State.SUSPECT
    return State.STOPPED if failure.stopped_by_agent else State.VICTIM


def _is_of_the_root(failure: WorkerError, verdict: Verdict) -> bool:
    """Whether it is one of several ranks with the root cause's fault, or told of by its node's other document."""
    if verdict.scope in {Scope.RANK, Scope.RANKS}:
        is_alike = failure.fingerprint == verdict.fingerprint or verdict.root is None
        is_there = len(verdict.ranks) > 1 or not verdict.node or failure.node == verdict.node
        return failure.rank in verdict.ranks and is_alike and is_there
    if verdict.scope is Scope.UNDETERMINED:
        return False
    return failure.subject is Subject.AGENT and failure.node == verdict.node


def _is_suspect(failure: WorkerError, rank: int | None, node: str | None) -> bool:
    if rank is None:
        return failure.subject is Subject.AGENT and failure.node == node
    return failure.rank == rank and (not node or failure.node == node)


# --- times ----------------------------------------------------------------------------------------------------------


def _origin(job: JobErrors, verdict: Verdict) -> WorkerError | None:
    """From whose time others are counted: the root cause's, if its document tells when it was.

    Of a rank that hung it tells when its agent stopped it; then the first who could wait no longer has to do.
    """
    root = verdict.root
    if root is not None and root.timestamp_ns is not None and not root.stopped_by_agent:
        return root
    timed = [failure for failure in job.failures if failure.timestamp_ns is not None and failure is not root]
    return timed[0] if timed else root


def _event(failure: WorkerError, state: State, origin: WorkerError | None, clocks: Clocks) -> Event:
    if origin is None:
        return Event(failure, state, None, None)
    apart = Interval(0, 0) if failure is origin else clocks.later(origin, failure)
    if apart is not None:
        # what was noticed late may have happened before; an agent knows when it stopped a process
        early = 0 if failure.stopped_by_agent else clocks.noticed_after_ns(failure)
        late = 0 if failure is origin or origin.stopped_by_agent else clocks.noticed_after_ns(origin)
        return Event(failure, state, (apart.low + apart.high) // 2, Interval(apart.low - early, apart.high + late))
    if failure.timestamp_ns is None or origin.timestamp_ns is None:
        return Event(failure, state, None, None)
    return Event(failure, state, failure.timestamp_ns - origin.timestamp_ns, None)


def _order(event: Event) -> tuple[object, ...]:
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


# --- groups ---------------------------------------------------------------------------------------------------------


def _groups(job: JobErrors, verdict: Verdict, events: Sequence[Event]) -> tuple[Group, ...]:
    found: dict[tuple[str, State], list[Event]] = defaultdict(list)
    states: dict[str, set[State]] = defaultdict(set)
    for event in events:
        print_, state = event.key
        found[print_, state].append(event)
        states[print_].add(state)
    # ranks of which no document was opened belong to their fault's group, if there is one
    unopened = {group.fingerprint for group in job.unopened}
    alike = {print_: job.unopened_like(print_) for print_ in unopened if len(states.get(print_, ())) == 1}
    groups = [_group(of_one, alike.get(print_, ())) for (print_, _), of_one in found.items()]
    others = State.UNCLEAR if verdict.scope is Scope.UNDETERMINED else State.VICTIM
    groups += [
        Group(0, others, "not opened", "", unknown.ranks, (), max(unknown.count, len(unknown.ranks)), 0, None)
        for unknown in job.unopened
        if unknown.fingerprint not in states
    ]
    groups.sort(key=lambda group: (group.state is not State.ROOT, -group.count, group.ranks[:1], group.what))
    return tuple(replace(group, number=number) for number, group in enumerate(groups, 1))


def _group(events: Sequence[Event], unopened: tuple[int, ...]) -> Group:
    first = events[0]
    ranks = {event.failure.rank for event in events if event.failure.rank is not None} | set(unopened)
    return Group(
        number=0,
        state=first.state,
        what=printable(first.failure.what),
        line=line_of(first.failure),
        ranks=tuple(sorted(ranks)),
        nodes=tuple(sorted({event.failure.node for event in events if event.failure.node})),
        count=len(events) + len(unopened),
        opened=len(events),
        first=first,
    )


# --- ranks and nodes ------------------------------------------------------------------------------------------------


def _ranks(job: JobErrors, verdict: Verdict, events: Sequence[Event], groups: Sequence[Group]) -> tuple[RankState, ...]:
    places = _places(job.roster)
    known: dict[int, RankState] = {}
    for rank, line in verdict.victims.by_rank:
        # of a verdict without its documents this is all there is
        known[rank] = RankState(rank, State.VICTIM, *places.get(rank, ("", None)), line=line)
    for rank in verdict.ranks:
        known[rank] = RankState(rank, State.ROOT, *places.get(rank, (verdict.node or "", None)), line=verdict.headline)
    for suspect in verdict.suspects:
        if suspect.rank is not None:
            where = places.get(suspect.rank, (suspect.node or "", None))
            known[suspect.rank] = RankState(suspect.rank, State.SUSPECT, *where, line=suspect.why)
    for group in groups:
        for rank in group.ranks:
            known[rank] = RankState(
                rank, group.state, *places.get(rank, ("", None)), group=group.number, line=group.line
            )
    numbers = {group.first.key: group.number for group in groups if group.first is not None}
    for event in reversed(events):  # where two nodes claim one rank, the first of them is shown
        failure = event.failure
        if failure.rank is None:
            continue
        known[failure.rank] = RankState(
            failure.rank,
            event.state,
            failure.node,
            failure.place.local_rank
            if failure.place.local_rank is not None
            else places.get(failure.rank, ("", None))[1],
            numbers.get(event.key, known[failure.rank].group if failure.rank in known else None),
            event.later,
            line_of(failure),
        )
    finished = {rank for entry in job.roster if entry.phase is Phase.SUCCEEDED for rank in entry.ranks}
    silent = set(places) | set(range(_told_world_size(job)))
    for rank in sorted(silent - set(known)):
        state = State.FINISHED if rank in finished else State.SILENT
        known[rank] = RankState(rank, state, *places.get(rank, ("", None)))
    return tuple(known[rank] for rank in sorted(known))


def _places(roster: Iterable[NodePresence]) -> dict[int, tuple[str, int | None]]:
    """The node and the local rank of every rank that the roster names."""
    return {rank: (entry.place.node, index) for entry in roster for index, rank in enumerate(sorted(entry.ranks))}


def _told_world_size(job: JobErrors) -> int:
    """How many ranks the round has, as the documents say; 0: they do not."""
    return max((failure.place.world_size for failure in job.failures), default=0)


def _world_size(job: JobErrors, ranks: Sequence[RankState]) -> int:
    return max(_told_world_size(job), len(ranks))


def _nodes(job: JobErrors, verdict: Verdict) -> tuple[NodeState, ...]:
    silent = set(silent_nodes(job))
    entries: dict[str, list[NodePresence]] = defaultdict(list)
    for entry in job.roster:
        entries[entry.place.node].append(entry)
    names = dict.fromkeys(entries)
    names.update(dict.fromkeys(failure.node for failure in job.failures if failure.node))
    if verdict.node:
        names.setdefault(verdict.node)
    suspects = {suspect.node for suspect in verdict.suspects if suspect.rank is None}
    root = verdict.node if verdict.scope in {Scope.NODE, Scope.EXTERNAL} else None
    ranks: dict[str, set[int]] = defaultdict(set)
    for failure in job.failures:
        if failure.rank is not None:
            ranks[failure.node].add(failure.rank)
    found = []
    for name in names:
        told = next((entry.first_failure_reason for entry in entries[name] if entry.first_failure_reason), "")
        state, note = _state_of_node(entries[name]), told
        if name in silent:
            state, note = State.SILENT, "it took part, and never said that it was done"
        if name in suspects:
            state = State.SUSPECT
        if name == root:
            state = State.ROOT
        numbers = [entry.place.group_rank for entry in entries[name] if entry.place.group_rank is not None]
        all_ranks = ranks[name].union(*(entry.ranks for entry in entries[name]))
        found.append(NodeState(name, state, min(numbers, default=None), tuple(sorted(all_ranks)), note))
    return tuple(sorted(found, key=lambda node: (node.group_rank is None, node.group_rank or 0, node.name)))


def _state_of_node(entries: Sequence[NodePresence]) -> State | None:
    """FINISHED if it says so, else nothing that its ranks do not say."""
    said = [entry.phase for entry in entries if entry.phase is not Phase.JOINED]
    return State.FINISHED if said and all(phase is Phase.SUCCEEDED for phase in said) else None
