"""Facts about the root cause, the job and the whole cascade: what a report lists below its answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from firstfault.evidence.clocks import Clocks, Interval
from firstfault.layout import execution_of
from firstfault.model import JobErrors, NodeSetup, Scope, Subject, Verdict, WorkerError
from firstfault.model.failure import explain_signal
from firstfault.report.cascade import Cascade, later_text, world_size
from firstfault.report.words import EngineWords, State, duration, engine_of, few, shown_time, size
from firstfault.text import counted, one_line
from firstfault.wire.json_schemas import format_timestamp

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

    def _size(self, engine: EngineWords) -> str:
        ranks = counted(self.ranks, "rank") if self.ranks else ""
        return " on ".join(filter(None, [ranks, counted(self.nodes, engine.node) if self.nodes else ""]))

    @property
    def _after(self) -> str:
        return f"failed after {duration(int(self.seconds * _NS))}" if self.seconds is not None else ""

    def brief(self, engine: EngineWords) -> str:
        """Return what ran in few words; the rest is the same for every attempt of it."""
        gpus = f"{self.gpus} {self.gpu_model}" if self.gpus else ""
        return ", ".join(filter(None, [self.task or self.execution, self._size(engine), gpus, self._after]))

    def parts(self, engine: EngineWords) -> tuple[str, ...]:
        """Return what is known, in the order in which a person asks for it."""
        start = f"started {shown_time(self.started_ns)[:19]} UTC" if self.started_ns is not None else ""
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


def facts_of(verdict: Verdict, cascade: Cascade, engine: EngineWords, machine: str) -> Iterator[Fact]:
    """Yield the facts about the root cause: its place, its end, its time, and what the machine counted."""
    root = verdict.root
    when = "not recorded"
    if verdict.timestamp_ns is not None:
        when = shown_time(verdict.timestamp_ns)
    elif any(event.failure.timestamp_ns is not None for event in cascade.events):
        when = "not known: no process recorded when it began" if verdict.category == "hang" else "not known"
    if root is None:
        found = ((engine.node, verdict.node), ("machine", machine), ("time", when))
        yield from (Fact(name, value) for name, value in found if value)
        return
    yield from _place_facts(root, engine)
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


def _place_facts(root: WorkerError, engine: EngineWords) -> Iterator[Fact]:
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
    yield from (Fact("thread", text) for text in few(threads, _FEW))
    disks = [
        f"no inode free at {disk.path}"
        if disk.total_inodes and not disk.free_inodes
        else f"{size(disk.free_bytes)} of {size(disk.total_bytes)} free at {disk.path}"
        for disk in root.system.full or root.system.file_systems
    ]
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
    yield from (Fact("last collective", text) for text in few(collectives, _FEW))


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
    hosts = len({place.node for place in places})
    return JobIdentity(
        task=first.task,
        execution=execution_of(uri) or "",
        image=first.image,
        started_ns=started_ns,
        seconds=took_ns / _NS if took_ns >= 0 else None,
        ranks=world_size(job) or len({rank for entry in job.roster for rank in entry.ranks}),
        nodes=hosts if engine_of(job, verdict).reporter else verdict.coverage.expected or len(cascade.nodes),
        gpu_model=next((setup.gpu_model for setup in setups.values() if setup.gpus), ""),
        gpus=sum(setup.gpus for setup in setups.values()),
        all_gpus=len(setups) == verdict.coverage.expected,
        versions=versions or next((failure.versions for failure in job.failures if failure.versions), ()),
        source_url=first.source_url,
        source_root=first.source_root,
    )


# --- the whole cascade ------------------------------------------------------------------------------------------------


def followers_text(verdict: Verdict, cascade: Cascade, clocks: Clocks) -> str:
    """Return who failed after the root cause and how much later; empty if no rank is certainly a victim."""
    if verdict.scope is Scope.UNDETERMINED:
        return ""
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


def clocks_text(cascade: Cascade, clocks: Clocks) -> str:
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
        whose = ", ".join(sorted(unknown)) if len(unknown) <= _FEW and "" not in unknown else f"{len(unknown)} nodes"
        clock = "clock" if len(unknown) == 1 else "clocks"
        said.append(f"the {clock} of {whose} could not be checked")
    if max(widths, default=0) > _MS:
        said.append(f"times are known to within {duration(max(widths))}")
    elif not said:
        said.append("all processes use one clock")
    return "; ".join(said)


def coverage_text(verdict: Verdict, cascade: Cascade) -> str:
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
