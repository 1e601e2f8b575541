"""What was read about one attempt: failures, roster, coverage, seals."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firstfault.model.failure import CausedBy, Kind, Origin, Place, WorkerError

__all__ = ["Coverage", "JobErrors", "NodePresence", "Phase", "Reads", "Receipt", "Seal", "Unopened"]


class Phase(str, enum.Enum):
    """What a node's roster entry says."""

    JOINED = "joined"
    FAILED = "failed"
    SUCCEEDED = "succeeded"


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of one document of a node, as its agent knows."""

    name: str
    durable: bool
    fault_to_durable_ns: int | None = None
    error: str = ""
    rank: int | None = None
    withdrawn: bool = False
    """The exception it names was handled by the user's code after all: the document says nothing."""


@dataclass(frozen=True, slots=True)
class NodePresence:
    """A roster entry: one node's part in one round."""

    phase: Phase
    place: Place
    ranks: tuple[int, ...] = ()
    receipts: tuple[Receipt, ...] = ()
    timestamp_ns: int | None = None
    first_failure: CausedBy | None = None
    """Of a node that failed: whose failure ended the round, as far as its agent was told or had seen itself."""
    first_failure_reason: str = ""
    """The same in a line: "rank 3 on worker-1 failed: ValueError"."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Who was expected to report, who did, and whether everything was looked at. Counted in nodes."""

    expected: int | None
    """Nodes that took part in the round; None: nobody said."""
    reported: int
    """Nodes of which at least one document was read, or that said they are done."""
    unreadable: int = 0
    """Documents that exist but could not be read."""
    complete: bool = False
    """Every expected node has said that it is done, and every document was read.

    Of a large cascade: all were listed, and of each fault several were read.
    """
    notes: tuple[str, ...] = ()
    """Sentences about what was not looked at, or not understood."""


@dataclass(frozen=True, slots=True)
class Seal:
    """A verdict that a pod left as its error.pb."""

    name: str
    digest: str
    count: int
    """Number of documents it rests on."""
    strategy: str
    json: str
    timestamp_ns: int
    node: str
    code: str
    message: str
    kind: Kind
    origin: Origin
    fault_timestamp_ns: int | None
    worker: str


@dataclass(frozen=True, slots=True)
class Unopened:
    """Documents of the round that is judged which were listed and not opened: by their names they are alike."""

    fingerprint: str
    """As the failures have it that were opened; ``?:`` and 12 hex digits if none of them was."""
    count: int
    """Documents."""
    ranks: tuple[int, ...] = ()
    """Whose they are, ascending; agents and files without a rank are not in it."""
    group_ranks: tuple[int, ...] = ()
    """Of the nodes, ascending."""
    names_hash: int = 0
    """Sum over what `firstfault.reading.assemble.name_hash` says of the names."""


@dataclass(frozen=True, slots=True)
class JobErrors:
    """Everything that was read about one attempt."""

    failures: tuple[WorkerError, ...] = ()
    """Of the round that is judged, one per process, in time order; those without a time come last.

    In a large cascade, those of which a document was opened: the others are in `unopened`.
    """
    history: tuple[WorkerError, ...] = ()
    """Failures of earlier rounds and incarnations: recovered from, never judged."""
    roster: tuple[NodePresence, ...] = ()
    """Entries of the round that is judged."""
    seals: tuple[Seal, ...] = ()
    coverage: Coverage = field(default_factory=lambda: Coverage(None, 0))
    round: int = 0
    attempt: int = 0
    settled: bool = True
    """False: the reader gave up waiting for nodes that had not reported."""
    digest: str = ""
    """Over the names of the documents of the round, in any order, those that were not opened too."""
    document_count: int = 0
    """Those of the round, opened or not."""
    unopened: tuple[Unopened, ...] = ()
    """What was not opened of a large cascade, by what the names say, the most first."""

    def unopened_like(self, fingerprint: str) -> tuple[int, ...]:
        """Return the ranks with this fault of which no document was opened, ascending."""
        opened = {failure.rank for failure in self.failures}
        return tuple(
            sorted(
                {rank for group in self.unopened if group.fingerprint == fingerprint for rank in group.ranks} - opened
            )
        )

    def unopened_elsewhere(self, *fingerprints: str) -> int:
        """Return how many processes have a document that was not opened, with none of these faults."""
        opened = {failure.rank for failure in self.failures}
        others = [group for group in self.unopened if group.fingerprint not in fingerprints]
        ranks = {rank for group in others for rank in group.ranks} - opened
        return len(ranks) + sum(group.count for group in others if not group.ranks)


class Reads(enum.Enum):
    """How much of a large cascade a strategy has to read. A small one is read whole for each of them."""

    ALL = "every document"
    GROUPS = "some documents of each fault, and those of whom it names"
    FIRST = "the earliest document of the last round"
