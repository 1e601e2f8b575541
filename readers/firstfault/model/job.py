"""One attempt: its failures, roster, coverage, seals and restarts; the verdict on it, and the decision."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from firstfault.model.failure import TIME_LIMIT, CausedBy, Kind, Origin, Place, Subject, WorkerError


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
    """What a node ran, and on what. Empty fields aren't known."""

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
    """The local folder that corresponds to this address."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training came in a round."""

    collectives: int = 0
    """That a rank had begun, in all groups together. 0: unknown."""
    seconds: float = 0.0
    """From its first collectives to its last ones, within one look of the agent at each end."""


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
    progress: Progress = Progress()
    """In an entry of phase failed or succeeded."""
    newer: bool = False
    """See `WorkerError.newer`."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many nodes were expected, how many reported, and whether everything was read."""

    expected: int | None
    """Nodes that took part in the round; None: unknown."""
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
    """Sentences about what wasn't read or not understood."""


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


STALLS_OF_ROUND = 1000
"""Numbers that the records of one round's stalls can have."""


class RestartKind(str, enum.Enum):
    """What is restarted."""

    ROUND = "round"
    """torch elastic's worker group: all worker processes of all nodes."""
    IN_PROCESS = "in-process"
    """The training function, in worker processes that live on."""
    STALL = "stall"
    """Nothing: the job made no progress, and its agents reported which rank it waited for."""


@dataclass(frozen=True, slots=True)
class RestartRecord:
    """A failure within an attempt, and the decision whether to restart. Empty fields and None aren't known."""

    kind: RestartKind
    number: int
    """Of the round or iteration that failed, from 0."""
    headline: str
    """The verdict's."""
    restart: bool
    """False: the attempt ended, or the job only made no progress for a while."""
    reason: str
    rank: int | None = None
    """The root cause's global rank."""
    node: str = ""
    """The root cause's node."""
    fingerprint: str = ""
    category: str = ""
    is_agreed: bool = True
    """False: the agents reached no decision, and torch elastic restarted."""
    timestamp_ns: int | None = None
    """When the root cause failed."""
    lost_seconds: float | None = None
    """From the failure until the worker processes were started again; or how long the job made no progress."""
    world_size_before: int | None = None
    """Ranks."""
    world_size_after: int | None = None
    """Ranks after the restart."""


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

    In a large cascade these are only failures with an opened document; all further ones are in `unopened`.
    """
    history: tuple[WorkerError, ...] = ()
    """Failures of earlier rounds and incarnations, which are never judged."""
    handled: tuple[WorkerError, ...] = ()
    """Exceptions of the judged round that the program handled after its process group had ended because of them."""
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
    """Documents of a large cascade that weren't opened, grouped by fault, the largest group first."""
    restarts: tuple[RestartRecord, ...] = ()
    """What was decided after each failed round of the attempt, oldest first."""

    @property
    def places(self) -> list[Place]:
        """Where the failures and the nodes were."""
        return [failure.place for failure in self.failures] + [entry.place for entry in self.roster]

    @property
    def engine(self) -> str:
        """As the first `Place.engine` that is known."""
        return next((place.engine for place in self.places if place.engine), "")

    @property
    def progress(self) -> Progress:
        """How far the judged round came, as far as a node knows."""
        known = [entry.progress for entry in self.roster]
        seconds = max((each.seconds for each in known), default=0.0)
        return Progress(max((each.collectives for each in known), default=0), seconds)

    @property
    def last_stall(self) -> RestartRecord | None:
        """The stall of the judged round that the job didn't recover from; None: there was none, or it isn't known."""
        stalls = [record for record in self.restarts if record.kind is RestartKind.STALL]
        last = stalls[-1] if stalls and stalls[-1].number // STALLS_OF_ROUND == self.round else None
        return last if last is not None and last.lost_seconds is None else None

    @property
    def all_succeeded(self) -> bool:
        """Whether every node of the judged round reports success."""
        return nodes_done(self.roster) and all(entry.phase is not Phase.FAILED for entry in self.roster)

    def unopened_like(self, *fingerprints: str) -> tuple[int, ...]:
        """Return the ranks with one of these faults and no opened document, ascending."""
        opened, wanted = {failure.rank for failure in self.failures}, set(fingerprints)
        alike = (group for group in self.unopened if group.fingerprint in wanted)
        return tuple(sorted({rank for group in alike for rank in group.ranks} - opened))

    def unopened_elsewhere(self, *fingerprints: str) -> int:
        """Return the number of processes with an unopened document of another fault."""
        opened = {failure.rank for failure in self.failures}
        others = [group for group in self.unopened if group.fingerprint not in fingerprints]
        ranks = {rank for group in others for rank in group.ranks} - opened
        return len(ranks) + sum(group.count for group in others if not group.ranks)


# --- nodes of a round -------------------------------------------------------------------------------------------------

_FINAL = {Phase.FAILED, Phase.SUCCEEDED}

NodeKey = tuple[str, "int | None"]
"""A node's name and its rank: two agents on one host may have one name."""


def node_key(place: Place) -> NodeKey:
    """Return the key of the node of a process or an agent."""
    return (place.node, place.group_rank)


def node_order(key: NodeKey) -> tuple[str, int]:
    """Return what sorts nodes by name, then by group rank."""
    return (key[0], -1 if key[1] is None else key[1])


