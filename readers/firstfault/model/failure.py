"""The failure of a worker or an agent, and the meaning of its category, signal or exit code."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firstfault.utils.text import size
from firstfault.utils.toml import parse_toml

ABOUT_CATEGORIES: dict[str, dict[str, str]] = parse_toml(
    Path(__file__).with_name("categories.toml").read_text(encoding="utf-8")
)
"""All categories, with their properties. The list is closed;
the comments in ``categories.toml`` explain the keys.
"""
CATEGORIES: dict[str, str] = {name: about["meaning"] for name, about in ABOUT_CATEGORIES.items()}
"""The meaning of each category."""


class Kind(str, enum.Enum):
    """flyteidl.core.ContainerError.Kind: whether the engine may run the task again."""

    NON_RECOVERABLE = "NON_RECOVERABLE"
    RECOVERABLE = "RECOVERABLE"


class Origin(str, enum.Enum):
    """flyteidl.core.ExecutionError.ErrorKind:
    a retry uses the user's or the system's retry budget.
    """

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
    """The line and its surrounding lines, without their common indentation;
    empty for frames of libraries.
    """
    context_line: int = 0
    """The line number of the first line in `context`."""
    marked: tuple[int, int] = (0, 0)
    """Start and end (exclusive) of the characters in `code` that Python marks with carets, or (0,
    0) if none are marked.
    """


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
    """The relation to the preceding exception in `causes`: "cause", "context",
    or "suppressed" (by ``from None``).
    """
    frames_omitted: int = 0
    members: tuple[ExceptionInfo, ...] = ()
    """Members of an exception group."""
    text_frames: tuple[FrameInfo, ...] = ()
    """The program's frames in a traceback that is part of the message, with the lines around them.
    """


@dataclass(frozen=True, slots=True)
class Place:
    """A process's position in the job. Ranks are None for processes without one, such as agents."""

    attempt: int = 0
    round: int = 0
    incarnation: int = 0
    """Milliseconds since the Unix epoch when the node's agent started."""
    restart_count: int = 0
    rank: int | None = None
    local_rank: int | None = None
    group_rank: int | None = None
    world_size: int = 0
    """0 if unknown."""
    group_world_size: int = 0
    """Number of nodes in the round; 0 if unknown."""
    role: str = ""
    node: str = ""
    host: str = ""
    ip: str = ""
    pid: int = 0
    namespace: str = ""
    """Kubernetes namespace of the pod; empty if unknown."""
    engine: str = ""
    """The job's engine: "flyte", "flyte2", "plain", "alone" (no engine and no agent) or `OF_LOGS`.
    An empty string means "flyte".
    """
    machine: str = ""
    """Name of the machine; empty if unknown. (`host` is the hostname: in Kubernetes the pod's.)"""
    gpu: str = ""
    """UUID of the process's GPU, "GPU-8f3a..."; empty if unknown or without a GPU."""


@dataclass(frozen=True, slots=True)
class SentSignal:
    """A signal that the agent sent to one of its workers."""

    signal: str
    """`UNSEEN`, or empty if a log reports that its launcher ended it, without the signal."""
    reason: str
    """The agent's reason: free text, or `TERMINATED`."""


UNSEEN = "unknown"
"""The signal of a process if the logs don't contain its end."""
LAST_LINES_OF_SUCCESS = "its last lines report success"
"""The reason if they end with a success."""
OF_LOGS = "log"
"""`Place.engine` of a job that ran without firstfault and is known only from its logs."""

TERMINATED = "its agent was terminated"
"""Why an agent stopped its workers when its pod was terminated. Stored in documents."""

TERMINATED_ALONE = "terminated from outside, perhaps by its launcher"
"""The same for a rank that was started without an agent. Stored in documents."""

TERMINATED_BY = "terminated by"
"""Prefix of the reason that the agent of a terminated pod sends its peers, before the signal.
Stored in documents.
"""

DIED_SILENTLY = "it died"
"""The reason that agents send their peers when an agent was killed. Stored in documents."""

TIME_LIMIT = "USER:TimeLimit"
"""The code of an agent if its pod was terminated because the attempt had reached its time limit."""

RECORDED_ONLY = "SYSTEM:FlightRecorder"
"""The code of a process that is known only by its dump of torch's flight recorder."""

