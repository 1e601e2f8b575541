"""Who did what: the state of every rank and node, groups of identical errors, and how much later than the root cause.

Pure functions from what was read and concluded.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.evidence.classification import FailureClass
from firstfault.evidence.clocks import Interval
from firstfault.model import Phase, Scope, Subject
from firstfault.model.roster import silent_nodes
from firstfault.report.answers import headline_parts
from firstfault.report.words import State, duration
from firstfault.text import one_line, printable, sentence_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from firstfault.evidence.classification import ClassifiedFailure
    from firstfault.evidence.clocks import Clocks
    from firstfault.evidence.diagnosis import Diagnosis
    from firstfault.model import JobErrors, NodePresence, Verdict, WorkerError

__all__ = ["Cascade", "Event", "Group", "NodeState", "RankState", "cascade_of", "later_text", "line_of"]

_LINE = 200
_TENTH = 10
_LARGEST_WORLD = 100_000
"""A number of ranks beyond it is taken for a damaged document's."""


@dataclass(frozen=True, slots=True)
class Event:
    """One failure of the round that is judged, and when it was, seen from the root cause."""

    failure: WorkerError
    state: State
    at_ns: int | None
    """Nanoseconds after the origin, as well as that is known; negative: before. None: no time is known."""
    bounds: Interval | None
    """Between which times after the origin it certainly was; None: the clocks were never compared."""
    is_origin: bool = False
    """Times are counted from it."""
    from_root: bool = True
    """As `Cascade.from_root`."""

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
        """How much later, in words; empty if nobody knows, and of the origin."""
        if self.at_ns is None or self.is_origin:
            return ""
        text = f"{_moved(self.at_ns)} by its own node's clock" if self.bounds is None else later_text(self.bounds)
        return text if self.from_root else f"{text}, counted from the first failure"

    @property
    def until(self) -> str:
        """When it was at the latest, as short as can be."""
        if self.bounds is None:
            return self.brief
        return _signed(self.bounds.high)

    @property
    def is_ordered(self) -> bool:
        """Whether it is known that it was before the origin, or after it."""
        return self.bounds is None or self.is_origin or self.bounds.low >= 0 or self.bounds.high <= 0


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
    from_root: bool = True
    """Whether times are counted from the root cause; else from the first failure, since nobody saw the root's begin."""

    def count(self, state: State) -> int:
        """Return how many ranks are in a state."""
        return sum(item.state is state for item in self.ranks)


def cascade_of(job: JobErrors, verdict: Verdict, diagnosis: Diagnosis) -> Cascade:
    """Return what became of every rank and node of an attempt.

    Args:
        job: what was read, without credentials.
        verdict: on it.
        diagnosis: of the job; in the order of its failures.
    """
    clocks = diagnosis.clocks
    states = [
        _state(failure, judged, verdict) for failure, judged in zip(job.failures, diagnosis.classified, strict=True)
    ]
    origin = _origin(job, verdict)
    from_root = origin is not None and origin is verdict.root
    events = [
        replace(_event(failure, state, origin, clocks), is_origin=failure is origin, from_root=from_root)
        for failure, state in zip(job.failures, states, strict=True)
    ]
    events.sort(key=_order)
    groups = _groups(job, verdict, events)
    groups_and_silence = _with_the_silent(groups, _ranks(job, verdict, events, groups), verdict)
    ranks = _ranks(job, verdict, events, groups_and_silence)
    return Cascade(tuple(events), groups_and_silence, ranks, _nodes(job, verdict), from_root)