def node_label(key: NodeKey) -> str:
    """Return a name for a person, also for a node that has none."""
    node, group_rank = key
    return node or (f"group rank {group_rank}" if group_rank is not None else "a node without a name")


def of_newest_incarnations(
    entries: Sequence[NodePresence], newest: dict[NodeKey, int] | None = None
) -> list[NodePresence]:
    """Return the entries without those of a node's earlier incarnations.

    They are of one round; `newest` has the newest incarnation of each node, if known from elsewhere.
    """
    newest = dict(newest or {})
    for entry in entries:
        key = node_key(entry.place)
        newest[key] = max(newest.get(key, 0), entry.place.incarnation)
    return [
        entry
        for entry in entries
        if not entry.place.incarnation or entry.place.incarnation >= newest[node_key(entry.place)]
    ]


def nodes_done(roster: Iterable[NodePresence], expected_nodes: int | None = None) -> bool:
    """Whether every node of the last round has reported.

    Without `expected_nodes` the entries give the number of nodes; without entries the answer is False.
    """
    entries = list(roster)
    last = max((entry.place.round for entry in entries), default=0)
    current = of_newest_incarnations([entry for entry in entries if entry.place.round == last])
    expected = expected_nodes or max((entry.place.group_world_size for entry in current), default=0)
    return expected > 0 and len(nodes_reported(current)) >= expected


def nodes_reported(roster: Iterable[NodePresence]) -> set[NodeKey]:
    """Return the nodes that have reported: they will write nothing more."""
    return {node_key(entry.place) for entry in roster if entry.phase in _FINAL}


def unreported_nodes(job: JobErrors) -> tuple[str, ...]:
    """Return the nodes that took part in the judged round and haven't reported their end, by name."""
    done = nodes_reported(job.roster)
    unreported = {node_key(entry.place) for entry in job.roster} - done
    return tuple(node_label(key) for key in sorted(unreported, key=node_order))


def pods_live(job: JobErrors) -> bool:
    """Whether every pod reported that it is done; if one didn't, Flyte reads no file of the attempt.

    If a node joined and didn't report, its pod may be gone. If a node's agent is gone, so is its pod: the agent was its
    main process. The node's recorder can write its report, but can't let the pod succeed.
    """
    is_lost = any(failure.subject is Subject.AGENT and failure.category == "node_lost" for failure in job.failures)
    return not is_lost and not unreported_nodes(job)


# --- the verdict and the decision -------------------------------------------------------------------------------------


class Scope(str, enum.Enum):
    """The kind of root cause."""

    RANK = "rank"
    RANKS = "ranks"
    NODE = "node"
    EXTERNAL = "external"
    UNDETERMINED = "undetermined"


@dataclass(frozen=True, slots=True)
class Reason:
    """A sentence of a verdict, and the failures that support it."""

    text: str
    failures: tuple[WorkerError, ...] = ()


@dataclass(frozen=True, slots=True)
class Suspect:
    """A possible root cause, if none is certain."""

    why: str
    rank: int | None = None
    node: str | None = None

    @property
    def name(self) -> str:
        """The suspect: "rank 3", or the node's name."""
        return f"rank {self.rank}" if self.rank is not None else str(self.node)


@dataclass(frozen=True, slots=True)
class Victims:
    """Processes that failed or were stopped as a consequence."""

    count: int = 0
    by_rank: tuple[tuple[int, str], ...] = ()
    """(rank, one line) of at most 100 victims, by rank."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A strategy's result: the root cause, the confidence, the reasons and the coverage."""

    scope: Scope
    code: str
    category: str
    headline: str
    message: str
    strategy: str
    ranks: tuple[int, ...] = ()
    node: str | None = None
    fingerprint: str = ""
    timestamp_ns: int | None = None
    confidence: str = "low"
    """"high", "medium" or "low"."""
    rule: str = ""
    """The strategy's rule that found the root cause, such as "own-fault"; empty: the strategy names none."""
    why: tuple[str, ...] = ()
    sources: tuple[tuple[str, ...], ...] = field(default=(), compare=False)
    """For each sentence of `why` the names of its documents, if the strategy gives any. Not in JSON, like `root`."""
    suspects: tuple[Suspect, ...] = ()
    victims: Victims = field(default_factory=Victims)
    coverage: Coverage = field(default_factory=lambda: Coverage(None, 0))
    settled: bool = True
    digest: str = ""
    document_count: int = 0
    root: WorkerError | None = None
    """The root cause; None if no single failure is it."""

    @property
    def is_at_time_limit(self) -> bool:
        """Whether the root cause is that the attempt had reached its time limit."""
        return self.root is not None and self.root.code == TIME_LIMIT

    @property
    def reasons(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Each sentence of `why` with the names of its documents."""
        sources = (*self.sources, *(() for _ in self.why))
        return tuple(zip(self.why, sources, strict=False))


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to run the task again, and on whose retry budget."""

    retry: bool
    kind: Kind
    origin: Origin
    enforced: bool
    """True: stock Flyte carries it out. False: it is advice."""
    reason: str
    retries_left: int | None = None
    """Of the task's `retries`, before this decision; None: unknown."""

    @property
    def is_spent(self) -> bool:
        """Whether it is to retry although the retry budget is used up: the task doesn't run again."""
        return self.retry and self.origin is not Origin.SYSTEM and self.retries_left == 0
