"""The cascade: every failure with its time, groups of identical ones,
and the state of every rank and node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from firstfault.evidence.classification import ClassifiedFailure, FailureClass
from firstfault.evidence.clocks import Clocks, Interval
from firstfault.evidence.diagnosis import Diagnosis
from firstfault.evidence.texts import find_message
from firstfault.model import (
    JobErrors,
    NodePresence,
    Phase,
    Scope,
    Subject,
    Suspect,
    Verdict,
    WorkerError,
)
from firstfault.model.failure import JOB_END_WORDS, LAST_LINES_OF_SUCCESS, OF_LOGS
from firstfault.model.job import unreported_nodes
from firstfault.report.engine_words import find_engine_words
from firstfault.report.formatting import (
    MAX_LISTED_ITEMS,
    TENTH,
    format_range,
    format_ranks,
    format_shift,
    format_signed,
    later_text,
)
from firstfault.report.headline import headline_parts, summarize_failure
from firstfault.report.states import State
from firstfault.utils.text import counted, duration, printable

_LARGEST_WORLD = 100_000
"""A document with a larger world size is damaged."""
_INEXACT_NS = 1_000_000_000
"""Less exact times may put failures of one cascade into the wrong order, and are worth a row."""
_NOT_OPENED = "documents listed but not opened"
_STATES = {FailureClass.CONSEQUENCE: State.VICTIM, FailureClass.UNCLEAR: State.UNCLEAR}


@dataclass(frozen=True, slots=True)
class Event:
    """One failure of the judged round, and when it happened after the root cause."""

    failure: WorkerError
    state: State
    at_ns: int | None
    """Nanoseconds after the origin, the best estimate; negative: before. None: unknown."""
    bounds: Interval | None
    """Bounds of that time; None: the clocks could not be compared."""
    is_origin: bool = False
    """Times are counted from it."""
    from_root: bool = True
    """As `Cascade.from_root`."""

    @property
    def key(self) -> tuple[str, State]:
        """Its group: its fault and its state. A fault without a fingerprint
        is alone in its group.
        """
        # id: failures without a fingerprint aren't known to be alike, so each gets a separate key
        return (self.failure.fingerprint or f"#{id(self.failure)}", self.state)

    @property
    def brief(self) -> str:
        """How much later, for a drawing: "+42 ms", "+0.2 s to +1.2 s";
        "about +42 ms" if clocks weren't compared.
        """
        if self.at_ns is None:
            return ""
        if self.bounds is None:
            return f"about {format_signed(self.at_ns)}"
        # bounds narrower than a tenth of the time are as good as one number
        if (self.bounds.high - self.bounds.low) * TENTH <= abs(
            self.at_ns
        ) or self.bounds.low == self.bounds.high:
            return format_signed(self.at_ns)
        return f"{format_signed(self.bounds.low)} to {format_signed(self.bounds.high)}"

    @property
    def later(self) -> str:
        """How much later, in words; empty if unknown, and for the origin."""
        if self.at_ns is None or self.is_origin:
            return ""
        guess = f"{format_shift(self.at_ns)} by the clock of its node"
        text = later_text(self.bounds) if self.bounds is not None else guess
        return text if self.from_root else f"{text}, counted from the first failure"

    @property
    def is_ordered(self) -> bool:
        """Whether it is known to be before or after the origin."""
        return (
            self.bounds is None or self.is_origin or self.bounds.low >= 0 or self.bounds.high <= 0
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Failures of one fault and one state."""

    state: State
    what: str
    """The failure in one or two words."""
    line: str
    """What happened to the first of them, in a line."""
    ranks: tuple[int, ...]
    """Ascending; including ranks with unopened documents."""
    nodes: tuple[str, ...]
    count: int
    """Processes, agents and files; more than `ranks` if some have no rank."""
    opened: int = 0
    """How many of them have a document that was read."""
    first: Event | None = None
    """The earliest; None if none was opened."""
    number: int = 0
    """Counted from 1."""

    @property
    def said(self) -> str:
        """What happened to the first of them, or the failure's name if nothing more is known."""
        return self.line or self.what

    @property
    def label(self) -> str:
        """Its state; of a job that was ended from outside, how: nothing failed,
        so nothing is its root cause.
        """
        code = "" if self.first is None or self.ranks or self.nodes else self.first.failure.code
        return JOB_END_WORDS.get(code, self.state.value)

    def who(self, limit: int = 0) -> str:
        """Return its ranks, else its node, else how many processes it has; `limit`:
        as `format_ranks`.
        """
        if self.ranks:
            return f"rank{'s' if len(self.ranks) > 1 else ''} {format_ranks(self.ranks, limit)}"
        if len(self.nodes) == 1 or self.label != self.state.value:
            return self.nodes[0] if self.nodes else "the whole job"
        return "1 process" if self.count == 1 else f"{self.count} processes"


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
    """ROOT or SUSPECT if the node itself is one, UNREPORTED, or FINISHED; None:
    it reported a failure.
    """
    group_rank: int | None = None
    ranks: tuple[int, ...] = ()
    note: str = ""
    """The failure that it reports, or what is missing."""

    @property
    def line(self) -> str:
        """Its name, group rank, state and note: "w-1 (group rank 1): root cause"."""
        number = f" (group rank {self.group_rank})" if self.group_rank is not None else ""
        text = ", ".join(
            filter(None, [self.state.value if self.state is not None else "", self.note])
        )
        return f"{self.name}{number}" + (f": {text}" if text else "")


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
    """Whether times are counted from the root cause; if its time isn't known,
    from the first failure.
    """

    def count(self, state: State) -> int:
        """Return how many ranks are in a state."""
        return sum(item.state is state for item in self.ranks)

    def ranks_by_node(self) -> dict[str, str]:
        """Return the states of each node's ranks: "root cause 3, victim 2"."""
        found: dict[str, dict[State, list[int]]] = defaultdict(lambda: defaultdict(list))
        for item in self.ranks:
            found[item.node or "unknown node"][item.state].append(item.rank)
        return {
            node: ", ".join(
                f"{state.value} {format_ranks(ranks)}" for state, ranks in states.items()
            )
            for node, states in found.items()
        }


