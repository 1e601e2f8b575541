"""A cascade as data: events, groups, and the states of ranks and nodes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from firstfault.evidence.clocks import Interval
from firstfault.model import WorkerError
from firstfault.model.failure import JOB_END_WORDS
from firstfault.report.formatting import (
    BOUNDS_PRECISION_FACTOR,
    format_ranks,
    format_shift,
    format_signed,
    later_text,
)
from firstfault.report.states import State


@dataclass(frozen=True, slots=True)
class Event:
    """One failure of the judged round, and when it happened after the root cause."""

    failure: WorkerError
    state: State
    at_ns: int | None
    """Best estimate of its time, nanoseconds after the origin, or negative if it is before the
    origin; None if unknown.
    """
    bounds: Interval | None
    """Bounds of that time, or None if the clocks could not be compared."""
    is_origin: bool = False
    """Times are counted from it."""
    from_root: bool = True
    """The same as `Cascade.from_root`."""

    @property
    def key(self) -> tuple[str, State]:
        """Its group: its fault and its state. A fault without a fingerprint
        is alone in its group.
        """
        # id: failures without a fingerprint aren't known to be alike, so each gets a separate key
        return (self.failure.fingerprint or f"#{id(self.failure)}", self.state)

    @property
    def short_delay(self) -> str:
        """How much later, for a drawing: "+42 ms", "+0.2 s to +1.2 s";
        "about +42 ms" if clocks weren't compared.
        """
        if self.at_ns is None:
            return ""
        if self.bounds is None:
            return f"about {format_signed(self.at_ns)}"
        # bounds narrower than a tenth of the time are as good as one number
        if (self.bounds.high - self.bounds.low) * BOUNDS_PRECISION_FACTOR <= abs(
            self.at_ns
        ) or self.bounds.low == self.bounds.high:
            return format_signed(self.at_ns)
        return f"{format_signed(self.bounds.low)} to {format_signed(self.bounds.high)}"

    @property
    def delay(self) -> str:
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
    def description(self) -> str:
        """What happened to the first of them, or the failure's name if nothing more is known."""
        return self.line or self.what

    @property
    def label(self) -> str:
        """The state, or in a job that was ended from outside how it ended, because such a job has
        no root cause.
        """
        code = "" if self.first is None or self.ranks or self.nodes else self.first.failure.code
        return JOB_END_WORDS.get(code, self.state.value)

    def who(self, limit: int = 0) -> str:
        """Return its ranks, its node or its number of processes. `limit` is for `format_ranks`."""
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
    """Number of its group, or None if it has no error."""
    delay: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class NodeState:
    """What happened to one node."""

    name: str
    state: State | None
    """ROOT or SUSPECT if the node itself is one, UNREPORTED, FINISHED, or None after a failure."""
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
        by_node: dict[str, dict[State, list[int]]] = defaultdict(lambda: defaultdict(list))
        for item in self.ranks:
            by_node[item.node or "unknown node"][item.state].append(item.rank)
        return {
            node: ", ".join(
                f"{state.value} {format_ranks(ranks)}" for state, ranks in states.items()
            )
            for node, states in by_node.items()
        }
