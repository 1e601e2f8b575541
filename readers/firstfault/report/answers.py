"""What a report tells first: the five answers, the facts about the root cause, and what ran.

The answers are what failed, where, whether it is retried, what to do, and what is not known.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from firstfault.evidence.texts import is_unexplained_write, message_of
from firstfault.exceptions.stack_position import Stood, frames_of_crash, where_it_stood
from firstfault.exceptions.stderr import exception_of
from firstfault.exceptions.tracebacks import is_library, own_frames, place_of
from firstfault.layout import execution_of
from firstfault.model import CATEGORIES, Decision, JobErrors, Origin, Scope, Subject, Verdict, WorkerError
from firstfault.model.failure import CTRL_C, FROM_OUTSIDE, explain_signal
from firstfault.model.job import NodeSetup, Progress
from firstfault.report import words
from firstfault.report.cascade import Cascade, world_size
from firstfault.utils.text import counted, duration, one_line, size
from firstfault.wire.json_schemas import format_timestamp

_FEW = 5
_LINE = 200
_NOWHERE = "not known: its document names no rank and no node"
_RANKS = 60
"""Characters."""
_AT_ONCE_NS = 10_000_000_000
"""Kubernetes terminates the pods of a deleted job within seconds; their clocks may differ too."""
_LOGS = 4
"""Nodes whose logs are named if the root cause is not known."""
_OF_MACHINES = {"signal", "gpu_hardware", "host_oom", "node_lost"}
"""Categories whose cause may be the machine."""
_WITH_EVENTS = {"node_lost", *FROM_OUTSIDE, "host_oom", "infrastructure"}
"""Categories whose cause the platform's events show better than the log."""
_UNDETERMINED_ADVICE = "compare the stacks and the last log lines of all ranks"
_FROM_OUTSIDE = {"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"}
_COUNTS = {"RLIMIT_NOFILE", "RLIMIT_NPROC"}
"""Limits that are not sizes."""
_MS = 1_000_000
_NS = 1_000_000_000
_FIRST_NS = 1_577_836_800 * _NS
"""The year 2020: no job started before."""
_LONGEST_NS = 4_102_444_800 * _NS
"""The year 2100."""
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


@dataclass(frozen=True, slots=True)
class Step:
    """Something to do next."""

    text: str
    command: str = ""
    """A shell command; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The beginning of every report, in this order."""

    what: str
    """One line: "ValueError: bad sample"."""
    fault_owner: words.FaultOwner
    category: str
    """With its meaning: "user_code: an exception of ..."."""
    where: str
    """One line: "rank 3 (local_rank 1) on worker-1"."""
    code: str
    """"train.py:41 in step"; empty if not known."""
    source: str
    """The line of code there; empty if it could not be read."""
    fate: str
    """Follows "it": "will be retried", "was retried: attempt 1 succeeded"."""
    fate_reason: str
    steps: tuple[Step, ...]
    unknown: tuple[str, ...]
    """Sentences, the most important first; empty if everything is known."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a report is about."""

    job: JobErrors
    verdict: Verdict
    decision: Decision
    cascade: Cascade
    engine: words.EngineWords
    """The words for what ran the job."""
    uri: str
    """Of the attempt's documents; empty: not known."""
    logs: Mapping[str, str]
    """Local log files by node; they replace the engine's commands."""

    @property
    def is_alone(self) -> bool:
        """Whether there is only one document, and it names no rank and no node: it is known what failed, not where."""
        return self.verdict.scope is Scope.UNDETERMINED and len(self.job.failures) == 1 and self.verdict.node is None


def answers_on(case: Case) -> Answers:
    """Return the answers."""
    job, verdict = case.job, case.verdict
    code, source = _code(job, verdict)
    meaning = CATEGORIES.get(verdict.category)
    return Answers(
        what=_what(verdict),
        fault_owner=_fault_owner(case),
        category=f"{verdict.category}: {meaning}" if meaning else verdict.category,
        where=_NOWHERE if case.is_alone else _where(job, verdict, case.engine),
        code=code,
        source=source,
        fate=case.engine.fate(case.decision),
        fate_reason=case.decision.reason,
        steps=tuple(_steps(case, code)),
        unknown=tuple(_unknown(case)),
    )


