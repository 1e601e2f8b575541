"""One failure of one worker or agent, as its documents report it, and what its category, signal or exit code means."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from pathlib import Path

from firstfault.utils.text import size
from firstfault.utils.toml import parse_toml

ABOUT_CATEGORIES: dict[str, dict[str, str]] = parse_toml(
    Path(__file__).with_name("categories.toml").read_text(encoding="utf-8")
)
"""The closed list of categories; the file explains the keys of each."""
CATEGORIES: dict[str, str] = {name: about["meaning"] for name, about in ABOUT_CATEGORIES.items()}
"""What each means."""


class Kind(str, enum.Enum):
    """flyteidl.core.ContainerError.Kind: whether the engine may run the task again."""

    NON_RECOVERABLE = "NON_RECOVERABLE"
    RECOVERABLE = "RECOVERABLE"


class Origin(str, enum.Enum):
    """flyteidl.core.ExecutionError.ErrorKind: whose retry budget a retry uses."""

    UNKNOWN = "UNKNOWN"
    USER = "USER"
    SYSTEM = "SYSTEM"


class Writer(str, enum.Enum):
    """The writer of a document."""

    WORKER = "worker"
    AGENT = "agent"
    RECORDER = "recorder"
    STOCK = "stock"
    """A file of Flyte's own: error.pb or error-<uuid>.pb of a pod without firstfault."""


class Subject(str, enum.Enum):
    """Whether a document is about a worker or its agent."""

    WORKER = "worker"
    AGENT = "agent"


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """One frame of a traceback."""

    file: str
    line: int
    function: str
    code: str = ""
    """The source line, stripped; empty if it could not be read."""
    context: tuple[str, ...] = ()
    """Lines around it and the line itself, without the indentation that all share; empty for frames of libraries."""
    context_line: int = 0
    """The number of the first of them."""
    marked: tuple[int, int] = (0, 0)
    """The characters of `code` that Python marks with carets, the end not included; (0, 0): none."""


@dataclass(frozen=True, slots=True)
class ExceptionInfo:
    """An exception, recorded in the process that raised it."""

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
    """The relation to the exception before it in `causes`: "cause", "context", or "suppressed" (by ``from None``)."""
    frames_omitted: int = 0
    members: tuple[ExceptionInfo, ...] = ()
    """Members of an exception group."""
    text_frames: tuple[FrameInfo, ...] = ()
    """The program's own frames in a traceback that is part of a message, with the lines around them."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process's position in the job. A rank is None if the process has none."""

    attempt: int = 0
    round: int = 0
    incarnation: int = 0
    """Milliseconds since the Unix epoch when the node's agent started."""
    restart_count: int = 0
    rank: int | None = None
    local_rank: int | None = None
    group_rank: int | None = None
    world_size: int = 0
    """0: unknown."""
    group_world_size: int = 0
    """Number of nodes in the round; 0: unknown."""
    role: str = ""
    node: str = ""
    host: str = ""
    ip: str = ""
    pid: int = 0
    namespace: str = ""
    """Kubernetes' namespace of the pod; empty: unknown."""
    engine: str = ""
    """What ran it: "flyte", "plain", "alone" (no engine, nor an agent), `OF_LOGS`; empty: unknown, so "flyte"."""
    machine: str = ""
    """Name of the machine; empty: unknown. `host` is the name that the machine or the pod gives itself."""
    gpu: str = ""
    """UUID of the process's GPU, "GPU-8f3a..."; empty: none, or not known."""


@dataclass(frozen=True, slots=True)
class SentSignal:
    """A signal that the agent sent to one of its workers."""

    signal: str
    reason: str
    """As the agent wrote it: free text, or `TERMINATED`."""


OF_LOGS = "log"
"""`Place.engine` of a job that ran without firstfault and is known only from its logs."""

TERMINATED = "its agent was terminated"
"""Why an agent stopped its workers when its pod was terminated. Stored in documents."""

TERMINATED_ALONE = "terminated from outside, perhaps by its launcher"
"""The same of a rank that no agent started. Stored in documents."""

TERMINATED_BY = "terminated by"
"""Begins what an agent of a terminated pod sends to its peers; the signal's name follows. Stored in documents."""

DIED_SILENTLY = "it died"
"""What agents send their peers about an agent that was killed. Stored in documents."""

