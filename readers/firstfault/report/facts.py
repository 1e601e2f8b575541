"""Facts about the root cause and about the job, by name: what a report lists below its answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.layout.paths import execution_of
from firstfault.model import NodeSetup
from firstfault.model.signal_meanings import explain_signal
from firstfault.report.cascade import world_size
from firstfault.report.words import counted, duration, few, shown_time, size
from firstfault.text import one_line
from firstfault.wire.verdict_json import format_timestamp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from firstfault.model import (
        CausedBy,
        CollectiveProgress,
        ExpiredDeadline,
        FileSystem,
        JobErrors,
        SystemState,
        ThreadFailure,
        Verdict,
        WorkerError,
    )
    from firstfault.report.cascade import Cascade
    from firstfault.report.engine_words import EngineWords

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
    lines: tuple[str, ...] = ()
    """What stands below it: the victims one by one."""

    @property
    def line(self) -> str:
        """Both: "exit code: -9"."""
        return f"{self.name}: {self.value}"


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


def facts_of(verdict: Verdict, cascade: Cascade, engine: EngineWords, machine: str) -> Iterator[Fact]:
    """Yield the facts about the root cause: its place, its end, its time, and what the machine counted."""
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
    yield from (Fact("thread", text) for text in few(list(map(_thread, root.thread_failures)), _FEW))
    counted_there = {
        "memory": _memory(root),
        "disk": map(_space, root.system.full or root.system.file_systems),
        "limits": _limits(root.system),
    }
    yield from (Fact(name, text) for name, texts in counted_there.items() if (text := ", ".join(texts)))
    yield from (Fact("last collective", text) for text in few(list(map(_collective, root.collectives)), _FEW))


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


def raw_facts(verdict: Verdict) -> Iterator[Fact]:
    """Yield what few people need: process ids, exact times, digests."""
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
    named = (("fingerprint", verdict.fingerprint), ("rule", verdict.rule))
    yield from (Fact(name, value) for name, value in named if value)
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


# --- what ran ---------------------------------------------------------------------------------------------------


def identity_of(job: JobErrors, verdict: Verdict, cascade: Cascade, uri: str) -> JobIdentity:
    """Return what ran, as far as the documents and the output prefix tell."""
    places = job.places
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
