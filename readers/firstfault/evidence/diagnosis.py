"""The diagnosis of an attempt: classes of all failures, clocks, and blamed ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from firstfault import model
from firstfault.evidence.classification import (
    ClassifiedFailure,
    FailureClass,
    classify_failures,
)
from firstfault.evidence.clocks import Clocks
from firstfault.evidence.texts import Pointer, has_reached_end

NODE_END_CLASSES = {FailureClass.NODE_LOST, FailureClass.EXTERNAL}
MAX_CULPRITS = 3
"""If more ranks than this qualify, they hardly have one fault, and none is blamed."""


@dataclass(frozen=True, slots=True)
class BlameCounts:
    """Number of failures that blame each rank and node."""

    ranks: Counter[int] = field(default_factory=Counter)
    nodes: Counter[str] = field(default_factory=Counter)
    broadcast: Counter[model.CausedBy] = field(default_factory=Counter)
    """Number of agents and workers stopped because of each broadcast failure,
    without its document's name.
    """
    broadcast_of: Counter[int | str] = field(default_factory=Counter)
    """The same by the failure's rank, or by its node if it has no rank."""

    def of(self, judged: ClassifiedFailure) -> int:
        """Return the number of failures that blame this failure's process or node."""
        rank, node = judged.failure.rank, judged.failure.node
        return (self.ranks[rank] if rank is not None else 0) + self.nodes[node]

    def times_broadcast(self, judged: ClassifiedFailure) -> int:
        """Return the number of processes stopped because of it;
        agents broadcast the first failure that they notice.
        """
        rank, node = judged.failure.rank, judged.failure.node
        return (self.broadcast_of[rank] if rank is not None else 0) + self.broadcast_of[node]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rank or node that is probably the root cause although it reported no fault."""

    why: str
    rank: int | None = None
    node: str = ""
    failure: model.WorkerError | None = None
    """The agent's document about stopping it, or None if there is none."""
    category: str = "hang"
    """`headline` in model/categories.toml has the headline's words; "no report" without an entry.
    """
    weight: int = 1
    """Number of independent reasons."""
    is_shared: bool = False
    """Whether all these candidates together are the root cause, each in its own group of ranks."""
    is_reported: bool = False
    """Whether a report of the ranks that waited lists it as missing,
    like all others of that report.
    """
    is_sure: bool = True
    """Whether the progress of all possible culprits is known."""


@dataclass(frozen=True, slots=True)
class FirstFault:
    """The fault that came first, or that may have."""

    first: ClassifiedFailure
    failed_alike: tuple[ClassifiedFailure, ...]
    """All failures with this fault, including `first`."""
    others: tuple[ClassifiedFailure, ...]
    """Failures with different faults."""
    rivals: tuple[ClassifiedFailure, ...]
    """Different faults that may have been first: their order is unknown."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All knowledge about an attempt's failures, from which a strategy picks the root cause.

    diagnose        classifies each failure, bounds the clocks, counts blame
    find_faults     reclassifies ranks that failed because of a peer, or gave up waiting for one, as
                    victims; then it orders the possible faults (`faults`, `first`), or moves all of
                    them to `late`
                    after a timeout
    rules           each rule of the strategy reads the result; nothing changes any more
    """

    job: model.JobErrors
    classified: tuple[ClassifiedFailure, ...]
    """One for each of `JobErrors.failures`, in the same order."""
    clocks: Clocks
    """Bounds for the difference between any two failures' times."""
    blame_counts: BlameCounts
    """How often each rank and node is blamed."""
    faults: tuple[ClassifiedFailure, ...] = ()
    """The faults that may be the root cause; set by `find_faults`."""
    first: FirstFault | None = None
    """The first of `faults`."""
    late: tuple[ClassifiedFailure, ...] = ()
    """Faults that can't be the root cause because a rank had timed out before;
    set by `find_faults`.
    """

    @property
    def workers(self) -> list[ClassifiedFailure]:
        """The failures of workers."""
        return [
            judged for judged in self.classified if judged.failure.subject is model.Subject.WORKER
        ]

    @property
    def waits(self) -> list[ClassifiedFailure]:
        """The failures of ranks that timed out waiting."""
        return [judged for judged in self.classified if judged.waited]

    @property
    def unclear(self) -> list[ClassifiedFailure]:
        """Failures that may be cause or consequence,
        except on nodes with an agent that lost its peers.
        """
        lost_peers = {
            item.failure.node
            for item in self.classified
            if item.failure.subject is model.Subject.AGENT
        }
        return [
            item
            for item in self.classified
            if item.failure_class is FailureClass.UNCLEAR and item.failure.node not in lost_peers
        ]

    @property
    def exits(self) -> list[ClassifiedFailure]:
        """Failures of `unclear` that neither waited nor were stopped because of a timeout."""
        has_waits = bool(self.waits)
        return [
            item
            for item in self.unclear
            if not item.waited and not (has_waits and item.failure.stopped_by_agent)
        ]


