"""Everything that a report says, as data: the five answers and their evidence. Message, page and terminal draw it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.evidence.clocks import Interval
from firstfault.evidence.diagnosis import diagnose
from firstfault.layout.paths import attempt_of, execution_of
from firstfault.model import NodeSetup, Scope, Subject
from firstfault.model.signal_meanings import explain_signal
from firstfault.report.answers import answers_on, machine_of
from firstfault.report.attempt_changes import changes_between
from firstfault.report.cascade import cascade_of, world_size
from firstfault.report.engine_words import FLYTE, EngineWords, engine_of
from firstfault.report.events import later_text
from firstfault.report.redaction import redacted
from firstfault.report.words import State, counted, duration, shown_time, size
from firstfault.text import one_line
from firstfault.wire.verdict_json import format_timestamp

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from firstfault.evidence.clocks import Clocks
    from firstfault.evidence.diagnosis import Diagnosis
    from firstfault.model import (
        CausedBy,
        CollectiveProgress,
        Decision,
        ExpiredDeadline,
        FileSystem,
        JobErrors,
        SystemState,
        ThreadFailure,
        Verdict,
        WorkerError,
    )
    from firstfault.report.answers import Answers
    from firstfault.report.attempt_changes import AttemptSummary
    from firstfault.report.cascade import Cascade

__all__ = ["Fact", "JobIdentity", "Report", "report_of", "with_attempts"]

_COUNTS = {"RLIMIT_NOFILE", "RLIMIT_NPROC"}
"""Limits that are not sizes."""
_FEW = 5
_MS = 1_000_000
_NS = 1_000_000_000
_FIRST_NS = 1_577_836_800 * _NS
"""The year 2020: no job started before."""
_LONGEST_NS = 4_102_444_800 * _NS
"""The year 2100."""
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that is known: "exit code", "-9 (SIGKILL)"."""

    name: str
    value: str


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

    def parts(self, engine: EngineWords) -> tuple[str, ...]:
        """Return what is known, in the order in which a person asks for it."""
        start = f"started {shown_time(self.started_ns)[:19]} UTC" if self.started_ns is not None else ""
        after = f"failed after {duration(int(self.seconds * _NS))}" if self.seconds is not None else ""
        size = (
            counted(self.ranks, "rank") if self.ranks else "",
            counted(self.nodes, engine.node) if self.nodes else "",
        )
        parts = (
            self.task,
            f"execution {self.execution}" if self.execution else "",
            self.image,
            f"commit {self.commit[:7]}" if self.commit else "",
            ", ".join(filter(None, [start, after])),
            " on ".join(filter(None, size)),
            self._shown_gpus(),
            ", ".join(f"{name} {version}" for name, version in self.versions),
        )
        return tuple(filter(None, parts))

    def _shown_gpus(self) -> str:
        number = counted(self.gpus, "GPU") if self.gpus and self.all_gpus else ""
        return ": ".join(filter(None, [number, self.gpu_model]))


@dataclass(frozen=True, slots=True)
class Report:
    """What a report says."""

    job: JobErrors
    verdict: Verdict
    decision: Decision
    answers: Answers
    facts: tuple[Fact, ...]
    """About the root cause: rank, pod, machine, exit code, time, memory."""
    raw: tuple[Fact, ...]
    """What few people need: process ids, exact times, digests."""
    identity: JobIdentity
    cascade: Cascade
    followers: str
    """The victims and how much later they failed: "2 lost a peer, 5 stopped by their agents; ..."; empty: none."""
    clocks: str
    """How exactly times of different nodes can be compared."""
    coverage: str
    """How many nodes reported: "4 of 4"."""
    attempts: tuple[AttemptSummary, ...] = ()
    """All known attempts by number, with this one; fewer than two: there is nothing to compare."""
    changes: tuple[str, ...] = ()
    """What changed from each attempt to the next."""
    change: str = ""
    """What changed since the attempt before this one; empty: not known."""
    number: int | None = None
    """The attempt's number, from 0; None: not known."""
    uri: str = ""
    """Of the attempt's documents; empty: not known."""
    engine: EngineWords = FLYTE
    """The words for what ran the job."""


