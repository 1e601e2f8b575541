"""The data that flows from documents to a decision. Frozen, plain, without storage, protobuf or rendering."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = [
    "CATEGORIES",
    "DIED_UNHEARD",
    "TOLD_TO_GO",
    "TOLD_TO_GO_BY",
    "CausedBy",
    "CollectiveProgress",
    "Coverage",
    "Decision",
    "DocumentRef",
    "ExceptionInfo",
    "FrameInfo",
    "JobErrors",
    "Kind",
    "NodePresence",
    "Origin",
    "Phase",
    "Place",
    "Reason",
    "Receipt",
    "Resources",
    "Scope",
    "Seal",
    "SentSignal",
    "StackDump",
    "Subject",
    "Suspect",
    "ThreadFailure",
    "Unopened",
    "Verdict",
    "Victims",
    "WorkerError",
    "Writer",
]


class Kind(str, enum.Enum):
    """flyteidl.core.ContainerError.Kind: may the engine run the task again."""

    NON_RECOVERABLE = "NON_RECOVERABLE"
    RECOVERABLE = "RECOVERABLE"


class Origin(str, enum.Enum):
    """flyteidl.core.ExecutionError.ErrorKind: whose budget a retry is taken from."""

    UNKNOWN = "UNKNOWN"
    USER = "USER"
    SYSTEM = "SYSTEM"


class Writer(str, enum.Enum):
    """Who wrote a document."""

    WORKER = "worker"
    AGENT = "agent"
    RECORDER = "recorder"
    STOCK = "stock"
    """A file of Flyte's own: error.pb or error-<uuid>.pb of a pod without firstfault."""


class Subject(str, enum.Enum):
    """Whose failure a document is about."""

    WORKER = "worker"
    AGENT = "agent"


class Phase(str, enum.Enum):
    """What a node's roster entry says."""

    JOINED = "joined"
    FAILED = "failed"
    SUCCEEDED = "succeeded"


class Scope(str, enum.Enum):
    """What the root cause is."""

    RANK = "rank"
    RANKS = "ranks"
    NODE = "node"
    EXTERNAL = "external"
    UNDETERMINED = "undetermined"


CATEGORIES: dict[str, str] = {
    "recoverable": "the user's code said so: FlyteRecoverableException or a subclass",
    "user_code": "an exception of the training code without a more precise class",
    "input": "the task was given or configured with something it cannot run with",
    "config": "a configuration that no worker can run with",
    "data": "malformed or missing training data",
    "numerics": "NaN, overflow or another numerical fault",
    "checkpoint": "a checkpoint is damaged, missing or does not fit the model",
    "cuda_oom": "the GPU's memory is used up",
    "gpu_kernel": "a CUDA kernel failed (illegal access, assert)",
    "gpu_hardware": "a GPU, its memory or its links are faulty (ECC, NVLink, fell off the bus)",
    "host_oom": "the host's or the container's memory is used up",
    "disk_full": "no space is left",
    "storage": "object storage or a file system failed",
    "network": "the network failed, seen by a party that is not a victim",
    "external_service": "a hub, a tracker or another service failed",
    "auth": "credentials are missing, wrong or expired",
    "collective": "a collective operation failed because of a peer",
    "rendezvous": "the nodes did not come together, or lost their store",
    "hang": "a worker stopped making progress",
    "signal": "a process was ended by a signal that its agent did not send",
    "exit": "a process exited by itself without an exception",
    "stopped": "a process was stopped by its own agent",
    "preemption": "the node was asked to go: preemption, drain, time limit",
    "node_lost": "a node vanished",
    "platform": "the elastic agent itself failed",
    "infrastructure": "something outside of the agent and its workers failed",
    "unknown": "nothing was said that allows a class",
}
"""The closed list of categories, each with its meaning."""


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """One frame of a traceback."""

    file: str
    line: int
    function: str
    code: str = ""
    """The source line, stripped; empty if it could not be read."""


