"""The failures, the roster, the coverage and the seals of one attempt."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firstfault.model.failure import CausedBy, Kind, Origin, Place, WorkerError
    from firstfault.model.restart import RestartRecord


class Phase(str, enum.Enum):
    """The state of a node in its roster entry."""

    JOINED = "joined"
    FAILED = "failed"
    SUCCEEDED = "succeeded"


@dataclass(frozen=True, slots=True)
class Receipt:
    """The outcome of one document's upload."""

    name: str
    durable: bool
    fault_to_durable_ns: int | None = None
    error: str = ""
    rank: int | None = None
    withdrawn: bool = False
    """The user's code handled the exception after all: readers ignore the document."""


@dataclass(frozen=True, slots=True)
class LogTail:
    """The end of a worker's stderr, as its agent read it."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """What a node ran, and on what. Empty fields are not known."""

    task: str = ""
    """The task's full name."""
    image: str = ""
    """The container image."""
    gpu_model: str = ""
    gpus: int = 0
    """GPUs that the node sees."""
    source_url: str = ""
    """Where the source code can be read: "https://github.com/org/repo/blob/<commit>"."""
    source_root: str = ""
    """The folder that this address stands for."""


@dataclass(frozen=True, slots=True)
class NodePresence:
    """A roster entry: one node in one round."""

    phase: Phase
    place: Place
    ranks: tuple[int, ...] = ()
    receipts: tuple[Receipt, ...] = ()
    timestamp_ns: int | None = None
    first_failure: CausedBy | None = None
    """In an entry of phase failed: the failure that ended the round, as far as the agent knows."""
    first_failure_reason: str = ""
    """The same as text: "rank 3 on worker-1 failed: ValueError"."""
    log_tails: tuple[LogTail, ...] = ()
    """In an entry of phase failed: of the workers that failed by themselves, without their own tracebacks."""
    setup: NodeSetup = NodeSetup()
    """In an entry of phase failed."""
    newer: bool = False
    """See `WorkerError.newer`."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many nodes were expected, how many reported, and whether everything was read."""

    expected: int | None
    """Nodes that took part in the round; None: not known."""
    reported: int
    """Nodes with at least one document that was read, or with a final roster entry."""
    unreadable: int = 0
    """Documents that exist but could not be read."""
    complete: bool = False
    """Every expected node has a final roster entry, and every document was read.

    Also, if there is a roster, it has an entry of the round and the incarnation that each document names.
    In a large cascade every document was listed, and several of each fault were read.
    """
    notes: tuple[str, ...] = ()
    """Sentences about what was not read or not understood."""


@dataclass(frozen=True, slots=True)
class Seal:
    """The verdict that a pod wrote as its error.pb."""

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
    newer: bool = False
    """See `WorkerError.newer`."""

    @property
    def order(self) -> tuple[int, str]:
        """Sorts the seals of an attempt: the one that rests on the most documents is first."""
        return (-self.count, self.name)


@dataclass(frozen=True, slots=True)
class Unopened:
    """Documents of the judged round with the same fault in their names, listed but not opened."""

    fingerprint: str
    """That of the opened documents of the fault; ``?:`` and 12 hex digits if none was opened."""
    count: int
    """Documents."""
    ranks: tuple[int, ...] = ()
    """Their ranks, ascending; agents and files without a rank are left out."""
    group_ranks: tuple[int, ...] = ()
    """The group ranks of their nodes, ascending."""
    names_hash: int = 0
    """Sum of `firstfault.reading.assemble.name_hash` over their names."""


@dataclass(frozen=True, slots=True)
class JobErrors:
    """Everything that was read about one attempt."""

    failures: tuple[WorkerError, ...] = ()
    """Failures of the judged round, one per process, by time; those without a time come last.

    In a large cascade only those with an opened document; the others are in `unopened`.
    """
    history: tuple[WorkerError, ...] = ()
    """Failures of earlier rounds and incarnations, which are never judged."""
    roster: tuple[NodePresence, ...] = ()
    """Entries of the judged round."""
    seals: tuple[Seal, ...] = ()
    coverage: Coverage = field(default_factory=lambda: Coverage(None, 0))
    round: int = 0
    attempt: int = 0
    settled: bool = True
    """False: the reader stopped waiting before every node had reported."""
    digest: str = ""
    """Digest over the names of the round's documents, opened or not, in any order."""
    document_count: int = 0
    """Documents of the round, opened or not."""
    unopened: tuple[Unopened, ...] = ()
    """Documents of a large cascade that were not opened, grouped by fault, the largest group first."""
    restarts: tuple[RestartRecord, ...] = ()
    """What was decided after each failed round of the attempt, oldest first."""

    @property
    def places(self) -> list[Place]:
        """Where the failures and the nodes were."""
        return [failure.place for failure in self.failures] + [entry.place for entry in self.roster]

    def unopened_like(self, fingerprint: str) -> tuple[int, ...]:
        """Return the ranks with this fault and no opened document, ascending."""
        opened = {failure.rank for failure in self.failures}
        return tuple(
            sorted(
                {rank for group in self.unopened if group.fingerprint == fingerprint for rank in group.ranks} - opened
            )
        )

    def unopened_elsewhere(self, *fingerprints: str) -> int:
        """Return the number of processes with an unopened document of another fault."""
        opened = {failure.rank for failure in self.failures}
        others = [group for group in self.unopened if group.fingerprint not in fingerprints]
        ranks = {rank for group in others for rank in group.ranks} - opened
        return len(ranks) + sum(group.count for group in others if not group.ranks)


class Reads(enum.Enum):
    """How much of a large cascade a strategy has to read. A small one is read whole for each of them."""

    ALL = "every document"
    GROUPS = "some documents of each fault, and those of whom it names"
    FIRST = "the earliest document of the last round"