def report_of(  # noqa: PLR0913 - keywords
    job: JobErrors,
    verdict: Verdict,
    decision: Decision,
    *,
    uri: str = "",
    logs: Mapping[str, str] | None = None,
    attempts: Sequence[AttemptSummary] = (),
    diagnosis: Diagnosis | None = None,
) -> Report:
    """Return what a report on an attempt says, without credentials.

    Args:
        job: what was read.
        verdict: on it.
        decision: on the verdict.
        uri: of the attempt's documents.
        logs: local log files by node; they replace the engine's commands.
        attempts: summaries of all attempts, if there are several.
        diagnosis: of the job, from its `Conclusion`; None: it is computed.
    """
    diagnosis = diagnosis or diagnose(job)
    job, verdict = redacted(job, verdict)
    clocks = diagnosis.clocks
    cascade = cascade_of(job, verdict, diagnosis)
    number, engine = _number(job, uri), engine_of(job, verdict)
    ordered = tuple(sorted(attempts, key=lambda attempt: attempt.number))
    return Report(
        job=job,
        verdict=verdict,
        decision=decision,
        answers=answers_on(job, verdict, decision, uri, logs or {}, ordered, number, cascade, engine),
        facts=tuple(_facts(verdict, cascade, engine, machine_of(job, verdict))),
        raw=tuple(_raw(verdict)),
        identity=_identity(job, verdict, cascade, uri),
        cascade=cascade,
        followers=_followers(verdict, cascade, clocks),
        clocks=_clocks(cascade, clocks),
        coverage=_coverage(verdict, cascade),
        attempts=ordered,
        changes=changes_between(ordered),
        change=_change(ordered, number),
        number=number,
        uri=uri,
        engine=engine,
    )


def with_attempts(report: Report, attempts: Sequence[AttemptSummary]) -> Report:
    """Return a report that is compared with the attempts before it.

    Args:
        report: on the last attempt.
        attempts: summaries of this attempt and those before it.
    """
    ordered = tuple(sorted(attempts, key=lambda attempt: attempt.number))
    return replace(report, attempts=ordered, changes=changes_between(ordered), change=_change(ordered, report.number))


def _change(attempts: Sequence[AttemptSummary], number: int | None) -> str:
    pair = [attempt for attempt in attempts if number is not None and attempt.number in {number - 1, number}]
    return next(iter(changes_between(pair)), "")


def _number(job: JobErrors, uri: str) -> int | None:
    """Return the attempt's number from the end of the output prefix or from the documents; None: neither has it."""
    found = attempt_of(uri) if uri else None
    if found is not None:
        return found[1]
    places = [failure.place for failure in job.failures] + [entry.place for entry in job.roster]
    return max((place.attempt for place in places if place.incarnation), default=None)


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_FEW])
    return f"{shown} and {len(names) - _FEW} more" if len(names) > _FEW else shown


# --- facts ----------------------------------------------------------------------------------------------------------


def _facts(verdict: Verdict, cascade: Cascade, engine: EngineWords, machine: str) -> Iterator[Fact]:
    root = verdict.root
    at = verdict.timestamp_ns
    time = Fact("time", shown_time(at) if at is not None else _no_time(verdict, cascade))
    if root is None:
        if verdict.node:
            yield Fact(engine.node, verdict.node)
        if machine:
            yield Fact("machine", machine)
        yield time
        return
    yield from _place_facts(root, engine)
    yield from _end_facts(root)
    yield time
    if root.place.restart_count:
        yield Fact("restarts before", str(root.place.restart_count))
    if root.expired is not None:
        yield Fact("deadline", _deadline(root.expired))
    if root.caused_by is not None:
        yield Fact("stopped after a failure of", _cause(root.caused_by))
    yield from _few("thread", [_thread(thread) for thread in root.thread_failures])
    memory = ", ".join(_memory(root))
    if memory:
        yield Fact("memory", memory)
    if disks := ", ".join(map(_space, root.system.full or root.system.file_systems)):
        yield Fact("disk", disks)
    if limits := ", ".join(_limits(root.system)):
        yield Fact("limits", limits)
    yield from _few("last collective", [_collective(progress) for progress in root.collectives])


def _space(found: FileSystem) -> str:
    """Return "0 B of 100.0 GiB free at /data"."""
    if found.total_inodes and not found.free_inodes:
        return f"no inode free at {found.path}"
    return f"{size(found.free_bytes)} of {size(found.total_bytes)} free at {found.path}"


def _limits(system: SystemState) -> Iterator[str]:
    """Yield the limits of a process: "RLIMIT_AS 4.0 GiB", "17 of 1024 files open"."""
    for name, limit in system.limits:
        if name == "RLIMIT_NOFILE" and system.open_files is not None:
            yield f"{system.open_files} of {limit} files open"
        else:
            yield f"{name} {limit if name in _COUNTS else size(limit)}"