def build_cascade(job: JobErrors, verdict: Verdict, diagnosis: Diagnosis) -> Cascade:
    """Return what happened to every rank and node of an attempt;
    the diagnosis is in the order of its failures.
    """
    origin = _find_origin(job, verdict)
    from_root = origin is not None and origin is verdict.root
    events = []
    for failure, judged in zip(job.failures, diagnosis.classified, strict=True):
        at_ns, bounds = _get_event_time(failure, origin, diagnosis.clocks)
        state = _find_state(failure, judged, verdict)
        events.append(Event(failure, state, at_ns, bounds, failure is origin, from_root))
    events.sort(key=_build_sort_key)
    groups = _group_events(job, verdict, events)
    ranks = _list_ranks(job, verdict, events, groups)
    grouped = {rank for group in groups for rank in group.ranks}
    # ranks without a document, such as a silent suspect, are in none of the groups yet
    missing: dict[State, list[int]] = defaultdict(list)
    for item in ranks:
        if item.rank not in grouped:
            missing[item.state].append(item.rank)
    is_root_shown = any(group.state is State.ROOT for group in groups)
    groups += _groups_without_documents(missing, job, verdict, is_root_shown=is_root_shown)
    groups.sort(
        key=lambda group: (group.state is not State.ROOT, -group.count, group.ranks[:1], group.what)
    )
    # number after sorting: drawings and `RankState.group` refer to the numbers that are printed
    groups = [replace(group, number=number) for number, group in enumerate(groups, 1)]
    of_rank = {rank: group.number for group in groups for rank in group.ranks}
    of_event = {group.first.key: group.number for group in groups if group.first is not None}
    # if two nodes have documents of one rank, the rank is in two groups
    of_rank |= {
        event.failure.rank: of_event[event.key]
        for event in reversed(events)
        if event.failure.rank is not None
    }
    numbered = tuple(replace(item, group=of_rank.get(item.rank)) for item in ranks)
    return Cascade(tuple(events), tuple(groups), numbered, _list_nodes(job, verdict), from_root)