TIME_LIMIT = "USER:TimeLimit"
"""The code of an agent whose pod was terminated because the attempt had reached its time limit."""

RECORDED_ONLY = "SYSTEM:FlightRecorder"
"""The code of a process that is known only from torch's flight recorder dump."""

CTRL_C = "USER:CtrlC"
"""The code of a process that SIGINT ended in the foreground of a terminal; elsewhere another process sent it."""
DIED = "USER:Died"
"""The code of a process when its launcher reports only that it died."""
FROM_OUTSIDE = {"preemption": "was terminated", "interrupted": "was interrupted"}
"""Categories of an agent that was ended from outside, and what it was."""

RESTARTED = "in-process restart"
"""Begins the line that a rank logs when it continues after a fault; the restart's number and a colon follow."""
_BEFORE_RESTART = re.compile(rf"\A.*\b{RESTARTED} \d+: [^\n]*\n?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StackDump:
    """The stacks of the threads of one process on the writer's node."""

    pid: int
    rank: int | None
    text: str
    """As the dumper printed it."""


@dataclass(frozen=True, slots=True)
class ThreadFailure:
    """An exception that ended a thread, but not its process."""

    thread: str
    """The thread's name."""
    timestamp_ns: int | None
    """Nanoseconds since the Unix epoch; None: unknown."""
    exception: ExceptionInfo


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, or one send or receive, as torch's flight recorder noted it."""

    sequence: int
    """Its number in the group; sends and receives have their own."""
    operation: str
    sizes: str = ""
    """Inputs and outputs, "[[2, 3]] -> [[2, 3]]"."""
    dtypes: str = ""
    state: str = ""
    """"scheduled", "started" or "completed"; gloo reports "scheduled" only."""
    is_p2p: bool = False


DEFAULT_GROUP = "default_pg"
"""torch's name for the process group of all ranks."""


def format_group_name(name: str, description: str) -> str:
    """Return a process group's description, with its name unless it is the only group with this description."""
    if description == DEFAULT_GROUP:
        return DEFAULT_GROUP
    return f"{description} ({name})" if description and description != "undefined" else name


@dataclass(frozen=True, slots=True)
class CollectiveProgress:
    """The last collective of one process group, by the sequence numbers of torch's flight recorder."""

    group: str
    """Its `format_group_name`."""
    last_operation: str
    """The last enqueued operation, "allreduce"."""
    enqueued: int
    completed: int | None
    """None: the backend doesn't report it."""
    last: tuple[Collective, ...] = ()
    """The group's last collectives, oldest first."""
    members: tuple[int, ...] = ()
    """Global ranks of the group's members; empty: unknown."""

    @property
    def is_outstanding(self) -> bool:
        """Whether a collective that the rank has called had not completed."""
        return self.completed is not None and self.enqueued > self.completed


@dataclass(frozen=True, slots=True)
class CausedBy:
    """The failure for which an agent stopped its workers, as a peer reported it."""

    rank: int | None
    node: str
    document: str
    """Name of the document about it; empty: unknown."""


@dataclass(frozen=True, slots=True)
class ExpiredDeadline:
    """A deadline of the watchdog that a worker didn't keep; its agent killed it for that."""

    scope: str
    """The name that the program gave to the block; empty for a heartbeat, and where the job made no progress."""
    seconds: float
    """The deadline, or the longest time between two pings."""
    heartbeat: bool = False
    """Whether it was the heartbeat of the loop, not a block."""
    since: str = ""
    """Where the block was entered, or the last ping was made: "train.py:50"; empty: unknown."""

    @property
    def text(self) -> str:
        """What happened: '"train step" exceeded 30 s', "no ping for 60 s", "no progress for 300 s"."""
        if self.scope and not self.heartbeat:
            return f'"{self.scope}" exceeded {self.seconds:g} s'
        return f"no {'ping' if self.heartbeat else 'progress'} for {self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class Resources:
    """Figures of the node's cgroup; None for one that could not be read."""

    oom_kill: int | None = None
    """Processes that the kernel's OOM killer has killed since the node's recorder started."""
    memory_peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory_used_bytes: int | None = None
    watermark_ns: int | None = None
    """Time of the highest usage, nanoseconds since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """The space of a file system that a process without privileges may use."""

    path: str
    """A path in it; " (quota)" follows if a quota is used up there."""
    free_bytes: int
    total_bytes: int
    free_inodes: int = 0
    total_inodes: int = 0
    """0: the file system doesn't count them."""

    @property
    def is_full(self) -> bool:
        """Whether less than 1 MiB and one in a thousand bytes are left, or no inode."""
        little = self.free_bytes < min(1 << 20, max(self.total_bytes // 1000, 1))
        return (self.total_bytes > 0 and little) or (self.total_inodes > 0 and self.free_inodes == 0)

    @property
    def text(self) -> str:
        """What is left of it: "0 B of 2.0 MiB free at /ckpt"."""
        if self.total_inodes and not self.free_inodes:
            return f"no inode free at {self.path}"
        return f"{size(self.free_bytes)} of {size(self.total_bytes)} free at {self.path}"


@dataclass(frozen=True, slots=True)
class SystemState:
    """What a process could use of its machine when it failed."""

    file_systems: tuple[FileSystem, ...] = ()
    """Those where a write failed and its text names no path; if none is known, first those of the paths in the failure,
    then those of the working folder, TMPDIR and /dev/shm; at most 4."""
    limits: tuple[tuple[str, int], ...] = ()
    """Soft limits of the process, those that it has: ("RLIMIT_AS", 4294967296)."""
    open_files: int | None = None
    """None: unknown."""

    @property
    def full(self) -> tuple[FileSystem, ...]:
        """The file systems without space, or without inodes; that of a path in the failure first."""
        return tuple(found for found in self.file_systems if found.is_full)

    @property
    def memory_limit(self) -> str:
        """The limit of the process's own memory, "RLIMIT_AS"; empty: it has none."""
        return next((name for name, _ in self.limits if name in {"RLIMIT_AS", "RLIMIT_DATA"}), "")


@dataclass(frozen=True, slots=True)
class DocumentRef:
    """The object of a document in the storage."""

    name: str
    """Name of the object within its folder."""
    uri: str = ""
    last_modified_ns: int | None = None
    """When the upload ended, by the storage's clock; often whole seconds."""
    size: int = 0
    """Bytes."""


@dataclass(frozen=True, slots=True)
class WorkerError:
    """One failure of one worker or agent, merged from all documents about it."""

    code: str
    message: str
    kind: Kind
    origin: Origin
    timestamp_ns: int | None = None
    """When it was recorded, nanoseconds since the Unix epoch by the writer's clock; None: unknown."""
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
    """All documents about this failure."""
    in_flight: bool = False
    """Recorded while the exception was inside the task function; no document reports that it left the function."""
    stack_dumps: tuple[StackDump, ...] = ()
    """Of this process, and of others of its node."""
    thread_failures: tuple[ThreadFailure, ...] = ()
    collectives: tuple[CollectiveProgress, ...] = ()
    """One for each process group."""
    caused_by: CausedBy | None = None
    """The peer's failure for which the agent stopped this worker; None: there was none."""
    expired: ExpiredDeadline | None = None
    """The deadline for which the agent killed this worker; None: there was none."""
    system: SystemState = field(default_factory=SystemState)
    newer: bool = False
    """Whether a later version of the format wrote it; what this version doesn't know was left out."""

    @property
    def rank(self) -> int | None:
        """The global rank; None for an agent or a stock file."""
        return self.place.rank

    @property
    def node(self) -> str:
        """The node's name; the host if the document has no name."""
        return self.place.node or self.worker or self.place.host

    @property
    def recoverable(self) -> bool:
        """Whether the document marks the failure as recoverable."""
        return self.kind is Kind.RECOVERABLE

    @property
    def printed(self) -> str:
        """The log's end since the last in-process restart: earlier lines are about faults that are over."""
        return _BEFORE_RESTART.sub("", self.log_tail) if RESTARTED in self.log_tail else self.log_tail

    @property
    def stopped_by_agent(self) -> bool:
        """True if the agent stopped this process before it raised."""
        return bool(self.sent_signals) and self.exception is None

    @property
    def crashed_while_stopped(self) -> bool:
        """True if a signal that its agent didn't send ended it: it crashed while it was being stopped."""
        return bool(self.signal and self.sent_signals) and all(sent.signal != self.signal for sent in self.sent_signals)

    @property
    def is_silent(self) -> bool:
        """True if it isn't known how the process ended: no exception, signal, exit code or message."""
        return self.exception is None and not self.signal and self.exit_code is None and not self.message

    @property
    def what(self) -> str:
        """The failure in one or two words: the exception's short name, "hang", the signal or the exit code."""
        if self.exception is not None:
            return self.exception.type.rsplit(".", 1)[-1]
        if self.expired is not None:
            return "hang"
        if self.signal:
            return self.signal
        if self.exit_code is not None:
            return f"exit code {self.exit_code}"
        if self.writer is not Writer.STOCK:
            return self.code.rsplit(":", 1)[-1] or "error"
        return self.code or "error"


# --- signals and exit codes -------------------------------------------------------------------------------------------

SIGNALS: dict[str, str] = {
    "SIGABRT": "the process aborted (a failed check in native code)",
    "SIGBUS": "crashed with a bus error (often /dev/shm is full)",
    "SIGFPE": "crashed in native code (division by zero or integer overflow)",
    "SIGHUP": "terminated because its terminal or session was closed",
    "SIGILL": "crashed in native code (an instruction that this processor does not have)",
    "SIGINT": "interrupted, as by Ctrl-C",
    "SIGKILL": "killed, sender unknown",
    "SIGPIPE": "wrote to a pipe or socket whose reader was gone",
    "SIGQUIT": "terminated by a request to quit with a core dump",
    "SIGSEGV": "crashed in native code (invalid memory access)",
    "SIGSYS": "made a system call that its sandbox forbids",
    "SIGTERM": "terminated from outside, not by its agent",
    "SIGTRAP": "stopped at a trap in native code (a failed check, or a debugger's breakpoint)",
    "SIGUSR1": "ended by a signal that schedulers send before a time limit",
    "SIGUSR2": "ended by a signal whose meaning depends on its sender",
    "SIGXCPU": "used up its CPU time limit",
    "SIGXFSZ": "wrote a file larger than its limit",
}
"""What happened to a process that a signal ended, if its agent didn't send the signal."""

CRASHES = {"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS"}
"""Signals that the kernel sends for what the process itself did."""
STOPS = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}
"""Signals by which a process is asked to end."""
_SHELL = 128
"""A shell's exit code for a signal is this plus the signal's number."""
_OF_SHELLS = {2: "SIGINT", 6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}

_OF_FAULTHANDLER = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Floating": "SIGFPE",
}
"""By the first words of what faulthandler writes about them."""
_FATAL = re.compile(rf"^Fatal Python error: ({'|'.join(_OF_FAULTHANDLER)})", re.MULTILINE)


def explain_signal(signal: str, resources: Resources) -> str:
    """Return what happened, for a SIGKILL with what the cgroup counted; empty for a signal that isn't in `SIGNALS`."""
    if signal != "SIGKILL":
        return SIGNALS.get(signal, "")
    if resources.oom_kill:
        return "killed by the kernel's OOM killer"
    counted = "no OOM kill counted" if resources.oom_kill == 0 else "OOM kills could not be counted"
    return f"{SIGNALS[signal]}, {counted}"


def explain_end(failure: WorkerError) -> str:
    """Return what happened to a process that raised no exception and that its agent didn't stop.

    Its agent may have killed it for a deadline that it didn't keep.
    """
    if failure.expired is not None:
        return failure.expired.text
    if failure.signal:
        return explain_signal(failure.signal, failure.resources) or f"ended by {failure.signal}"
    signal = get_shell_signal(failure.exit_code)
    return "exited without an exception" + (f" (a shell's exit code for {signal})" if signal else "")


def ended_by(signal: str) -> str:
    """Return a verb for the end by a signal: "crashed with SIGSEGV", "was terminated by SIGTERM"."""
    if signal in CRASHES:
        return f"crashed with {signal}"
    if signal == "SIGABRT":
        return f"aborted ({signal})"
    return f"was {'terminated' if signal in STOPS else 'killed'} by {signal}"


def fatal_error(text: str) -> tuple[str, str]:
    """Return what faulthandler wrote last about a fatal signal, and the signal; empty texts if it wrote nothing."""
    *_, last = (None, *_FATAL.finditer(text))
    return (last[0], _OF_FAULTHANDLER[last[1]]) if last is not None else ("", "")


def get_shell_signal(exit_code: int | None) -> str:
    """Return the signal that a shell reports with this exit code; empty if it reports none with it."""
    return _OF_SHELLS.get(exit_code - _SHELL, "") if exit_code is not None else ""