@dataclass(frozen=True, slots=True)
class ExceptionInfo:
    """An exception as it was found in the process that raised it."""

    type: str
    """Qualified name; builtins without their module."""
    message: str
    bases: tuple[str, ...] = ()
    """Qualified names of all base classes, nearest first, without object."""
    frames: tuple[FrameInfo, ...] = ()
    """Outermost first."""
    notes: tuple[str, ...] = ()
    causes: tuple[ExceptionInfo, ...] = ()
    """The chain of causes and contexts, nearest first, flattened."""
    relation: str = ""
    """"cause" or "context": how this one hangs on the one before it in `causes`."""
    frames_omitted: int = 0
    members: tuple[ExceptionInfo, ...] = ()
    """Members of an exception group."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stood in the job. None: it had no such rank."""

    attempt: int = 0
    round: int = 0
    incarnation: int = 0
    """Milliseconds since the Unix epoch when the node's agent started."""
    restart_count: int = 0
    rank: int | None = None
    local_rank: int | None = None
    group_rank: int | None = None
    world_size: int = 0
    """0: not known."""
    group_world_size: int = 0
    """Number of nodes in the round; 0: not known."""
    role: str = ""
    node: str = ""
    host: str = ""
    ip: str = ""
    pid: int = 0
    namespace: str = ""
    """Kubernetes' namespace of the pod; empty: not known."""


@dataclass(frozen=True, slots=True)
class SentSignal:
    """A signal the agent sent to a process of its own."""

    signal: str
    reason: str
    """For a person; of fixed texts, `TOLD_TO_GO`."""


TOLD_TO_GO = "its agent was told to go"
"""The reason of an agent that stops its workers because its pod has to end."""
TOLD_TO_GO_BY = "told to go by"
"""What such an agent tells the others begins so; the signal's name follows."""
DIED_UNHEARD = "it died without a word"
"""What agents tell each other of one that was killed."""


@dataclass(frozen=True, slots=True)
class StackDump:
    """Where the threads of one process of the writer's node stood."""

    pid: int
    rank: int | None
    text: str
    """As the dumper printed it."""


@dataclass(frozen=True, slots=True)
class ThreadFailure:
    """An exception that ended a thread, which does not end its process."""

    thread: str
    """The thread's name."""
    timestamp_ns: int | None
    """Nanoseconds since the Unix epoch; None: not known."""
    exception: ExceptionInfo


@dataclass(frozen=True, slots=True)
class CollectiveProgress:
    """The last collective of one process group, by the sequence numbers of torch's flight recorder."""

    group: str
    last_operation: str
    """Of the last one that was enqueued, "allreduce"."""
    enqueued: int
    completed: int | None
    """None: the backend does not tell."""