CTRL_C = "USER:CtrlC"
"""The code of a process interrupted by Ctrl-C in a terminal,
as opposed to a SIGINT from another process.
"""
INTERRUPTED = "interrupted"
"""The category of a process that SIGINT ended, or of an agent after its terminal was closed."""
TEARDOWN = "teardown"
"""The category of a failure after the job had finished."""
HANGUP = "USER:Hangup"
"""The code of an agent that got SIGHUP: its terminal was closed."""
CANCELLED = "USER:Cancelled"
"""The code of an agent if somebody cancelled its job, according to the scheduler."""
REQUEUED = "SYSTEM:Requeued"
"""The code of an agent if the scheduler ended the job to run it again."""
PREEMPTED = "SYSTEM:Preempted"
"""The code of an agent if the scheduler preempted the job, which may be in the queue again."""
DIED = "USER:Died"
"""The code of a process if its launcher only reported that it died."""
JOB_END_WORDS = {
    TIME_LIMIT: "time limit",
    CANCELLED: "canceled",
    REQUEUED: "requeued",
    PREEMPTED: "preempted",
}
"""How the scheduler ended the whole job, by the code of its agent."""
JOB_END_CODES = set(JOB_END_WORDS)
"""The codes of an agent if the scheduler ended the whole job."""
FROM_OUTSIDE = {"preemption": "was terminated", INTERRUPTED: "was interrupted"}
"""Categories of an agent that was terminated from outside, each with the verb for a sentence."""