def _raw(verdict: Verdict) -> Iterator[Fact]:
    root = verdict.root
    if verdict.timestamp_ns is not None:
        yield Fact("time", format_timestamp(verdict.timestamp_ns) or "")
    if root is not None:
        found = (
            ("pid", str(root.place.pid or "")),
            ("address", root.place.ip),
            ("boot id", root.boot_id),
            ("round", str(root.place.round)),
        )
        yield from (Fact(name, value) for name, value in found if value)
    yield from (Fact("fingerprint", verdict.fingerprint),) if verdict.fingerprint else ()
    yield Fact("documents", str(verdict.document_count))


def _no_time(verdict: Verdict, cascade: Cascade) -> str:
    """Return why the root cause has no time."""
    if not any(event.failure.timestamp_ns is not None for event in cascade.events):
        return "not recorded"
    return "not known: no process recorded when it began" if verdict.category == "hang" else "not known"


def _place_facts(root: WorkerError, engine: EngineWords) -> Iterator[Fact]:
    place = root.place
    if place.rank is not None:
        yield Fact("rank", _with(str(place.rank), "local_rank", place.local_rank))
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


def _with(text: str, name: str, value: int | None) -> str:
    return text if value is None else f"{text} ({name} {value})"


def _few(name: str, values: Sequence[str]) -> Iterator[Fact]:
    for value in values[:_FEW]:
        yield Fact(name, value)
    if len(values) > _FEW:
        yield Fact(name, f"and {len(values) - _FEW} more")


def _deadline(expired: ExpiredDeadline) -> str:
    since = "last ping" if expired.heartbeat else "begun"
    return f"{expired.text}; {since} at {expired.since}" if expired.since else expired.text


def _cause(cause: CausedBy) -> str:
    if cause.rank is None:
        return cause.node or "another node"
    return f"rank {cause.rank} on {cause.node}" if cause.node else f"rank {cause.rank}"


def _thread(failure: ThreadFailure) -> str:
    exception = failure.exception
    text = one_line(exception.message)
    return f"{failure.thread} ended by {exception.type.rsplit('.', 1)[-1]}" + (f": {text}" if text else "")


def _collective(progress: CollectiveProgress) -> str:
    number = f"{progress.last_operation} #{progress.enqueued}".lstrip()
    completed = f", {progress.completed} completed" if progress.completed is not None else ""
    return f"{number}{completed} (group {progress.group})"


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


# --- what ran -------------------------------------------------------------------------------------------------------


def _identity(job: JobErrors, verdict: Verdict, cascade: Cascade, uri: str) -> JobIdentity:
    places = [failure.place for failure in job.failures] + [entry.place for entry in job.roster]
    times = [failure.timestamp_ns for failure in job.failures if failure.timestamp_ns is not None]
    ended_ns = verdict.timestamp_ns if verdict.timestamp_ns is not None else max(times, default=None)
    # a clock that was not set yet, or a damaged entry, is no start
    longest = _LONGEST_NS if ended_ns is None else min(ended_ns, _LONGEST_NS)
    started = [start for place in places if _FIRST_NS < (start := place.incarnation * _MS) <= longest]
    started_ns = min(started, default=None)
    took_ns = ended_ns - started_ns if started_ns is not None and ended_ns is not None else -1
    setups = {entry.place.node: entry.setup for entry in job.roster if entry.setup != NodeSetup()}
    first = next(iter(setups.values()), NodeSetup())
    versions = verdict.root.versions if verdict.root is not None else ()
    return JobIdentity(
        task=first.task,
        execution=execution_of(uri) or "",
        image=first.image,
        started_ns=started_ns,
        seconds=took_ns / _NS if took_ns >= 0 else None,
        ranks=world_size(job) or len({rank for entry in job.roster for rank in entry.ranks}),
        nodes=verdict.coverage.expected or len(cascade.nodes),
        gpu_model=next((setup.gpu_model for setup in setups.values() if setup.gpus), ""),
        gpus=sum(setup.gpus for setup in setups.values()),
        all_gpus=len(setups) == verdict.coverage.expected,
        versions=versions or next((failure.versions for failure in job.failures if failure.versions), ()),
        source_url=first.source_url,
        source_root=first.source_root,
    )


# --- the others -----------------------------------------------------------------------------------------------------


