"""The data of one attempt: failures, roster, coverage, seals and restarts; the verdict,
and the decision to retry.
"""

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
    """Whether the user's code handled the exception in the end,
    so that readers ignore the document.
    """


@dataclass(frozen=True, slots=True)
class LogTail:
    """The end of a worker's stderr, read by its agent."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """The task, image and GPUs of a node. Empty fields are unknown."""

    task: str = ""
    """The task's full name."""
    image: str = ""
    """The container image."""
    gpu_model: str = ""
    gpus: int = 0
    """Number of GPUs visible to the node."""
    source_url: str = ""
    """Where the source code can be read: "https://github.com/org/repo/blob/<commit>"."""
    source_root: str = ""
    """The local folder that corresponds to this address."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the training in a round."""

    collectives: int = 0
    """Number of collectives that a rank had called, in all groups together; 0 if unknown."""
    seconds: float = 0.0
    """Time from the first collectives to the last ones;
    each end is off by at most one agent poll interval.
    """
    idle_seconds: float = 0.0
    """Time from the last collectives until the node reported the end of the round; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class NodePresence:
    """A roster entry: one node in one round."""

    phase: Phase
    place: Place
    ranks: tuple[int, ...] = ()
    receipts: tuple[Receipt, ...] = ()
    timestamp_ns: int | None = None
    first_failure: CausedBy | None = None
    """In an entry of phase failed: the failure that ended the round,
    from the agent's point of view.
    """
    first_failure_reason: str = ""
    """The same as text: "rank 3 on worker-1 failed: ValueError"."""
    log_tails: tuple[LogTail, ...] = ()
    """In an entry of phase failed: the logs of workers that failed on their own,
    without the workers' tracebacks.
    """
    setup: NodeSetup = NodeSetup()
    """In an entry of phase failed."""
    progress: Progress = Progress()
    """In an entry of phase failed or succeeded."""
    finished_ranks: tuple[int, ...] = ()
    """In an entry of phase failed: the ranks that returned from their function or program before
    this node knew of any failure. In an entry of phase succeeded, all ranks did.
    """
    newer: bool = False
    """See `WorkerError.newer`."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many nodes were expected, how many reported, and whether everything was read."""

    expected: int | None
    """Nodes that took part in the round; None if unknown."""
    reported: int
    """Nodes with at least one document that was read, or with a final roster entry."""
    unreadable: int = 0
    """Documents that exist but could not be read."""
    complete: bool = False
    """Whether every expected node has a final roster entry, and every document was read.

    If a roster exists, it must also have an entry of each document's round and incarnation. In a
    large cascade, it is enough that every document was listed, and several of each fault were read.
    """
    notes: tuple[str, ...] = ()
    """Sentences about missing, unreadable and ignored documents."""


@dataclass(frozen=True, slots=True)
class Seal:
    """The verdict that a pod wrote as its error.pb."""

    name: str
    digest: str
    count: int
    """Number of documents that the verdict is based on."""
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
        """Sort key of an attempt's seals: the verdict based on the most documents comes first."""
        return (-self.count, self.name)


STALLS_OF_ROUND = 1000
"""Maximum number of stalls in a round: stall `s` of round `r` has the number
`r * STALLS_OF_ROUND + s`.
"""


class RestartKind(str, enum.Enum):
    """The scope of a restart."""

    ROUND = "round"
    """torch elastic's worker group: all worker processes of all nodes."""
    IN_PROCESS = "in-process"
    """The training function, in the same worker processes."""
    STALL = "stall"
    """No restart: the job made no progress for a while,
    and its agents reported the rank that it waited for.
    """


@dataclass(frozen=True, slots=True)
class RestartRecord:
    """A failure within an attempt, and the decision whether to restart. Empty fields
    and None mean unknown.
    """

    kind: RestartKind
    number: int
    """The number of the failed round or iteration, from 0."""
    headline: str
    """The verdict's headline."""
    restart: bool
    """False if the attempt ended or the record is about a stall."""
    reason: str
    rank: int | None = None
    """The root cause's global rank."""
    node: str = ""
    """The root cause's node."""
    fingerprint: str = ""
    category: str = ""
    is_agreed: bool = True
    """False if the agents reached no decision and torch elastic restarted."""
    timestamp_ns: int | None = None
    """When the root cause failed."""
    lost_seconds: float | None = None
    """Time from the failure until the worker processes were started again,
    or the duration of a stall.
    """
    world_size_before: int | None = None
    """Number of ranks before the restart."""
    world_size_after: int | None = None
    """Number of ranks after the restart."""