# --- times ----------------------------------------------------------------------------------------


def _find_origin(job: JobErrors, verdict: Verdict) -> WorkerError | None:
    """Return the failure from which times are counted: the root cause, if its time is known.

    For a rank that hung only the time of its stop is known, so times are counted from the first
    failure instead; the end of a deadline is a time.
    """
    root = verdict.root
    is_timed = root is not None and root.timestamp_ns is not None
    began = verdict.category != "hang" or (root is not None and root.expired is not None)
    if root is not None and is_timed and not root.stopped_by_agent and began:
        return root
    timed = [
        failure
        for failure in job.failures
        if failure.timestamp_ns is not None and failure is not root
    ]
    return timed[0] if timed else root


def _get_event_time(
    failure: WorkerError, origin: WorkerError | None, clocks: Clocks
) -> tuple[int | None, Interval | None]:
    """Return how much later than the origin a failure was, in nanoseconds,
    and the bounds of that time.
    """
    if origin is None:
        return None, None
    apart = Interval(0, 0) if failure is origin else clocks.interval_between(origin, failure)
    if apart is not None:
        # an agent notices an exit late, but knows when it stopped a process
        early = 0 if failure.stopped_by_agent else clocks.noticed_after_ns(failure)
        late = (
            0 if failure is origin or origin.stopped_by_agent else clocks.noticed_after_ns(origin)
        )
        return (apart.low + apart.high) // 2, Interval(apart.low - early, apart.high + late)
    if failure.timestamp_ns is None or origin.timestamp_ns is None:
        return None, None
    # the clocks can't be compared: without bounds, the difference of the wall clocks is only a
    # guess
    return failure.timestamp_ns - origin.timestamp_ns, None


def _build_sort_key(event: Event) -> tuple[object, ...]:
    """Return the sort key of events: the root cause first, then by time."""
    failure = event.failure
    return (
        event.state is not State.ROOT,
        event.at_ns is None,
        event.at_ns or 0,
        failure.timestamp_ns or 0,
        # at the same time, agents and files without a rank follow the ranks
        failure.rank if failure.rank is not None else 1 << 62,
        failure.node,
        failure.message,
    )


# --- states ---------------------------------------------------------------------------------------


def _find_state(failure: WorkerError, judged: ClassifiedFailure, verdict: Verdict) -> State:
    """Return the state that the verdict gives a failure, else the one of its class."""
    failure_class = judged.failure_class
    is_sure = verdict.scope is not Scope.UNDETERMINED
    # first of all: a root cause that hung was stopped by its agent, too, and would be STOPPED below
    if is_sure and (failure is verdict.root or _is_root(failure, verdict)):
        return State.ROOT
    if any(_is_suspect(failure, suspect) for suspect in verdict.suspects):
        return State.SUSPECT
    if failure.has_unseen_end:
        is_finished = failure.sent_signals[0].reason == LAST_LINES_OF_SUCCESS
        return State.FINISHED if is_finished else State.UNREPORTED
    if failure.place.engine == OF_LOGS and failure.is_silent and not failure.sent_signals:
        return State.UNREPORTED  # it was suspected of its silence, and no line is about its end
    if failure.stopped_by_agent:
        return State.STOPPED if failure_class is FailureClass.CONSEQUENCE else State.UNCLEAR
    if judged.waited and verdict.category == "hang" and is_sure:
        return State.VICTIM  # of the rank that it waited for
    if failure_class is FailureClass.UNCLEAR and is_sure and verdict.confidence == "high":
        return State.VICTIM  # unclear alone, but the verdict is certain
    # a fault makes it a suspect if the strategy names suspects, since it lists only a few of them
    own = State.SUSPECT if verdict.suspects and is_sure else State.UNCLEAR
    return _STATES.get(failure_class, own)


