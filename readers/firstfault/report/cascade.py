"""The state of every rank and node of an attempt, with its failures in time and in groups."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.evidence.classification import FailureClass
from firstfault.model import Phase, Scope, Subject
from firstfault.model.roster import unreported_nodes
from firstfault.report.events import event_of, event_order, origin_of
from firstfault.report.groups import groups_of, with_unreported
from firstfault.report.headline import line_of
from firstfault.report.words import State, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from firstfault.evidence.classification import ClassifiedFailure
    from firstfault.evidence.diagnosis import Diagnosis
    from firstfault.model import JobErrors, NodePresence, Verdict, WorkerError
    from firstfault.report.events import Event
    from firstfault.report.groups import Group

_LARGEST_WORLD = 100_000
"""A document with a larger world size is damaged."""


@dataclass(frozen=True, slots=True)
class RankState:
    """What happened to one rank."""

    rank: int
    state: State
    node: str = ""
    local_rank: int | None = None
    group: int | None = None
    """Number of its group; None: it has no error."""
    later: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class NodeState:
    """What happened to one node."""

    name: str
    state: State | None
    """ROOT or SUSPECT if the node itself is one, UNREPORTED, or FINISHED; None: it reported a failure."""
    group_rank: int | None = None
    ranks: tuple[int, ...] = ()
    note: str = ""
    """The failure that it reports, or what is missing."""

    @property
    def line(self) -> str:
        """Its name, group rank, state and note: "w-1 (group rank 1): X root cause"."""
        number = f" (group rank {self.group_rank})" if self.group_rank is not None else ""
        state = f"{self.state.mark} {self.state.value}" if self.state is not None else ""
        said = "; ".join(filter(None, [state, self.note]))
        return f"{self.name}{number}" + (f": {said}" if said else "")


@dataclass(frozen=True, slots=True)
class Cascade:
    """What happened in one attempt."""

    events: tuple[Event, ...] = ()
    """Root cause first, then by time."""
    groups: tuple[Group, ...] = ()
    """Those of the root cause first, then by size."""
    ranks: tuple[RankState, ...] = ()
    """By rank; every rank that is known."""
    nodes: tuple[NodeState, ...] = ()
    """By group rank and name."""
    from_root: bool = True
    """Whether times are counted from the root cause; if its time is not known, from the first failure."""

    def count(self, state: State) -> int:
        """Return how many ranks are in a state."""
        return sum(item.state is state for item in self.ranks)

    def ranks_by_node(self) -> dict[str, str]:
        """Return the states of each node's ranks: "X 3 root cause; v 2 victim"."""
        found: dict[str, dict[State, list[int]]] = defaultdict(lambda: defaultdict(list))
        for item in self.ranks:
            found[item.node or "node not known"][item.state].append(item.rank)
        return {
            node: "; ".join(f"{state.mark} {ranks_text(ranks)} {state.value}" for state, ranks in states.items())
            for node, states in found.items()
        }


def cascade_of(job: JobErrors, verdict: Verdict, diagnosis: Diagnosis) -> Cascade:
    """Return what happened to every rank and node of an attempt.

    Args:
        job: what was read, without credentials.
        verdict: on it.
        diagnosis: of the job; in the order of its failures.
    """
    clocks = diagnosis.clocks
    states = [
        _state(failure, judged, verdict) for failure, judged in zip(job.failures, diagnosis.classified, strict=True)
    ]
    origin = origin_of(job, verdict)
    from_root = origin is not None and origin is verdict.root
    events = [
        replace(event_of(failure, state, origin, clocks), is_origin=failure is origin, from_root=from_root)
        for failure, state in zip(job.failures, states, strict=True)
    ]
    events.sort(key=event_order)
    groups = groups_of(job, verdict, events)
    ungrouped: dict[State, list[int]] = defaultdict(list)
    for item in _ranks(job, verdict, events, groups):
        if item.group is None:
            ungrouped[item.state].append(item.rank)
    numbered = with_unreported(groups, ungrouped, verdict)
    return Cascade(tuple(events), numbered, _ranks(job, verdict, events, numbered), _nodes(job, verdict), from_root)