def later_text(bounds: Interval) -> str:
    """Return how much later something was that lies between bounds, nanoseconds, in words."""
    low, high = bounds.low, bounds.high
    if (high - low) * _TENTH <= abs(low + high) // 2:
        return _moved((low + high) // 2)
    if low >= 0:
        return f"{duration(low)} to {duration(high)} later"
    if high <= 0:
        return f"{duration(high)} to {duration(low)} earlier"
    return f"between {duration(low)} earlier and {duration(high)} later"


def line_of(failure: WorkerError) -> str:
    """Return what a failure says, in a line, without who it was."""
    if failure.stopped_by_agent and failure.signal in {"", *(sent.signal for sent in failure.sent_signals)}:
        sent = failure.sent_signals[0]
        return one_line(f"{failure.signal or sent.signal}: {sent.reason}", _LINE)
    if failure.subject is Subject.AGENT and failure.exception is None:
        return one_line(failure.message, _LINE) or failure.code
    if failure.exception is not None:
        name = failure.exception.type.rsplit(".", 1)[-1]
        text = sentence_of(failure.exception.message)
        return one_line(f"{name}: {text}" if text else name, _LINE)
    if failure.signal:
        return one_line(f"{failure.signal}, which its agent had not sent", _LINE)
    if failure.exit_code is not None:
        return f"exit code {failure.exit_code}, without an exception"
    # flytekit's texts start with ``Trace:`` and carry the sentence after ``Message:``
    _, found, tail = failure.message.rpartition("\nMessage:")
    return one_line(tail if found else failure.message, _LINE) or failure.code


# --- states ---------------------------------------------------------------------------------------------------------

_STATES = {FailureClass.CONSEQUENCE: State.VICTIM, FailureClass.UNCLEAR: State.UNCLEAR}


def _state(failure: WorkerError, judged: ClassifiedFailure, verdict: Verdict) -> State:
    """The state of a failure: what the verdict says about it, else its class."""
    failure_class = judged.failure_class
    if verdict.scope is not Scope.UNDETERMINED and (failure is verdict.root or _is_of_the_root(failure, verdict)):
        return State.ROOT
    if any(_is_suspect(failure, suspect.rank, suspect.node) for suspect in verdict.suspects):
        return State.SUSPECT
    if failure.stopped_by_agent:
        return State.STOPPED if failure_class is FailureClass.CONSEQUENCE else State.UNCLEAR
    if judged.waited and verdict.category == "hang" and verdict.scope is not Scope.UNDETERMINED:
        return State.VICTIM  # of the one that it waited for
    if (
        failure_class is FailureClass.UNCLEAR
        and verdict.scope is not Scope.UNDETERMINED
        and verdict.confidence == "high"
    ):
        return State.VICTIM  # alone it might have been either; the verdict leaves no doubt
    # it failed by itself: a suspect of a strategy that names suspects, though it names only a few of them
    own = State.SUSPECT if verdict.suspects and verdict.scope is not Scope.UNDETERMINED else State.UNCLEAR
    return _STATES.get(failure_class, own)


def _is_of_the_root(failure: WorkerError, verdict: Verdict) -> bool:
    """Whether it is of one of the ranks that the verdict names, with their fault, or of the node's agent.

    Not everybody with that fault: of deaths by one signal the verdict may name the first alone.
    """
    if verdict.scope in {Scope.RANK, Scope.RANKS}:
        is_alike = verdict.root is None or failure.fingerprint == verdict.fingerprint
        is_there = len(verdict.ranks) > 1 or not verdict.node or failure.node == verdict.node
        return failure.rank in verdict.ranks and is_alike and is_there
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
    is_timed = root is not None and root.timestamp_ns is not None
    if root is not None and is_timed and not root.stopped_by_agent and verdict.category != "hang":
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


def _groups(job: JobErrors, verdict: Verdict, events: Sequence[Event]) -> list[Group]:
    found: dict[tuple[str, State], list[Event]] = defaultdict(list)
    states: dict[str, set[State]] = defaultdict(set)
    for event in events:
        found[event.key].append(event)
        states[event.key[0]].add(event.state)
    unopened = _unopened(job)
    groups = []
    for (print_, _), of_one in found.items():
        # ranks of which no document was opened are in their fault's state, if it has one only
        alike = unopened.pop(print_, ((), 0))[0] if len(states[print_]) == 1 else ()
        groups.append(_group(of_one, alike, verdict))
    for ranks, count in unopened.values():
        groups.append(Group(0, State.UNCLEAR, "not opened", _NOT_OPENED, ranks, (), max(count, len(ranks)), 0, None))
    return groups


_NOT_OPENED = "its documents were listed and not opened"


def _unopened(job: JobErrors) -> dict[str, tuple[tuple[int, ...], int]]:
    """Ranks, and the number of documents, that were not opened, by fault."""
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
    what, line = printable(first.failure.what), line_of(first.failure)
    if first.state is State.ROOT and first.failure.stopped_by_agent:
        # what it was stopped for is not what it did
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


def _with_the_silent(groups: list[Group], ranks: Sequence[RankState], verdict: Verdict) -> tuple[Group, ...]:
    """The groups with those that left no error, numbered: the root cause's first, then by size."""
    is_shown = any(group.state is State.ROOT for group in groups)
    if verdict.scope in {Scope.NODE, Scope.EXTERNAL} and verdict.node and not is_shown:
        groups.append(Group(0, State.ROOT, *headline_parts(verdict), (), (verdict.node,), 1, 0, None))
    for state in (State.ROOT, State.SUSPECT, State.SILENT):
        mute = tuple(item.rank for item in ranks if item.state is state and item.group is None)
        if mute and state is State.ROOT:
            groups.append(Group(0, state, *headline_parts(verdict), mute, (), len(mute), 0, None))
        elif mute:
            groups.append(Group(0, state, "no report", "it left no error document", mute, (), len(mute), 0, None))
    groups.sort(key=lambda group: (group.state is not State.ROOT, -group.count, group.ranks[:1], group.what))
    return tuple(replace(group, number=number) for number, group in enumerate(groups, 1))


# --- ranks and nodes ------------------------------------------------------------------------------------------------


def _ranks(job: JobErrors, verdict: Verdict, events: Sequence[Event], groups: Sequence[Group]) -> tuple[RankState, ...]:
    places = _places(job.roster)
    known = _spoken_of(verdict, groups, places)
    numbers = {group.first.key: group.number for group in groups if group.first is not None}
    for event in reversed(events):  # where two nodes claim one rank, the first of them is shown
        failure = event.failure
        if failure.rank is None:
            continue
        local = failure.place.local_rank
        known[failure.rank] = RankState(
            rank=failure.rank,
            state=event.state,
            node=failure.node,
            local_rank=local if local is not None else places.get(failure.rank, ("", None))[1],
            group=numbers[event.key],
            later=event.later,
            line=line_of(failure),
        )
    finished = {rank for entry in job.roster if entry.phase is Phase.SUCCEEDED for rank in entry.ranks}
    for rank in {*places, *range(_world_size(job))} - set(known):
        state = State.FINISHED if rank in finished else State.SILENT
        # a group of the silent ones is made of these
        number = next((group.number for group in groups if group.state is state and not group.opened), None)
        known[rank] = RankState(rank, state, *places.get(rank, ("", None)), group=number)
    return tuple(known[rank] for rank in sorted(known))


def _spoken_of(
    verdict: Verdict, groups: Sequence[Group], places: dict[int, tuple[str, int | None]]
) -> dict[int, RankState]:
    """The ranks of which the verdict, or a group, says something; of a verdict without its documents that is all."""
    is_sure = verdict.scope is not Scope.UNDETERMINED
    said = [(rank, State.VICTIM if is_sure else State.UNCLEAR, line, "") for rank, line in verdict.victims.by_rank]
    said += [(rank, State.ROOT, verdict.headline, verdict.node or "") for rank in verdict.ranks if is_sure]
    said += [
        (item.rank, State.SUSPECT, item.why, item.node or "") for item in verdict.suspects if item.rank is not None
    ]
    known = {
        rank: RankState(rank, state, *places.get(rank, (node, None)), line=line) for rank, state, line, node in said
    }
    for group in groups:
        for rank in group.ranks:
            where = places.get(rank, (known[rank].node if rank in known else "", None))
            known[rank] = RankState(rank, group.state, *where, group=group.number or None, line=group.line)
    return known


def _places(roster: Iterable[NodePresence]) -> dict[int, tuple[str, int | None]]:
    """The node and the local rank of every rank that the roster names."""
    return {rank: (entry.place.node, index) for entry in roster for index, rank in enumerate(sorted(entry.ranks))}


def _world_size(job: JobErrors) -> int:
    """How many ranks the round has, as the documents say; 0 if they do not, or say what cannot be."""
    told = max((failure.place.world_size for failure in job.failures), default=0)
    return told if told <= _LARGEST_WORLD else 0


def _nodes(job: JobErrors, verdict: Verdict) -> tuple[NodeState, ...]:
    silent = set(silent_nodes(job))
    entries: dict[tuple[str, int | None], list[NodePresence]] = defaultdict(list)
    ranks: dict[tuple[str, int | None], set[int]] = defaultdict(set)
    for entry in job.roster:
        key = (entry.place.node, entry.place.group_rank)
        entries[key].append(entry)
        ranks[key] |= set(entry.ranks)
    known = {name: group_rank for name, group_rank in entries if name}
    for failure in job.failures:
        if failure.node:
            key = (failure.node, failure.place.group_rank)
            key = key if key in entries else (failure.node, known.get(failure.node, failure.place.group_rank))
            ranks[key] |= set() if failure.rank is None else {failure.rank}
    if verdict.node and not any(name == verdict.node for name, _ in ranks):
        ranks[verdict.node, None] = set()
    suspects = {suspect.node for suspect in verdict.suspects if suspect.rank is None}
    root = verdict.node if verdict.scope in {Scope.NODE, Scope.EXTERNAL} else None
    found = []
    for (name, group_rank), own in ranks.items():
        said = entries.get((name, group_rank), [])
        state, note = (
            _state_of_node(said),
            next((item.first_failure_reason for item in said if item.first_failure_reason), ""),
        )
        if (name or f"group rank {group_rank}") in silent:
            state, note = State.SILENT, "it took part, and never said that it was done"
        if name and name in suspects:
            state = State.SUSPECT
        if name and name == root:
            state = State.ROOT
        found.append(NodeState(name, state, group_rank, tuple(sorted(own)), note))
    return tuple(sorted(found, key=lambda node: (node.group_rank is None, node.group_rank or 0, node.name)))


def _state_of_node(entries: Sequence[NodePresence]) -> State | None:
    """FINISHED if it says so, else nothing that its ranks do not say."""
    said = [entry.phase for entry in entries if entry.phase is not Phase.JOINED]
    return State.FINISHED if said and all(phase is Phase.SUCCEEDED for phase in said) else None