def _is_root(failure: WorkerError, verdict: Verdict) -> bool:
    """Whether a failure is of one of the verdict's ranks, and has its fault,
    or is of the verdict's node's agent.

    Other ranks with the same fault aren't root causes: of several SIGKILLs the verdict may name
    only the first.
    """
    if verdict.scope in {Scope.RANK, Scope.RANKS}:
        if len(verdict.ranks) > 1 and failure.rank in verdict.ranks:
            return True  # ranks that are guilty together may wait in different groups
        is_alike = verdict.root is None or failure.fingerprint == verdict.fingerprint
        is_there = not verdict.node or failure.node == verdict.node
        return failure.rank in verdict.ranks and is_alike and is_there
    return failure.subject is Subject.AGENT and failure.node == verdict.node


def _is_suspect(failure: WorkerError, suspect: Suspect) -> bool:
    # a suspect without a rank is a node
    if suspect.rank is None:
        return failure.subject is Subject.AGENT and failure.node == suspect.node
    return failure.rank == suspect.rank and (not suspect.node or failure.node == suspect.node)


# --- groups ---------------------------------------------------------------------------------------


def _group_events(job: JobErrors, verdict: Verdict, events: Sequence[Event]) -> list[Group]:
    """Return the groups of the events, and of documents that weren't opened;
    neither sorted nor numbered.
    """
    found: dict[tuple[str, State], list[Event]] = defaultdict(list)
    states: dict[str, set[State]] = defaultdict(set)
    for event in events:
        found[event.key].append(event)
        states[event.key[0]].add(event.state)
    # a rank may have opened and unopened documents; it counts once
    opened = {failure.rank for failure in job.failures}
    ranks: dict[str, set[int]] = defaultdict(set)
    counts: dict[str, int] = defaultdict(int)  # documents without a rank
    for unopened in job.unopened:
        ranks[unopened.fingerprint] |= set(unopened.ranks) - opened
        counts[unopened.fingerprint] += unopened.count if not unopened.ranks else 0
    groups = []
    for (fault, _), of_one in found.items():
        alike: set[int] = set()
        # unopened ranks have the state of their fault, if all its opened ranks have one
        if len(states[fault]) == 1:
            alike = ranks.pop(fault, alike)
            _ = counts.pop(fault, 0)
        groups.append(_group(of_one, alike, verdict))
    # what is left: faults without an opened document, or with opened ranks in different states
    for fault, count in counts.items():
        of_fault = tuple(sorted(ranks[fault]))
        if of_fault or count:
            groups.append(
                Group(
                    State.UNCLEAR,
                    "not opened",
                    _NOT_OPENED,
                    of_fault,
                    (),
                    max(count, len(of_fault)),
                )
            )
    return groups


def _group(events: Sequence[Event], unopened: set[int], verdict: Verdict) -> Group:
    first = events[0]
    ranks = {event.failure.rank for event in events if event.failure.rank is not None} | unopened
    what = printable(find_message(first.failure).what)
    line = summarize_failure(first.failure)
    if first.state is State.ROOT and first.failure.stopped_by_agent:
        # the reason for stopping it isn't its fault
        what, line = headline_parts(verdict)
    # the reason that an agent recorded for its signal repeats the root cause
    elif first.failure.has_unseen_end:
        line = first.failure.sent_signals[0].reason
    elif first.state is State.STOPPED:
        line = _describe_stop(first.failure, len(events))
    nodes = tuple(sorted({event.failure.node for event in events if event.failure.node}))
    count = len(events) + len(unopened)
    return Group(
        first.state,
        what,
        line,
        tuple(sorted(ranks)),
        nodes,
        count,
        opened=len(events),
        first=first,
    )