RESTARTED = "in-process restart"
"""Prefix of the line that a rank logs when it continues after a fault;
followed by the restart's number and a colon.
"""
# greedy: everything up to the last restart
_BEFORE_RESTART = re.compile(rf"\A.*\b{RESTARTED} \d+: [^\n]*\n?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StackDump:
    """The stacks of the threads of one process on the writer's node."""

    pid: int
    rank: int | None
    text: str
    """The unmodified output of the stack dumper."""


@dataclass(frozen=True, slots=True)
class ThreadFailure:
    """An exception that ended a thread, but not its process."""

    thread: str
    """The thread's name."""
    timestamp_ns: int | None
    """Nanoseconds since the Unix epoch; None if unknown."""
    exception: ExceptionInfo


@dataclass(frozen=True, slots=True)
class HandledException:
    """An exception that the program handled:
    it may have left its rank out of step with its peers.
    """

    timestamp_ns: int | None
    """Time of the latest occurrence, nanoseconds since the Unix epoch; None if unknown."""
    exception: ExceptionInfo
    """The exception. Its frames begin with the frame that handled it."""
    times: int = 1
    """How often the process handled it, as far as known."""
    calls_since: int | None = None
    """Collectives that the process has called since the latest occurrence; None if unknown."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One entry of torch's flight recorder: a collective, a send or a receive."""

    sequence: int
    """The number in the group; sends and receives are counted separately."""
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
    """Return a process group's description, with its name unless it is the only group
    with this description.
    """
    # torch names the default group "0", which means nothing to a reader
    if description == DEFAULT_GROUP:
        return DEFAULT_GROUP
    return f"{description} ({name})" if description and description != "undefined" else name


@dataclass(frozen=True, slots=True)
class CollectiveProgress:
    """A rank's progress in one process group,
    by the sequence numbers of torch's flight recorder.
    """

    group: str
    """Its `format_group_name`."""
    last_operation: str
    """The last enqueued operation, "allreduce"."""
    enqueued: int
    completed: int | None
    """None if the backend doesn't report it."""
    last: tuple[Collective, ...] = ()
    """The group's last collectives, oldest first."""
    members: tuple[int, ...] = ()
    """Global ranks of the group's members; empty if unknown."""

    @property
    def is_outstanding(self) -> bool:
        """Whether the rank had called a collective that hadn't completed."""
        return self.completed is not None and self.enqueued > self.completed


@dataclass(frozen=True, slots=True)
class CausedBy:
    """The failure that made an agent stop its workers, as reported by a peer."""

    rank: int | None
    node: str
    document: str
    """Name of the document about it; empty if unknown."""


@dataclass(frozen=True, slots=True)
class ExpiredDeadline:
    """A watchdog deadline that a worker missed, so that its agent killed it."""

    scope: str
    """The program's name for the block; empty for a heartbeat,
    and if the job as a whole made no progress.
    """
    seconds: float
    """The deadline, or the longest time between two pings."""
    heartbeat: bool = False
    """Whether the deadline was a heartbeat between two pings, not for one block."""
    since: str = ""
    """The line that entered the block or sent the last ping, "train.py:50"; empty if unknown."""

    @property
    def text(self) -> str:
        """What happened: '"train step" exceeded 30 s', "no ping for 60 s",
        "no progress for 300 s".
        """
        if self.scope and not self.heartbeat:
            return f'"{self.scope}" exceeded {self.seconds:g} s'
        return f"no {'ping' if self.heartbeat else 'progress'} for {self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class Resources:
    """Figures of the node's cgroup; None for figures that could not be read."""

    oom_kill: int | None = None
    """Processes that the kernel's OOM killer has killed since the node's recorder started."""
    memory_peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory_used_bytes: int | None = None
    watermark_ns: int | None = None
    """Time of the highest usage, nanoseconds since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """The space that a process without root privileges can use in a file system."""

    path: str
    """A path in the file system; with the suffix " (quota)" if a quota is used up there."""
    free_bytes: int
    total_bytes: int
    free_inodes: int = 0
    total_inodes: int = 0
    """0 if the file system doesn't count them."""

    @property
    def is_full(self) -> bool:
        """Whether less than 1 MiB and less than 0.1 % of the bytes are left, or no inode."""
        # not 0: a write may fail while a few bytes are still free
        little = self.free_bytes < min(1 << 20, max(self.total_bytes // 1000, 1))
        return (self.total_bytes > 0 and little) or (
            self.total_inodes > 0 and self.free_inodes == 0
        )

    @property
    def text(self) -> str:
        """The free space as a phrase: "0 B of 2.0 MiB free at /ckpt"."""
        if self.total_inodes and not self.free_inodes:
            return f"no inode free at {self.path}"
        return f"{size(self.free_bytes)} of {size(self.total_bytes)} free at {self.path}"


@dataclass(frozen=True, slots=True)
class SystemState:
    """Disk space and limits of a process when it failed."""

    file_systems: tuple[FileSystem, ...] = ()
    """At most 4. If a write failed without a path in its error, those of the files being written;
    otherwise, or if none is known, of paths in the failure, then of the working folder, TMPDIR and
    /dev/shm.
    """
    limits: tuple[tuple[str, int], ...] = ()
    """Soft limits of the process, without unlimited ones: ("RLIMIT_AS", 4294967296)."""
    open_files: int | None = None
    """None if unknown."""

    @property
    def full(self) -> tuple[FileSystem, ...]:
        """The full file systems; a file system of a path in the failure comes first."""
        return tuple(file_system for file_system in self.file_systems if file_system.is_full)

    @property
    def memory_limit(self) -> str:
        """The name of the process's memory limit, "RLIMIT_AS", or empty if memory is unlimited."""
        return next((name for name, _ in self.limits if name in {"RLIMIT_AS", "RLIMIT_DATA"}), "")


@dataclass(frozen=True, slots=True)
class DocumentRef:
    """A document's object in the storage."""

    name: str
    """Name of the object within its folder."""
    uri: str = ""
    last_modified_ns: int | None = None
    """End of the upload by the storage's clock, nanoseconds since the Unix epoch;
    often whole seconds.
    """
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
    """Time of the record, nanoseconds since the Unix epoch on the writer's clock; None if unknown.
    """
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
    """Whether the exception was still inside the task function;
    no document reports that it left the function.
    """
    stack_dumps: tuple[StackDump, ...] = ()
    """Stacks of this process and of further processes on its node."""
    thread_failures: tuple[ThreadFailure, ...] = ()
    handled_exceptions: tuple[HandledException, ...] = ()
    """The last ones, the last one last."""
    collectives: tuple[CollectiveProgress, ...] = ()
    """One for each process group."""
    caused_by: CausedBy | None = None
    """The peer's failure that made the agent stop this worker, or None if no peer's failure did."""
    expired: ExpiredDeadline | None = None
    """The missed deadline that made the agent kill this worker, or None if none was missed."""
    system: SystemState = field(default_factory=SystemState)
    newer: bool = False
    """Whether it was written in a later version of the format; unknown fields were dropped."""

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
        """The end of the log since the last in-process restart:
        earlier lines are about survived faults.
        """
        return (
            _BEFORE_RESTART.sub("", self.log_tail) if RESTARTED in self.log_tail else self.log_tail
        )

    @property
    def stopped_by_agent(self) -> bool:
        """True if the agent stopped this process and it raised no exception."""
        return bool(self.sent_signals) and self.exception is None

    @property
    def has_unseen_end(self) -> bool:
        """True if a log has lines of this process, or of its peers,
        and doesn't show how it ended.
        """
        return self.stopped_by_agent and self.sent_signals[0].signal == UNSEEN

    @property
    def crashed_while_stopped(self) -> bool:
        """True if it died by a signal that the agent didn't send:
        it crashed while the agent was stopping it.
        """
        return bool(self.signal and self.sent_signals) and all(
            sent.signal != self.signal for sent in self.sent_signals
        )

    @property
    def is_silent(self) -> bool:
        """True if nothing is known about the end: no exception, signal, exit code or message."""
        return (
            self.exception is None
            and not self.signal
            and self.exit_code is None
            and not self.message
        )

    @property
    def what(self) -> str:
        """The failure in one or two words: the exception's short name, "hang",
        the signal or the exit code.
        """
        # the most specific evidence first: a process that raised also has an exit code
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


# --- signals and exit codes -----------------------------------------------------------------------

_ABOUT_SIGNALS = parse_toml(Path(__file__).with_name("signals.toml").read_text(encoding="utf-8"))
SIGNALS: dict[str, str] = {name: about["meaning"] for name, about in _ABOUT_SIGNALS.items()}
"""What happened to a process that died by a signal which its agent didn't send."""


def _invert(key: str) -> dict[Any, str]:
    """Return the signals by what ``signals.toml`` has about them under a key."""
    return {about[key]: name for name, about in _ABOUT_SIGNALS.items() if key in about}


CRASHES = {name for name, about in _ABOUT_SIGNALS.items() if about.get("kind") == "crash"}
"""Signals that the kernel sends because of the process's own instructions or system calls."""
STOPS = {name for name, about in _ABOUT_SIGNALS.items() if about.get("kind") == "stop"}
"""Signals that ask a process to exit."""
SIGNALS_BY_DESCRIPTION = _invert("strsignal")
"""Signals by the descriptions that C's strsignal returns and shells print."""
_SHELL_SIGNAL_OFFSET = 128
"""Offset of a shell's exit codes for signals: 128 + 9 is SIGKILL."""
_SIGNALS_BY_SHELL_NUMBER = _invert("shell_number")
_SIGNALS_BY_FAULTHANDLER_TEXT = _invert("faulthandler")
_FATAL = re.compile(
    rf"^Fatal Python error: ({'|'.join(_SIGNALS_BY_FAULTHANDLER_TEXT)})", re.MULTILINE
)


def explain_signal(signal: str, resources: Resources) -> str:
    """Explain the death by a signal, for SIGKILL with the cgroup's count of OOM kills;
    empty if not in `SIGNALS`.
    """
    if signal != "SIGKILL":
        return SIGNALS.get(signal, "")
    if resources.oom_kill:
        return "out of memory, killed by the kernel's OOM killer"
    # None means that the cgroup could not be read: that rules nothing out
    counted = "no OOM kill counted" if resources.oom_kill == 0 else "OOM kills could not be counted"
    return f"{SIGNALS[signal]}, {counted}"


def explain_end(failure: WorkerError) -> str:
    """Explain the end of a process that raised no exception and wasn't stopped because of a peer.

    Its agent may have killed it for a missed deadline.
    """
    if failure.expired is not None:
        return failure.expired.text
    if failure.signal:
        explained = (
            explain_signal(failure.signal, failure.resources) or f"ended by {failure.signal}"
        )
        return _without_agent(explained) if failure.place.engine == OF_LOGS else explained
    # `sh -c "python train.py"`: the shell, not Python, is the agent's child, and turns the signal
    # into an exit code
    signal = get_shell_signal(failure.exit_code)
    # a log may have its exception in a line that names no process
    is_of_log = failure.place.engine == OF_LOGS
    end = "exited, for an unknown reason" if is_of_log else "exited without an exception"
    return end + (f" (a shell's exit code for {signal})" if signal else "")


def _without_agent(explained: str) -> str:
    """Return an explanation without facts that only the process's agent can have."""
    return explained.replace(
        "terminated from outside, not by its agent", "terminated, sender unknown"
    )


def ended_by(signal: str) -> str:
    """Return a verb phrase for the death by a signal: "crashed with SIGSEGV",
    "was terminated by SIGTERM".
    """
    if signal in CRASHES:
        return f"crashed with {signal}"
    if signal == "SIGABRT":
        return f"aborted ({signal})"
    return f"was {'terminated' if signal in STOPS else 'killed'} by {signal}"


def fatal_error(text: str) -> tuple[str, str]:
    """Return faulthandler's last message about a fatal signal, and the signal;
    two empty strings if there is none.
    """
    # a fatal error ends its process, so an earlier message in the log is from another process
    *_, last = (None, *_FATAL.finditer(text))
    return (last[0], _SIGNALS_BY_FAULTHANDLER_TEXT[last[1]]) if last is not None else ("", "")


def get_shell_signal(exit_code: int | None) -> str:
    """Return the signal in a shell's exit code (137 is SIGKILL);
    empty for an exit code without one.
    """
    return (
        _SIGNALS_BY_SHELL_NUMBER.get(exit_code - _SHELL_SIGNAL_OFFSET, "")
        if exit_code is not None
        else ""
    )
