"""What the failures of one attempt tell, judged once: their classes, the clocks, and whom they name."""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from firstfault.evidence.classification import ClassifiedFailure, FailureClass, classify_failures
from firstfault.evidence.clocks import Clocks
from firstfault.model import Subject

if TYPE_CHECKING:
    from collections.abc import Iterable

    from firstfault.evidence.texts import Pointer
    from firstfault.model import CausedBy, JobErrors, WorkerError

ENDS_OF_NODES = {FailureClass.LOST, FailureClass.EXTERNAL}


@dataclass(frozen=True, slots=True)
class Accusations:
    """How many others name each rank and node."""

    ranks: Counter[int] = field(default_factory=Counter)
    nodes: Counter[str] = field(default_factory=Counter)
    broadcast: Counter[CausedBy] = field(default_factory=Counter)
    """How many agents and workers were stopped for each failure that the agents broadcast, without its document."""

    def of(self, judged: ClassifiedFailure) -> int:
        """Return how many others name this failure's process or its node."""
        rank, node = judged.failure.rank, judged.failure.node
        return (self.ranks[rank] if rank is not None else 0) + self.nodes[node]

    def times_broadcast(self, judged: ClassifiedFailure) -> int:
        """Return how many were stopped because of it. The agents noticed it first, but it need not have been first."""
        rank, node = judged.failure.rank, judged.failure.node
        return sum(
            count
            for cause, count in self.broadcast.items()
            if (cause.rank == rank if cause.rank is not None else cause.node == node)
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rank or node that reported no fault of its own, and why it is likely to be the root cause."""

    why: str
    rank: int | None = None
    node: str = ""
    failure: WorkerError | None = None
    """Its agent's document about stopping it; None: there is none."""
    category: str = "hang"
    weight: int = 1
    """Number of independent reasons."""


@dataclass(frozen=True, slots=True)
class FirstFault:
    """The fault that was the first, or may have been."""

    first: ClassifiedFailure
    same: tuple[ClassifiedFailure, ...]
    """All failures with its fault, `first` included."""
    others: tuple[ClassifiedFailure, ...]
    """Other faults."""
    rivals: tuple[ClassifiedFailure, ...]
    """Other faults that may have been the first."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that is known about the failures of an attempt before a strategy picks the root cause."""

    job: JobErrors
    classified: tuple[ClassifiedFailure, ...]
    """One for each of `JobErrors.failures`, in the same order."""
    clocks: Clocks
    """Bounds for the difference between any two failures' times."""
    accusations: Accusations
    """How often each rank and node is named by others."""
    faults: tuple[ClassifiedFailure, ...] = ()
    """The faults that may be the root cause; set by `with_faults`."""
    first: FirstFault | None = None
    """The first of `faults`."""
    late: tuple[ClassifiedFailure, ...] = ()
    """Faults that cannot be the root cause: a rank had timed out before any of them; set by `with_faults`."""

    @property
    def workers(self) -> list[ClassifiedFailure]:
        """The failures of workers."""
        return [judged for judged in self.classified if judged.failure.subject is Subject.WORKER]

    @property
    def waits(self) -> list[ClassifiedFailure]:
        """The failures of ranks that timed out waiting."""
        return [judged for judged in self.classified if judged.waited]

    @property
    def unclear(self) -> list[ClassifiedFailure]:
        """The failures that may be cause or consequence, except on nodes whose agent lost its peers."""
        lost_peers = {item.failure.node for item in self.classified if item.failure.subject is Subject.AGENT}
        found = (item for item in self.classified if item.failure_class is FailureClass.UNCLEAR)
        return [item for item in found if item.failure.node not in lost_peers]

    @property
    def exits(self) -> list[ClassifiedFailure]:
        """Those of `unclear` that did not wait, and were not stopped because others had timed out."""
        has_waits = bool(self.waits)
        return [item for item in self.unclear if not item.waited and not (has_waits and item.failure.stopped_by_agent)]


def diagnose(job: JobErrors) -> Diagnosis:
    """Classify the failures of the judged round. Pure: the same job gives the same diagnosis."""
    classified = classify_failures(job)
    return Diagnosis(job, classified, Clocks(job), _accusations(job, classified))


def names_it(count: int) -> str:
    """Return "1 failure names it", "3 failures name it"."""
    return "1 failure names it" if count == 1 else f"{count} failures name it"


def _accusations(job: JobErrors, classified: Iterable[ClassifiedFailure]) -> Accusations:
    """Return how often each rank and node is named; a failure that names itself does not count."""
    nodes_at: dict[str, set[str]] = defaultdict(set)  # an address that several nodes share names none
    for place in job.places:
        for name in (place.ip, place.host, place.host.partition(".")[0], place.node):
            if name and place.node:
                nodes_at[name].add(place.node)
    accusations = Accusations()
    told = [entry.first_failure for entry in job.roster] + [judged.failure.caused_by for judged in classified]
    accusations.broadcast.update(replace(cause, document="") for cause in told if cause is not None)
    for judged in classified:
        if judged.pointer is None:
            continue
        rank, node = judged.pointer.rank, _named_node(judged.pointer, nodes_at)
        if rank is not None and rank != judged.failure.rank:
            accusations.ranks[rank] += 1
        if node and node != judged.failure.node:
            accusations.nodes[node] += 1
    return accusations


def _named_node(pointer: Pointer, nodes_at: dict[str, set[str]]) -> str:
    for name in (_plain(pointer.ip), pointer.host, pointer.host.partition(".")[0]):
        if name and len(nodes := nodes_at.get(name, set())) == 1:
            return next(iter(nodes))
    return ""


def _plain(ip: str) -> str:
    """Strip the IPv4-mapped IPv6 prefix that a dual-stack socket adds."""
    bare = ip.removeprefix("::ffff:")
    try:
        socket.inet_aton(bare)
    except OSError:
        return ip
    return bare