def _describe_stop(failure: WorkerError, count: int) -> str:
    """Return by what processes were stopped: "SIGTERM from their agents"."""
    signal = failure.sent_signals[0].signal
    if failure.place.engine != OF_LOGS:
        return f"{signal} from {'its agent' if count == 1 else 'their agents'}"
    return f"{f'{signal} from' if signal else 'by'} {'its' if count == 1 else 'their'} launcher"


def _groups_without_documents(
    ranks: Mapping[State, list[int]],
    job: JobErrors,
    verdict: Verdict,
    *,
    is_root_shown: bool,
) -> Iterator[Group]:
    """Yield the groups of a root cause, of suspects and of silent ranks without a document;
    `ranks` are by state.
    """
    # a lost node leaves no document; without this group the root cause would be missing
    if verdict.scope in {Scope.NODE, Scope.EXTERNAL} and verdict.node and not is_root_shown:
        yield Group(State.ROOT, *headline_parts(verdict), (), (verdict.node,), 1)
    words = find_engine_words(job, verdict)
    named = set(job.named_ranks)
    for state in (State.ROOT, State.SUSPECT, State.UNREPORTED):
        for has_lines in (False, True):
            texts = (
                headline_parts(verdict)
                if state is State.ROOT
                else ("no report", words.describe_missing(has_lines=has_lines))
            )
            if missing := [rank for rank in ranks.get(state, ()) if (rank in named) is has_lines]:
                yield Group(state, *texts, tuple(missing), (), len(missing))


# --- ranks and nodes ------------------------------------------------------------------------------


def _list_ranks(
    job: JobErrors,
    verdict: Verdict,
    events: Sequence[Event],
    groups: Sequence[Group],
) -> tuple[RankState, ...]:
    """Return every rank that a document, the roster, the verdict or a group names,
    or that the world size implies.
    """
    # the roster has no local ranks; an agent numbers its workers locally in the order of their
    # ranks
    places = {  # node and local rank
        rank: (entry.place.node, index)
        for entry in job.roster
        for index, rank in enumerate(sorted(entry.ranks))
    }
    # later sources replace earlier ones: the documents themselves come after the verdict and the
    # groups
    known: dict[int, RankState] = {}
    for rank, state, line, node in _named_ranks(verdict, groups):
        where, local = places.get(rank, (node or (known[rank].node if rank in known else ""), None))
        known[rank] = RankState(rank, state, where, local, line=line)
    for event in reversed(events):  # if two nodes claim one rank, the first event is kept
        failure, claimed = event.failure, event.failure.rank
        if claimed is not None:
            local = failure.place.local_rank
            local = local if local is not None else places.get(claimed, ("", None))[1]
            line = summarize_failure(failure)
            known[claimed] = RankState(
                claimed,
                event.state,
                failure.node,
                local,
                later=event.later,
                line=line,
            )
    finished = {
        rank for entry in job.roster if entry.phase is Phase.SUCCEEDED for rank in entry.ranks
    }
    words = find_engine_words(job, verdict)
    named = set(job.named_ranks)
    highest = max(
        (failure.rank for failure in job.failures if failure.rank is not None), default=-1
    )
    for rank in {
        *places,
        *range(max(world_size(job), highest + 1 if job.size is not None else 0)),
    } - set(known):
        missing = (State.UNREPORTED, words.describe_missing(has_lines=rank in named))
        state, line = (State.FINISHED, "") if rank in finished else missing
        where, local = places.get(rank, ("", None))
        known[rank] = RankState(rank, state, where, local, line=line)
    return tuple(known[rank] for rank in sorted(known))