@dataclass(frozen=True, slots=True)
class CausedBy:
    """Whose failure made an agent stop its workers, as it was told."""

    rank: int | None
    node: str
    document: str
    """Name of the object that says it; empty if it was not known."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What the node's cgroup said. None: could not be read."""

    oom_kill: int | None = None
    """How often the kernel's OOM killer struck since the node's recorder started."""
    memory_peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory_used_bytes: int | None = None
    watermark_ns: int | None = None
    """When the highest use was seen, nanoseconds since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class DocumentRef:
    """The object a piece of knowledge comes from."""

    name: str
    """Name of the object within its folder."""
    uri: str = ""
    last_modified_ns: int | None = None
    """When the storage says the upload ended; often whole seconds."""
    size: int = 0
    """Bytes."""


@dataclass(frozen=True, slots=True)
class WorkerError:
    """What is known about one failure of one process or agent; merged if several documents speak of it."""

    code: str
    message: str
    kind: Kind
    origin: Origin
    timestamp_ns: int | None = None
    """When it was recorded, nanoseconds since the Unix epoch by the writer's clock. None: the document does not say."""
    worker: str = ""
    """ContainerError.worker: the node's name."""
    place: Place = field(default_factory=Place)
    writer: Writer = Writer.STOCK
    subject: Subject = Subject.WORKER
    exception: ExceptionInfo | None = None
    exit_code: int | None = None
    signal: str = ""
    sent_signals: tuple[SentSignal, ...] = ()
    category: str = ""
    fingerprint: str = ""
    log_tail: str = ""
    resources: Resources = field(default_factory=Resources)
    monotonic_ns: int | None = None
    boot_id: str = ""
    upload_delay_ns: int | None = None
    versions: tuple[tuple[str, str], ...] = ()
    documents: tuple[DocumentRef, ...] = ()
    """Every document that speaks of this failure."""
    in_flight: bool = False
    """Recorded while the exception was still inside the task function; nobody has said that it left it."""
    stack_dumps: tuple[StackDump, ...] = ()
    """Of this process, and of others of its node."""
    thread_failures: tuple[ThreadFailure, ...] = ()
    collectives: tuple[CollectiveProgress, ...] = ()
    """One for each process group."""
    caused_by: CausedBy | None = None
    """Why the agent stopped this worker, if it was for a failure that it was told of."""

    @property
    def rank(self) -> int | None:
        """Global rank, None for an agent or a stock file."""
        return self.place.rank

    @property
    def node(self) -> str:
        """The node's name: what the document says, else the host."""
        return self.place.node or self.worker or self.place.host

    @property
    def recoverable(self) -> bool:
        """Whether the worker itself marked it so."""
        return self.kind is Kind.RECOVERABLE

    @property
    def stopped_by_agent(self) -> bool:
        """Whether the process ended because its own agent told it to: the mark of a victim without a word."""
        return bool(self.sent_signals) and self.exception is None

    @property
    def what(self) -> str:
        """The failure in one or two words: the exception's short name, the signal or the exit code."""
        if self.exception is not None:
            return self.exception.type.rsplit(".", 1)[-1]
        if self.signal:
            return self.signal
        if self.exit_code is not None:
            return f"exit code {self.exit_code}"
        if self.writer is not Writer.STOCK:
            return self.code.rsplit(":", 1)[-1] or "error"
        return self.code or "error"


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
    """Sum over what `firstfault.assemble.name_hash` says of the names."""


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


@dataclass(frozen=True, slots=True)
class Reason:
    """A sentence of a verdict, and what it rests on."""

    text: str
    failures: tuple[WorkerError, ...] = ()


@dataclass(frozen=True, slots=True)
class Suspect:
    """Somebody who may be the root cause when nobody certainly is."""

    why: str
    rank: int | None = None
    node: str | None = None

    @property
    def name(self) -> str:
        """Whom it names: "rank 3", or the node's name."""
        return f"rank {self.rank}" if self.rank is not None else str(self.node)


@dataclass(frozen=True, slots=True)
class Victims:
    """Who failed, or was stopped, as a consequence."""

    count: int = 0
    by_rank: tuple[tuple[int, str], ...] = ()
    """At most 100 of (rank, one line), by rank."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a strategy returns: the root cause, how sure it is and why, and what it did not see."""

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
    why: tuple[str, ...] = ()
    sources: tuple[tuple[str, ...], ...] = field(default=(), compare=False)
    """For each sentence of `why` the names of the documents it rests on; empty where the strategy does not say.

    Like `root` it is not in JSON: it leads to documents, and who has none has no use for it.
    """
    suspects: tuple[Suspect, ...] = ()
    victims: Victims = field(default_factory=Victims)
    coverage: Coverage = field(default_factory=lambda: Coverage(None, 0))
    settled: bool = True
    digest: str = ""
    document_count: int = 0
    root: WorkerError | None = None
    """The failure the verdict rests on, None if there is no single one."""

    @property
    def reasons(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Each sentence of `why` with the names of the documents it rests on."""
        sources = (*self.sources, *(() for _ in self.why))
        return tuple(zip(self.why, sources, strict=False))


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to run the task again, and who pays."""

    retry: bool
    kind: Kind
    origin: Origin
    enforced: bool
    """True: stock Flyte will do this. False: it is advice."""
    reason: str
    retries_left: int | None = None
    """Of the task's `retries`, before this decision; None: not known."""

    @property
    def is_spent(self) -> bool:
        """Whether it says retry, and the budget that would pay for it is used up: the task is not run again."""
        return self.retry and self.origin is not Origin.SYSTEM and self.retries_left == 0