def diagnose(job: model.JobErrors) -> Diagnosis:
    """Classify the failures of the judged round. Pure: the same job gives the same diagnosis."""
    clocks = Clocks(job)
    classified = classify_failures(job)
    blame_counts = _count_blame(job, classified)
    return Diagnosis(job, _set_aside_finished_ranks(classified, clocks), clocks, blame_counts)


def _set_aside_finished_ranks(
    classified: tuple[ClassifiedFailure, ...], clocks: Clocks
) -> tuple[ClassifiedFailure, ...]:
    """Return the failures. A program's end is classified as finished if another rank's own failure
    came before it or no other rank can have waited for this one.

    Such an end leaves a document because its peers may still need the rank.
    """
    ends = [item for item in classified if has_reached_end(item.failure)]
    others = [item for item in classified if not has_reached_end(item.failure)]
    own = [item.failure for item in others if item.failure_class <= FailureClass.OWN_EXIT]
    finished = {
        id(item)
        for item in ends
        if any(clocks.is_before(failure, item.failure) for failure in own)
        or (own and not _is_needed(item.failure, [other.failure for other in others]))
    }
    why = "had run to its end"
    return tuple(
        replace(item, failure_class=FailureClass.FINISHED, why=why)
        if id(item) in finished
        else item
        for item in classified
    )


def _is_needed(finished: model.WorkerError, others: Iterable[model.WorkerError]) -> bool:
    """Whether another rank may have waited for a finished one: it had called a collective that
    this one hadn't, or its collectives aren't known.
    """
    called = {item.group: item.enqueued for item in finished.collectives}
    return not called or any(
        not other.collectives
        or any(item.enqueued > called.get(item.group, 0) for item in other.collectives)
        for other in others
    )


def describe_blame(count: int) -> str:
    """Return "1 failure names it", "3 failures name it"."""
    return "1 failure names it" if count == 1 else f"{count} failures name it"


def _count_blame(job: model.JobErrors, classified: Iterable[ClassifiedFailure]) -> BlameCounts:
    """Count how often each rank and node is blamed; a failure that names itself doesn't count."""
    # an address shared by several nodes identifies none
    nodes_at: dict[str, set[str]] = defaultdict(set)
    for place in job.places:
        for name in (place.ip, place.host, place.host.partition(".")[0], place.node):
            if name and place.node:
                nodes_at[name].add(place.node)
    blame_counts = BlameCounts()
    broadcasts = [entry.first_failure for entry in job.roster] + [
        judged.failure.caused_by for judged in classified
    ]
    causes = [replace(cause, document="") for cause in broadcasts if cause is not None]
    blame_counts.broadcast.update(causes)
    blame_counts.broadcast_of.update(
        cause.node if cause.rank is None else cause.rank for cause in causes
    )
    for judged in classified:
        if judged.pointer is None:
            continue
        rank = judged.pointer.rank
        node = _find_named_node(judged.pointer, nodes_at)
        if rank is not None and rank != judged.failure.rank:
            blame_counts.ranks[rank] += 1
        if node and node != judged.failure.node:
            blame_counts.nodes[node] += 1
    return blame_counts


def _find_named_node(pointer: Pointer, nodes_at: dict[str, set[str]]) -> str:
    # a dual-stack socket writes an IPv4 address as "::ffff:10.0.0.1"
    for name in (pointer.ip.removeprefix("::ffff:"), pointer.host, pointer.host.partition(".")[0]):
        if len(nodes := nodes_at.get(name, set())) == 1:
            return next(iter(nodes))
    return ""