@dataclass(frozen=True, slots=True)
class Unopened:
    """Unopened documents of the judged round with the same fingerprint in their names."""

    fingerprint: str
    """The fingerprint in the opened documents; if none was opened,
    ``?:`` and the 12 hex digits of the names.
    """
    count: int
    """Number of documents."""
    ranks: tuple[int, ...] = ()
    """The ranks in the documents' names, ascending; without agents and files that have no rank."""
    group_ranks: tuple[int, ...] = ()
    """The group ranks in the documents' names, ascending."""
    names_hash: int = 0
    """Sum of `firstfault.reading.assemble.hash_name` over the documents' names."""


@dataclass(frozen=True, slots=True)
class JobSize:
    """The size of a job according to its logs; a value is 0 if it is unknown."""

    ranks: int = 0
    nodes: int = 0
    at_least: tuple[str, ...] = ()
    """Those of both, "ranks" and "nodes", that no line states: there may be more."""


@dataclass(frozen=True, slots=True)
class JobErrors:
    """Everything that was read about one attempt."""

    failures: tuple[WorkerError, ...] = ()
    """Failures of the judged round, one per process, by time; those without a time come last.

    In a large cascade, only failures with an opened document are listed; `unopened` counts the
    rest.
    """
    history: tuple[WorkerError, ...] = ()
    """Failures of earlier rounds and incarnations; the verdict ignores them."""
    handled: tuple[WorkerError, ...] = ()
    """Exceptions of the judged round that broke the process group and that the program then
    handled, as for a retry.
    """
    roster: tuple[NodePresence, ...] = ()
    """Entries of the judged round."""
    seals: tuple[Seal, ...] = ()
    coverage: Coverage = field(default_factory=lambda: Coverage(None, 0))
    round: int = 0
    attempt: int = 0
    settled: bool = True
    """False if the reader timed out before every node had reported."""
    digest: str = ""
    """Digest of the names of the round's documents, opened or not; independent of their order."""
    document_count: int = 0
    """Documents of the round, opened or not."""
    unopened: tuple[Unopened, ...] = ()
    """Documents of a large cascade that weren't opened, grouped by fault, the largest group first.
    """
    restarts: tuple[RestartRecord, ...] = ()
    """Restart decisions after each failed round of the attempt, and stalls, oldest first."""
    completion: str = ""
    """The sentence that proves from a job's log that it had finished before its failures, or empty
    if the log has no proof.

    For a job under firstfault the roster has the proof.
    """
    size: JobSize | None = None
    """According to logs, or None if documents and roster have it."""
    named_ranks: tuple[int, ...] = ()
    """Ranks that lines of logs name, whether or not they have failures."""

    @property
    def places(self) -> list[Place]:
        """The places of all failures and roster entries."""
        return [failure.place for failure in self.failures] + [entry.place for entry in self.roster]

    @property
    def engine(self) -> str:
        """The first known `Place.engine`; empty if unknown."""
        return next((place.engine for place in self.places if place.engine), "")

    @property
    def progress(self) -> Progress:
        """The progress of the judged round: the maximum that any node reported,
        and the shortest idle time.
        """
        known = [entry.progress for entry in self.roster]
        seconds = max((each.seconds for each in known), default=0.0)
        idle_seconds = min((each.idle_seconds for each in known if each.idle_seconds), default=0.0)
        return Progress(max((each.collectives for each in known), default=0), seconds, idle_seconds)

    @property
    def last_stall(self) -> RestartRecord | None:
        """The stall that the job didn't recover from in the judged round, or None if there was no
        stall or the job recovered.
        """
        stalls = [record for record in self.restarts if record.kind is RestartKind.STALL]
        # stalls are numbered per round: see STALLS_OF_ROUND
        last = stalls[-1] if stalls and stalls[-1].number // STALLS_OF_ROUND == self.round else None
        # the agents add the duration when the job makes progress again
        return last if last is not None and last.lost_seconds is None else None

    @property
    def has_failed(self) -> bool:
        """Whether the attempt failed.

        An unreadable document counts, too, and so does a node that reported a failure without
        leaving a document.
        """
        has_failed_node = any(entry.phase is Phase.FAILED for entry in self.roster)
        return bool(self.failures or self.seals or self.coverage.unreadable or has_failed_node)

    @property
    def all_succeeded(self) -> bool:
        """Whether every node of the judged round reports success."""
        return nodes_done(self.roster) and all(
            entry.phase is not Phase.FAILED for entry in self.roster
        )

    def unopened_like(self, *fingerprints: str) -> tuple[int, ...]:
        """Return the ranks with one of these fingerprints and without an opened document."""
        opened = {failure.rank for failure in self.failures}
        wanted = set(fingerprints)
        alike = (group for group in self.unopened if group.fingerprint in wanted)
        return tuple(sorted({rank for group in alike for rank in group.ranks} - opened))

    def unopened_elsewhere(self, *fingerprints: str) -> int:
        """Return the number of processes without an opened document and with none
        of these fingerprints.
        """
        opened = {failure.rank for failure in self.failures}
        others = [group for group in self.unopened if group.fingerprint not in fingerprints]
        ranks = {rank for group in others for rank in group.ranks} - opened
        # agents and stock files have no rank to deduplicate by: each document counts as one process
        return len(ranks) + sum(group.count for group in others if not group.ranks)