def _fault_owner(case: Case) -> words.FaultOwner:
    verdict = case.verdict
    # a person may have aborted a job whose nodes were all terminated
    if verdict.scope is Scope.UNDETERMINED or (verdict.category == "preemption" and _terminated(case.job).are_all):
        return words.FaultOwner.UNKNOWN
    root = verdict.root
    if root is not None and root.recoverable and root.origin is not Origin.SYSTEM:
        return words.FaultOwner.TRANSIENT
    if verdict.category == "storage" and root is not None and is_unexplained_write(root):
        return words.FaultOwner.EITHER
    return words.words_on(verdict.category, case.engine)[0]


# --- what and where ---------------------------------------------------------------------------------------------------


def _what(verdict: Verdict) -> str:
    if verdict.scope is Scope.UNDETERMINED:
        return verdict.headline
    name, text = words.fault_of(verdict)
    text = one_line(text, _LINE)
    if verdict.category == "hang" and len(verdict.ranks) == 1 and text.startswith("it was"):
        text = text.replace("it was", f"rank {verdict.ranks[0]} was", 1)
    return f"{name}: {text}" if text else name


def _where(job: JobErrors, verdict: Verdict, engine: words.EngineWords) -> str:
    if verdict.category in FROM_OUTSIDE and (terminated := _terminated(job)).are_all:
        return f"all {terminated.count} {engine.nodes}, the first {verdict.node}"
    if verdict.scope is Scope.UNDETERMINED:
        suspects = [suspect.name for suspect in verdict.suspects]
        if suspects:
            return f"one of: {', '.join(words.few(suspects, _FEW))}".replace(", and ", " and ")
        return f"on {verdict.node}, rank not known" if verdict.node else "no rank stands out"
    on = f" on {verdict.node}" if verdict.node else ""
    if (machine := machine_of(job, verdict)) and len(verdict.ranks) <= 1:
        on += f" ({machine})"
    if len(verdict.ranks) > 1:
        return f"{len(verdict.ranks)} ranks ({words.ranks_text(verdict.ranks, 60)}), the first{on}"
    if not verdict.ranks:
        is_agent = verdict.root is not None and verdict.root.subject is Subject.AGENT
        return f"the agent{on}" if is_agent and verdict.scope is not Scope.EXTERNAL else on[4:] or "not known"
    local = verdict.root.place.local_rank if verdict.root is not None else None
    return f"rank {verdict.ranks[0]}{'' if local is None else f' (local_rank {local})'}{on}"


def _code(job: JobErrors, verdict: Verdict) -> tuple[str, str]:
    """Return the root cause's place in the program and its line; if undetermined, the place that all failures share."""
    if verdict.root is not None:
        return _code_of(verdict.root, verdict.headline)
    if verdict.scope is not Scope.UNDETERMINED:
        return "", ""  # a node is at no place in the program
    places = {_code_of(failure) for failure in job.failures}
    return places.pop() if len(places) == 1 else ("", "")


def _code_of(failure: WorkerError, headline: str = "") -> tuple[str, str]:
    """Return the place of the exception, or of the thread that crashed or is told of, else the main thread's."""
    threads = (thread for thread in failure.thread_failures if f"thread {thread.thread!r} ended" in headline)
    exception = exception_of(failure) or next((thread.exception for thread in threads), None)
    frames = own_frames(exception) if exception is not None else ()
    crashed = frames_of_crash(failure)
    frames = frames or (*crashed[:1], *(frame for frame in crashed[::-1] if not is_library(frame.file)))
    return (place_of(frames[-1]), frames[-1].code) if frames else (where_it_stood(failure).frame, "")