def _followers(verdict: Verdict, cascade: Cascade, clocks: Clocks) -> str:
    if verdict.scope is Scope.UNDETERMINED:
        return ""  # no rank is certainly a victim
    if not cascade.events:
        return str(verdict.victims.count or "")
    stopped, victims = cascade.count(State.STOPPED), cascade.count(State.VICTIM)
    after = [event for event in cascade.events if event.state in {State.VICTIM, State.STOPPED}]
    agents = sum(event.failure.subject is Subject.AGENT for event in after)
    waited = verdict.category == "hang" and (verdict.root is None or verdict.root.expired is None)
    what = "timed out waiting" if waited else "lost a peer"
    parts = [f"{victims} {what}"] if victims else []
    parts += [f"{stopped} stopped by {'its agent' if stopped == 1 else 'their agents'}"] if stopped else []
    parts += [f"{counted(agents, 'agent')} failed after it"] if agents else []
    text = ", ".join(parts)
    timed = [event for event in after if event.at_ns is not None]
    if not timed or not parts:
        return text
    first, *others = timed
    bounds = [event.bounds for event in timed if event.bounds is not None]
    name = f"rank {first.failure.rank}" if first.failure.rank is not None else first.failure.node
    on = f" on {first.failure.node}" if first.failure.rank is not None and first.failure.node else ""
    if len(bounds) < len(timed):  # the clocks were not compared: the order is a guess
        said = f"; the first {first.later}" if first.later else ""
        return f"{text}{said}" + (f"; the last {others[-1].later}" if others else "")
    # the bounds of the first and the last failure are known even if their order is not
    start = Interval(min(item.low for item in bounds), min(item.high for item in bounds))
    end = Interval(max(item.low for item in bounds), max(item.high for item in bounds))
    is_first = all(clocks.before(first.failure, other.failure) for other in others)
    who = f" was {name}{on}," if is_first else ""
    if not cascade.from_root:
        text = f"{text}; the first was {name}{on}" if is_first else text
        return f"{text}; the last {later_text(end)} than the first" if end.low > 0 else text
    text = f"{text}; the first{who} {later_text(start)}"
    return f"{text}; the last {later_text(end)}" if others else text


def _clocks(cascade: Cascade, clocks: Clocks) -> str:
    """Return how exactly times of different processes can be compared; empty if there is only one."""
    if len(cascade.events) < 2:  # noqa: PLR2004 - a pair
        return ""
    untimed = [event for event in cascade.events if event.at_ns is None]
    unknown = {event.failure.node for event in cascade.events if event.at_ns is not None and event.bounds is None}
    if unknown:  # the unknown clock may be the one that all are compared with
        timed = {event.failure.node for event in cascade.events if event.at_ns is not None}
        unknown = {node for node in timed if not clocks.offset(node).is_known} or unknown
    widths = [event.bounds.high - event.bounds.low for event in cascade.events if event.bounds is not None]
    said = []
    if untimed:
        said.append(f"{len(untimed)} of {len(cascade.events)} have no recorded time")
    if unknown:
        whose = _names(sorted(unknown)) if len(unknown) <= _FEW and "" not in unknown else f"{len(unknown)} nodes"
        clock = "clock" if len(unknown) == 1 else "clocks"
        said.append(f"the {clock} of {whose} could not be checked")
    if max(widths, default=0) > _MS:
        said.append(f"times are known to within {duration(max(widths))}")
    elif not said:
        said.append("all processes use one clock")
    return "; ".join(said)


def _coverage(verdict: Verdict, cascade: Cascade) -> str:
    """Return how many nodes reported; with what is missing, a comma follows the numbers."""
    coverage = verdict.coverage
    expected = coverage.expected if coverage.expected is not None else "an unknown number"
    text = f"{coverage.reported} of {expected}"
    if coverage.expected is not None and coverage.reported > coverage.expected:
        text = f"{coverage.reported}, more than the {coverage.expected} that were expected"
    parts = [] if coverage.complete else ["incomplete"]
    silent = sum(node.state is State.UNREPORTED for node in cascade.nodes)
    if silent and coverage.expected is not None and coverage.reported + silent > coverage.expected:
        parts.append(f"{silent} more joined and sent no report")
    missing = cascade.count(State.UNREPORTED)
    if missing and coverage.expected is not None and coverage.reported >= coverage.expected:
        parts.append(f"{counted(missing, 'rank')} sent no report")
    if coverage.unreadable:
        parts.append(f"{counted(coverage.unreadable, 'document')} could not be read")
    if not verdict.settled:
        parts.append("waiting for the others timed out")
    return ", ".join([text, *parts])