# --- states ---------------------------------------------------------------------------------------------------------

_STATES = {FailureClass.CONSEQUENCE: State.VICTIM, FailureClass.UNCLEAR: State.UNCLEAR}


def _state(failure: WorkerError, judged: ClassifiedFailure, verdict: Verdict) -> State:
    """Return the state that the verdict gives a failure, else the one of its class."""
    failure_class = judged.failure_class
    if verdict.scope is not Scope.UNDETERMINED and (failure is verdict.root or _is_of_the_root(failure, verdict)):
        return State.ROOT
    if any(_is_suspect(failure, suspect.rank, suspect.node) for suspect in verdict.suspects):
        return State.SUSPECT
    if failure.stopped_by_agent:
        return State.STOPPED if failure_class is FailureClass.CONSEQUENCE else State.UNCLEAR
    if judged.waited and verdict.category == "hang" and verdict.scope is not Scope.UNDETERMINED:
        return State.VICTIM  # of the rank that it waited for
    if (
        failure_class is FailureClass.UNCLEAR
        and verdict.scope is not Scope.UNDETERMINED
        and verdict.confidence == "high"
    ):
        return State.VICTIM  # cause or victim by itself, but the verdict is certain
    # a fault of its own makes it a suspect if the strategy names suspects, of which it lists only a few
    own = State.SUSPECT if verdict.suspects and verdict.scope is not Scope.UNDETERMINED else State.UNCLEAR
    return _STATES.get(failure_class, own)


def _is_of_the_root(failure: WorkerError, verdict: Verdict) -> bool:
    """Whether a failure is of one of the verdict's ranks and has their fault, or is of the verdict's node's agent.

    Other ranks with the same fault are not root causes: of several SIGKILLs the verdict may name only the first.
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


# --- ranks and nodes ------------------------------------------------------------------------------------------------


def _ranks(job: JobErrors, verdict: Verdict, events: Sequence[Event], groups: Sequence[Group]) -> tuple[RankState, ...]:
    places = _places(job.roster)
    known = _known_ranks(verdict, groups, places)
    numbers = {group.first.key: group.number for group in groups if group.first is not None}
    for event in reversed(events):  # if two nodes claim one rank, the first event is kept
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
    for rank in {*places, *range(world_size(job))} - set(known):
        state = State.FINISHED if rank in finished else State.UNREPORTED
        # their group is made of exactly these ranks
        number = next((group.number for group in groups if group.state is state and not group.opened), None)
        known[rank] = RankState(rank, state, *places.get(rank, ("", None)), group=number)
    return tuple(known[rank] for rank in sorted(known))


def _known_ranks(
    verdict: Verdict, groups: Sequence[Group], places: dict[int, tuple[str, int | None]]
) -> dict[int, RankState]:
    """Return the ranks that the verdict or a group names; without documents there are no others."""
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
    """Return the node and the local rank of every rank in the roster."""
    return {rank: (entry.place.node, index) for entry in roster for index, rank in enumerate(sorted(entry.ranks))}


def world_size(job: JobErrors) -> int:
    """Return the world size that the documents state; 0 if they do not, or if it is not plausible."""
    stated = max((failure.place.world_size for failure in job.failures), default=0)
    return stated if stated <= _LARGEST_WORLD else 0


def _nodes(job: JobErrors, verdict: Verdict) -> tuple[NodeState, ...]:
    unreported = set(unreported_nodes(job))
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
        if (name or f"group rank {group_rank}") in unreported:
            state, note = State.UNREPORTED, "it had started and sent no report"
        if name and name in suspects:
            state = State.SUSPECT
        if name and name == root:
            state = State.ROOT
        found.append(NodeState(name, state, group_rank, tuple(sorted(own)), note))
    return tuple(sorted(found, key=lambda node: (node.group_rank is None, node.group_rank or 0, node.name)))


def _state_of_node(entries: Sequence[NodePresence]) -> State | None:
    """Return FINISHED if the node succeeded, else None: its ranks' states say more."""
    said = [entry.phase for entry in entries if entry.phase is not Phase.JOINED]
    return State.FINISHED if said and all(phase is Phase.SUCCEEDED for phase in said) else None