# --- what next --------------------------------------------------------------------------------------------------------


def _steps(case: Case, code: str) -> Iterator[Step]:
    job, verdict, engine = case.job, case.verdict, case.engine
    advice = _advice(case, code)
    yield Step(f"{advice}{'' if advice.endswith(' at') else ':'} {code}" if code else advice)
    # the pods of a job share their namespace
    places = [*([verdict.root.place] if verdict.root is not None else []), *job.places]
    namespace = next((place.namespace for place in places if place.namespace), "")
    machine = machine_of(job, verdict) if verdict.category in _OF_MACHINES else ""
    if command := engine.kubectl("describe node {}", machine):
        yield Step("its machine's events", command)
    # the root cause's node, else the suspects', else those that failed
    named = [verdict.node] if verdict.node else [suspect.node for suspect in verdict.suspects]
    nodes = dict.fromkeys(named or [failure.node for failure in job.failures])
    for node in [node for node in nodes if node][:_LOGS]:
        if node in case.logs:
            yield Step(engine.log, f"less {shlex.quote(case.logs[node])}")
        elif log := engine.kubectl("logs {}", node, namespace):
            if verdict.category in _WITH_EVENTS:
                events = "get events --field-selector involvedObject.name={}"
                yield Step(engine.events, engine.kubectl(events, node, namespace))
            yield Step(engine.log, log)
    if case.uri:
        yield Step("more", f"firstfault show {shlex.quote(case.uri)}")


def _advice(case: Case, code: str) -> str:
    verdict, root = case.verdict, case.verdict.root
    _, advice = words.words_on(verdict.category, case.engine)
    if verdict.is_at_time_limit:
        return "raise the time limit, or continue from a checkpoint"
    if verdict.code == CTRL_C:
        return "continue from a checkpoint, if it should run on"
    if case.is_alone:
        return f"read the text below: {advice}"
    if verdict.scope is Scope.UNDETERMINED:
        return f"{_UNDETERMINED_ADVICE}; all were at" if code else "; ".join([_UNDETERMINED_ADVICE, *_stood(case.job)])
    if root is not None and where_it_stood(root).returned:
        return "find out why it made fewer steps than the others, such as fewer batches or an early return"
    if verdict.category == "hang" and not code:
        return "it did not answer: look at its node, its GPU and the storage that it reads from"
    if root is not None and root.signal == "SIGKILL" and verdict.category == "signal":
        return "see what kills processes on its node: the node's events and the kernel's log"
    return advice


def _stood(job: JobErrors) -> list[str]:
    """Return where ranks stood outside of collectives: "rank 0 was at train.py:12 in load"."""
    stood = ((failure.rank, where_it_stood(failure)) for failure in job.failures if failure.rank is not None)
    away = [(rank, where.doing) for rank, where in stood if where.stood is Stood.ELSEWHERE and where.frame]
    return words.few([f"rank {rank} {doing.removeprefix('it ')}" for rank, doing in sorted(away)], _LOGS)


def machine_of(job: JobErrors, verdict: Verdict) -> str:
    """Return the machine of the verdict's node, from its process or from any entry of that node; empty: not known."""
    if verdict.root is not None and verdict.root.place.machine:
        return verdict.root.place.machine
    return next((place.machine for place in reversed(job.places) if place.node == verdict.node and place.machine), "")


# --- what is unknown --------------------------------------------------------------------------------------------------