def _named_ranks(
    verdict: Verdict, groups: Sequence[Group]
) -> Iterator[tuple[int, State, str, str]]:
    """Yield the ranks that the verdict or a group names: state, line,
    node. Without documents these are all.
    """
    is_sure = verdict.scope is not Scope.UNDETERMINED
    for rank, line in verdict.victims.by_rank:
        yield rank, State.VICTIM if is_sure else State.UNCLEAR, line, ""
    for rank in verdict.ranks if is_sure else ():
        yield rank, State.ROOT, verdict.headline, verdict.node or ""
    for item in verdict.suspects:
        if item.rank is not None:
            yield item.rank, State.SUSPECT, item.why, item.node or ""
    for group in groups:
        yield from ((rank, group.state, group.line, "") for rank in group.ranks)


def world_size(job: JobErrors) -> int:
    """Return the world size that the documents state; 0 if they don't, or if it isn't plausible."""
    # the size comes from a document, and `_list_ranks` makes an entry for each rank: without a
    # limit a damaged size would exhaust the memory
    stated = max((failure.place.world_size for failure in job.failures), default=0)
    return stated if stated <= _LARGEST_WORLD else 0


def _list_nodes(job: JobErrors, verdict: Verdict) -> tuple[NodeState, ...]:
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
            # a failure may lack the group rank that the roster has; its node would be listed twice
            key = (
                key
                if key in entries
                else (failure.node, known.get(failure.node, failure.place.group_rank))
            )
            ranks[key] |= set() if failure.rank is None else {failure.rank}
    if verdict.node and not any(name == verdict.node for name, _ in ranks):
        ranks[verdict.node, None] = set()
    suspects = {suspect.node for suspect in verdict.suspects if suspect.rank is None}
    root = verdict.node if verdict.scope in {Scope.NODE, Scope.EXTERNAL} else None
    found = []
    for (name, group_rank), own in ranks.items():
        said = entries.get((name, group_rank), [])
        # JOINED doesn't show how the node ended: a node finished if all its other entries succeeded
        phases = {entry.phase for entry in said} - {Phase.JOINED}
        state = State.FINISHED if phases == {Phase.SUCCEEDED} else None
        note = next(
            (entry.first_failure_reason for entry in said if entry.first_failure_reason), ""
        )
        # order matters: a state from the verdict replaces a state from the roster
        if (name or f"group rank {group_rank}") in unreported:
            is_documented = any(failure.node == name for failure in job.failures)
            state = State.UNREPORTED
            note = "no final report" if is_documented else "started, then sent nothing"
        if name and name in suspects:
            state = State.SUSPECT
        if name and name == root:
            state = State.ROOT
        found.append(NodeState(name, state, group_rank, tuple(sorted(own)), note))
    return tuple(
        sorted(found, key=lambda node: (node.group_rank is None, node.group_rank or 0, node.name))
    )


# --- in a line ------------------------------------------------------------------------------------


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
    after = [event for event in cascade.events if event.state in {State.VICTIM, State.STOPPED}]
    agents = sum(event.failure.subject is Subject.AGENT for event in after)
    waited = verdict.category == "hang" and (verdict.root is None or verdict.root.expired is None)
    what = "timed out waiting" if waited else "lost a peer"
    parts = [f"{victims} {what}"] if victims else []
    is_log = any(event.failure.place.engine == OF_LOGS for event in after)
    stopper = "launcher" if is_log else "agent" if stopped == 1 else "agents"
    parts += (
        [f"{stopped} stopped by {'its' if stopped == 1 else 'their'} {stopper}"] if stopped else []
    )
    parts += [f"{counted(agents, 'agent')} failed"] if agents else []
    timed = [event for event in after if event.at_ns is not None]
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
        if first.later:
            yield f"the first {first.later}"
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
        yield f"{format_range(low, high)} after the cause" if high > 0 else "at the same time"
    elif high > 0:
        # the time of the root cause is unknown: times are counted from the first victim
        yield f"within {duration(high)}"
    if others and all(clocks.before(first.failure, other.failure) for other in others):
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
    if unknown:  # the unknown clock may be the one that all are compared with
        unknown = {node for node in timed_nodes if not clocks.offset(node).is_known} or unknown
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