# --- nodes of a round -----------------------------------------------------------------------------

_FINAL = {Phase.FAILED, Phase.SUCCEEDED}

NodeKey = tuple[str, "int | None"]
"""A node's name and its group rank: two agents on one host may have the same name."""


def node_key(place: Place) -> NodeKey:
    """Return the key of the node of a process or an agent."""
    return (place.node, place.group_rank)


def node_order(key: NodeKey) -> tuple[str, int]:
    """Return the sort key of nodes: by name, then by group rank."""
    return (key[0], -1 if key[1] is None else key[1])


def node_label(key: NodeKey) -> str:
    """Return a node's name for messages; for a node without a name, its group rank."""
    node, group_rank = key
    return node or (
        f"group rank {group_rank}" if group_rank is not None else "a node without a name"
    )


def select_newest_incarnations(
    entries: Sequence[NodePresence], newest: dict[NodeKey, int] | None = None
) -> list[NodePresence]:
    """Drop entries of a node's earlier incarnations.

    All entries are of one round. `newest` has incarnations of nodes that are known from elsewhere,
    such as documents.
    """
    newest = dict(newest or {})
    for entry in entries:
        key = node_key(entry.place)
        newest[key] = max(newest.get(key, 0), entry.place.incarnation)
    return [
        entry
        for entry in entries
        # 0: unknown, so it can't be older
        if not entry.place.incarnation or entry.place.incarnation >= newest[node_key(entry.place)]
    ]


def nodes_done(
    roster: Iterable[NodePresence], expected_nodes: int | None = None, *, missing: int = 0
) -> bool:
    """Whether all nodes of the last round but `missing` ones have reported.

    `expected_nodes` overrides the number of nodes in the entries. Without entries, the result is
    False.
    """
    entries = list(roster)
    last = max((entry.place.round for entry in entries), default=0)
    current = select_newest_incarnations([entry for entry in entries if entry.place.round == last])
    expected = expected_nodes or max((entry.place.group_world_size for entry in current), default=0)
    return expected > missing and len(nodes_reported(current)) >= expected - missing


def nodes_reported(roster: Iterable[NodePresence]) -> set[NodeKey]:
    """Return the nodes with a final roster entry: they will write nothing more."""
    return {node_key(entry.place) for entry in roster if entry.phase in _FINAL}


def unreported_nodes(job: JobErrors) -> tuple[str, ...]:
    """Return the names of nodes that joined the judged round and have no final roster entry."""
    done = nodes_reported(job.roster)
    unreported = {node_key(entry.place) for entry in job.roster} - done
    return tuple(node_label(key) for key in sorted(unreported, key=node_order))