def _unknown(case: Case) -> Iterator[str]:
    verdict, cascade, engine = case.verdict, case.cascade, case.engine
    if verdict.scope is Scope.UNDETERMINED and len(case.job.failures) == 1:
        yield "where it failed: its document names no rank and no node"
    elif verdict.scope is Scope.UNDETERMINED:
        yield "which rank failed first: none stands out from the others"
    elif verdict.confidence != "high":
        yield "whether this failure came first: the lines on why speak for it, but do not prove it"
    suspects = [f"whether {suspect.name} failed first: {suspect.why}" for suspect in verdict.suspects]
    yield from words.few(suspects, _FEW, "and {} more suspects")
    if not verdict.settled:
        yield f"what the other {engine.nodes} report: waiting for them timed out"
    yield from _unknown_of_nodes(verdict, engine)
    if missing := [item.rank for item in cascade.ranks if item.state is words.State.UNREPORTED]:
        ranks = f"{'rank' if len(missing) == 1 else 'ranks'} {words.ranks_text(missing, _RANKS)}"
        yield f"what happened to {ranks}: no report"
    if verdict.scope is not Scope.UNDETERMINED:
        yield from _unknown_of_root(case)
    if engine.cites and (
        unknown := [item.rank for item in case.job.failures if item.is_silent or item.stopped_by_agent]
    ):
        ranks = words.ranks_text(sorted(rank for rank in unknown if rank is not None), _RANKS)
        which = f"rank {ranks}" if len(unknown) == 1 else f"ranks {ranks}"
        yield f"from a log alone, where {which} stood: firstfault in the job would have recorded it"
    unclear = {event.failure.node for event in cascade.events if event.bounds is None and event.at_ns is not None}
    if unclear:
        yield f"the order of failures on {counted(len(unclear), engine.node)}: clocks could not be compared"


def _unknown_of_nodes(verdict: Verdict, engine: words.EngineWords) -> Iterator[str]:
    coverage = verdict.coverage
    if coverage.unreadable:
        yield f"what is in {counted(coverage.unreadable, 'document')} that could not be read"
    yield from coverage.notes
    if coverage.expected is None:
        yield f"how many {engine.nodes} took part: no document says it"
    elif coverage.expected > coverage.reported and not coverage.notes:
        missing = coverage.expected - coverage.reported
        yield f"what happened on {missing} of {coverage.expected} {engine.nodes}: no report"


def _unknown_of_root(case: Case) -> Iterator[str]:
    """Yield what is not known about this kind of fault, even if the root cause is certain."""
    verdict, root, engine = case.verdict, case.verdict.root, case.engine
    if verdict.category == "hang" and (root is None or root.expired is None):
        yield "when the hang began: no process recorded it"
    elif verdict.timestamp_ns is None:
        yield "when the root cause happened: no time was recorded"
    is_of_a_node = verdict.scope in {Scope.NODE, Scope.EXTERNAL} and verdict.node
    # without pods a node is a machine
    if is_of_a_node and engine.has_kubectl and not machine_of(case.job, verdict):
        yield f"on which machine {verdict.node} ran: its {engine.node} has no NODE_NAME"
    if verdict.category == "node_lost":
        yield "why the node or its agent is gone: it left no report"
    if verdict.category == "preemption" and not verdict.is_at_time_limit:
        yield _why_terminated(case.job, engine)
    if verdict.category == "interrupted" and verdict.scope is Scope.EXTERNAL and verdict.code != CTRL_C:
        yield "what sent SIGINT: its launcher was not in the foreground of a terminal"
    if root is not None:
        yield from _unknown_of_exit(root)


@dataclass(frozen=True, slots=True)
class _Terminated:
    """How many of a job's nodes were terminated from outside."""

    count: int
    expected: int | None
    at_once: bool

    @property
    def are_all(self) -> bool:
        return self.count > 1 and self.count == self.expected


def _terminated(job: JobErrors) -> _Terminated:
    agents = [item for item in job.failures if item.subject is Subject.AGENT and item.category in FROM_OUTSIDE]
    times = [item.timestamp_ns for item in agents]
    known = [time for time in times if time is not None]
    at_once = bool(known) and len(known) == len(times) and max(known) - min(known) <= _AT_ONCE_NS
    return _Terminated(len({(item.node, item.place.group_rank) for item in agents}), job.coverage.expected, at_once)


def _why_terminated(job: JobErrors, engine: words.EngineWords) -> str:
    """Return what may have terminated a node, by how many of the job's nodes were terminated, and when.

    From inside, an abort, a time limit, a drain and an eviction are the same signal.
    """
    found = _terminated(job)
    if found.are_all:
        when = "at once, as by an abort or a time limit" if found.at_once else "but not at once"
        return (
            f"who ended the job: all {found.count} {engine.nodes} were terminated{' ' if found.at_once else ', '}{when}"
        )
    if found.expected is None or found.expected == 1 or not found.count:
        return "why it was terminated: a preemption, a drain, an eviction, an abort, or a time limit"
    one = f"{found.count} of {found.expected} {engine.nodes} {'was' if found.count == 1 else 'were'} terminated"
    return f"why it was terminated: {one}, which suggests a preemption, a drain or an eviction, not an abort"


def _unknown_of_exit(root: WorkerError) -> Iterator[str]:
    if message_of(root).text or root.sent_signals or root.subject is Subject.AGENT or root.expired is not None:
        return
    is_oom = root.signal == "SIGKILL" and root.resources.oom_kill
    if root.signal in _FROM_OUTSIDE and not is_oom:
        no_oom = ", and no OOM kill was counted" if root.signal == "SIGKILL" and root.resources.oom_kill == 0 else ""
        yield f"which process sent {root.signal}: not its agent{no_oom}"
    elif not root.signal and root.exit_code is not None:
        yield "why it exited: it raised no exception"


# --- facts about the root cause ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that is known: "exit code", "-9 (SIGKILL)"."""

    name: str
    value: str
    lines: tuple[str, ...] = ()
    """What stands below it: the victims one by one."""

    @property
    def line(self) -> str:
        """Both: "exit code: -9"."""
        return f"{self.name}: {self.value}"


def facts_of(case: Case) -> Iterator[Fact]:
    """Yield the facts about the root cause: its place, its end, its time, and what the machine counted."""
    verdict, root, engine = case.verdict, case.verdict.root, case.engine
    when = "not recorded"
    if verdict.timestamp_ns is not None:
        when = words.shown_time(verdict.timestamp_ns)
    elif any(event.failure.timestamp_ns is not None for event in case.cascade.events):
        when = "not known: no process recorded when it began" if verdict.category == "hang" else "not known"
    if root is None:
        found = ((engine.node, verdict.node), ("machine", machine_of(case.job, verdict)), ("time", when))
        yield from (Fact(name, value) for name, value in found if value)
        return
    yield from _place_facts(root, engine)
    if engine.cites and root.documents:
        yield Fact("lines", ", ".join(document.name for document in root.documents))
    yield from _end_facts(root)
    yield Fact("time", when)
    if root.place.restart_count:
        yield Fact("restarts before", str(root.place.restart_count))
    if root.expired is not None:
        since = "last ping" if root.expired.heartbeat else "begun"
        at = f"; {since} at {root.expired.since}" if root.expired.since else ""
        yield Fact("deadline", f"{root.expired.text}{at}")
    if (cause := root.caused_by) is not None:
        rank = f"rank {cause.rank}" if cause.rank is not None else ""
        yield Fact("stopped after a failure of", " on ".join(filter(None, [rank, cause.node])) or "another node")
    yield from _counted_facts(root)


def _place_facts(root: WorkerError, engine: words.EngineWords) -> Iterator[Fact]:
    place = root.place
    if place.rank is not None:
        yield Fact("rank", f"{place.rank}{'' if place.local_rank is None else f' (local_rank {place.local_rank})'}")
    if root.node:
        yield Fact(engine.node, root.node)
    if place.machine and place.machine != root.node:
        yield Fact("machine", place.machine)
    elif place.host and place.host != root.node:
        yield Fact("host", place.host)
    if place.gpu:
        yield Fact("gpu", place.gpu)