def pods_live(job: JobErrors) -> bool:
    """Whether every pod reported its end; if a pod was lost, Flyte reads no file of the attempt.

    A node that joined and sent no report may have lost its pod. A node without its agent has lost
    its pod: the agent was the main process. The node's recorder can still write a report, but it
    can't make the pod succeed.
    """
    is_lost = any(
        failure.subject is Subject.AGENT and failure.category == "node_lost"
        for failure in job.failures
    )
    return not is_lost and not unreported_nodes(job)


# --- the verdict and the decision -----------------------------------------------------------------


class Scope(str, enum.Enum):
    """The kind of root cause."""

    RANK = "rank"
    RANKS = "ranks"
    NODE = "node"
    EXTERNAL = "external"
    UNDETERMINED = "undetermined"


@dataclass(frozen=True, slots=True)
class Reason:
    """One sentence of a verdict's explanation, and the failures that support it."""

    text: str
    failures: tuple[WorkerError, ...] = ()


UNNAMED_PROCESS = "an unnamed process"


@dataclass(frozen=True, slots=True)
class Suspect:
    """A possible root cause that isn't certain."""

    why: str
    rank: int | None = None
    node: str | None = None

    @property
    def name(self) -> str:
        """The suspect's name: "rank 3", or the node's name."""
        return f"rank {self.rank}" if self.rank is not None else self.node or UNNAMED_PROCESS


@dataclass(frozen=True, slots=True)
class Victims:
    """Processes that failed or were stopped as a consequence."""

    count: int = 0
    by_rank: tuple[tuple[int, str], ...] = ()
    """(rank, one-line description) of at most 100 victims, sorted by rank."""


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
    machine: str = field(default="", compare=False)
    """What identifies the machine of the root cause in another attempt: its name, or the kernel's
    boot id in a pod that doesn't know the name. It is set by `firstfault.conclude`, and empty if
    unknown.
    """
    fingerprint: str = ""
    timestamp_ns: int | None = None
    confidence: str = "low"
    """"high", "medium" or "low"."""
    rule: str = ""
    """The strategy's rule that found the root cause, such as "own-fault", or empty if the strategy
    has no rules.
    """
    why: tuple[str, ...] = ()
    sources: tuple[tuple[str, ...], ...] = field(default=(), compare=False)
    """Names of the documents behind each sentence of `why`, perhaps of fewer; not in JSON."""
    suspects: tuple[Suspect, ...] = ()
    victims: Victims = field(default_factory=Victims)
    coverage: Coverage = field(default_factory=lambda: Coverage(None, 0))
    settled: bool = True
    digest: str = ""
    document_count: int = 0
    root: WorkerError | None = None
    """The root cause; None if it isn't a single failure."""

    @property
    def is_at_time_limit(self) -> bool:
        """Whether the attempt failed because it reached its time limit."""
        return self.root is not None and self.root.code == TIME_LIMIT

    @property
    def reasons(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Each sentence of `why` with the names of the documents behind it."""
        # pad: strategies may give documents for the first sentences only
        sources = (*self.sources, *(() for _ in self.why))
        return tuple(zip(self.why, sources, strict=False))


class Action(str, enum.Enum):
    """What a scheduler should do after a failed attempt."""

    RETRY = "retry"
    SYSTEM = "system"
    """Run it again, and don't count that against the user:
    it's proven that the platform is at fault.
    """
    STOP = "stop"
    """Don't run it again: it's proven that the failure would come again,
    or the program asks for that.
    """
    UNKNOWN = "unknown"
    """Nothing proves that a retry would help, or that it wouldn't:
    do what happens without firstfault.
    """
    UNNAMED = ""
    """Written by a version without actions."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to run the task again, and which retry budget pays."""

    retry: bool
    kind: Kind
    origin: Origin
    enforced: bool
    """True if the engine (stock Flyte, or Ray Train's callback) executes the decision. False if it
    is only advice, as for every job under torchrun: schedulers follow `action`.
    """
    reason: str
    retries_left: int | None = None
    """Unused `retries` of the task before this decision; None if unknown."""
    action: Action = Action.UNNAMED
    failed_starts: int = 0
    """Attempts in a row, this one included, that failed before they had trained for a minute."""

    @property
    def is_spent(self) -> bool:
        """Whether the decision is to retry, but all retries are used up,
        so that the task doesn't run again.
        """
        return self.retry and self.origin is not Origin.SYSTEM and self.retries_left == 0