def _end_facts(root: WorkerError) -> Iterator[Fact]:
    if root.exit_code is not None and not root.stopped_by_agent:
        yield Fact("exit code", str(root.exit_code))
    by_agent = next((sent for sent in root.sent_signals if sent.signal == root.signal), None)
    if by_agent is not None:
        yield Fact("signal", f"{root.signal}, sent by its agent: {by_agent.reason}")
    elif root.signal and root.expired is not None:
        yield Fact("signal", f"{root.signal}, sent by its agent for a deadline")
    elif root.signal:
        explained = explain_signal(root.signal, root.resources)
        yield Fact("signal", f"{root.signal}: {explained}" if explained else root.signal)


def _counted_facts(root: WorkerError) -> Iterator[Fact]:
    """Yield what was counted where the root cause was: dead threads, memory, disk, limits, collectives."""
    threads = []
    for failure in root.thread_failures:
        text = one_line(failure.exception.message)
        threads.append(
            f"{failure.thread} ended by {failure.exception.type.rsplit('.', 1)[-1]}" + (f": {text}" if text else "")
        )
    yield from (Fact("thread", text) for text in words.few(threads, _FEW))
    disks = [disk.text for disk in root.system.full or root.system.file_systems]
    limits = [
        f"{root.system.open_files} of {limit} files open"
        if name == "RLIMIT_NOFILE" and root.system.open_files is not None
        else f"{name} {limit if name in _COUNTS else size(limit)}"
        for name, limit in root.system.limits
    ]
    for name, texts in (("memory", list(_memory(root))), ("disk", disks), ("limits", limits)):
        if texts:
            yield Fact(name, ", ".join(texts))
    collectives = []
    for progress in root.collectives:
        number = f"{progress.last_operation} #{progress.enqueued}".lstrip()
        completed = f", {progress.completed} completed" if progress.completed is not None else ""
        collectives.append(f"{number}{completed} (group {progress.group})")
    yield from (Fact("last collective", text) for text in words.few(collectives, _FEW))


def _memory(root: WorkerError) -> Iterator[str]:
    found = root.resources
    limit = f" of {size(found.memory_limit_bytes)}" if found.memory_limit_bytes is not None else ""
    if found.memory_peak_bytes is not None:
        yield f"peak {size(found.memory_peak_bytes)}{limit}"
    if found.memory_used_bytes is not None:
        yield f"in use {size(found.memory_used_bytes)}" + ("" if found.memory_peak_bytes is not None else limit)
    elif found.memory_peak_bytes is None and limit:
        yield f"limit {size(found.memory_limit_bytes or 0)}"
    if found.oom_kill is not None:
        yield f"{counted(found.oom_kill, 'OOM kill')} counted" if found.oom_kill else "no OOM kill counted"


def raw_facts(verdict: Verdict) -> Iterator[Fact]:
    """Yield what few people need: process ids, exact times, digests."""
    found = [("time", format_timestamp(verdict.timestamp_ns))]
    if (root := verdict.root) is not None:
        found += [("pid", str(root.place.pid or "")), ("address", root.place.ip)]
        found += [("boot id", root.boot_id), ("round", str(root.place.round))]
    found += [("fingerprint", verdict.fingerprint), ("rule", verdict.rule), ("documents", str(verdict.document_count))]
    yield from (Fact(name, value) for name, value in found if value)


# --- what ran ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """What ran, on what, and for how long. Empty, 0 or None: not known."""

    task: str = ""
    """Its full name."""
    execution: str = ""
    """Name of Flyte's execution."""
    image: str = ""
    started_ns: int | None = None
    """When its first agent started, nanoseconds since the Unix epoch."""
    seconds: float | None = None
    """From then to the root cause, or to the last failure if the root cause has no time."""
    progress: Progress = field(default_factory=Progress)
    """Of the last round."""
    ranks: int = 0
    nodes: int = 0
    gpu_model: str = ""
    gpus: int = 0
    """Of the nodes that say it."""
    all_gpus: bool = False
    """Whether every node says it."""
    versions: tuple[tuple[str, str], ...] = ()
    """Of packages."""
    source_url: str = ""
    """Where its source code can be read: "https://github.com/org/repo/blob/<commit>"."""
    source_root: str = ""
    """The folder that this address stands for."""

    @property
    def commit(self) -> str:
        """The commit of its source code; empty if the address names none."""
        found = _COMMIT.search(self.source_url)
        return found[0] if found else ""

    def _size(self, engine: words.EngineWords) -> str:
        ranks = counted(self.ranks, "rank") if self.ranks else ""
        return " on ".join(filter(None, [ranks, counted(self.nodes, engine.node) if self.nodes else ""]))

    @property
    def _after(self) -> str:
        return f"failed after {duration(int(self.seconds * _NS))}" if self.seconds is not None else ""

    @property
    def trained(self) -> str:
        """Return how far the last round came: "40,312 collectives, 3 h of training"; empty if it is not known."""
        calls, seconds = self.progress.collectives, self.progress.seconds
        return f"{calls:,} collectives, {duration(int(seconds * _NS))} of training" if calls else ""

    def brief(self, engine: words.EngineWords) -> str:
        """Return what ran in few words; the rest is the same for every attempt of it."""
        gpus = f"{self.gpus} {self.gpu_model}" if self.gpus else ""
        parts = (self.task or self.execution, self._size(engine), gpus, self._after, self.trained)
        return ", ".join(filter(None, parts))

    def parts(self, engine: words.EngineWords) -> tuple[str, ...]:
        """Return what is known, in the order in which a person asks for it."""
        start = f"started {words.shown_time(self.started_ns)[:19]} UTC" if self.started_ns is not None else ""
        parts = (
            self.task,
            f"execution {self.execution}" if self.execution else "",
            self.image,
            f"commit {self.commit[:7]}" if self.commit else "",
            ", ".join(filter(None, [start, self._after])),
            self._size(engine),
            ": ".join(filter(None, [counted(self.gpus, "GPU") if self.gpus and self.all_gpus else "", self.gpu_model])),
            ", ".join(f"{name} {version}" for name, version in self.versions),
        )
        return tuple(filter(None, parts))


def identity_of(case: Case) -> JobIdentity:
    """Return what ran, as far as the documents and the output prefix tell."""
    job, verdict, places = case.job, case.verdict, case.job.places
    times = [failure.timestamp_ns for failure in job.failures if failure.timestamp_ns is not None]
    ended_ns = verdict.timestamp_ns if verdict.timestamp_ns is not None else max(times, default=None)
    # a clock that was not set yet, or a damaged entry, is not a start
    longest = _LONGEST_NS if ended_ns is None else min(ended_ns, _LONGEST_NS)
    started = [start for place in places if _FIRST_NS < (start := place.incarnation * _MS) <= longest]
    started_ns = min(started, default=None)
    took_ns = ended_ns - started_ns if started_ns is not None and ended_ns is not None else -1
    setups = {entry.place.node: entry.setup for entry in job.roster if entry.setup != NodeSetup()}
    first = next(iter(setups.values()), NodeSetup())
    versions = verdict.root.versions if verdict.root is not None else ()
    hosts = len({place.node for place in places})
    return JobIdentity(
        task=first.task,
        execution=execution_of(case.uri) or "",
        image=first.image,
        started_ns=started_ns,
        seconds=took_ns / _NS if took_ns >= 0 else None,
        progress=job.progress,
        ranks=world_size(job) or len({rank for entry in job.roster for rank in entry.ranks}),
        nodes=hosts if case.engine.reporter else verdict.coverage.expected or len(case.cascade.nodes),
        gpu_model=next((setup.gpu_model for setup in setups.values() if setup.gpus), ""),
        gpus=sum(setup.gpus for setup in setups.values()),
        all_gpus=len(setups) == verdict.coverage.expected,
        versions=versions or next((failure.versions for failure in job.failures if failure.versions), ()),
        source_url=first.source_url,
        source_root=first.source_root,
    )
