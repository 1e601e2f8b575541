"""Facts about the root cause: where it was, how it ended, what was counted there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from firstfault.model import Verdict, WorkerError
from firstfault.model.failure import OF_LOGS, explain_end, explain_signal
from firstfault.report.case import Case, find_machine
from firstfault.report.engine_words import EngineWords
from firstfault.report.formatting import (
    MAX_LISTED_ITEMS,
    format_log_time,
    format_time,
    shorten_list,
)
from firstfault.strategies.reasons import has_computed_time
from firstfault.utils.text import counted, one_line, size
from firstfault.wire.json_schemas import format_timestamp

_COUNTS = {"RLIMIT_NOFILE", "RLIMIT_NPROC"}
"""Limits that aren't sizes."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A row of a report: a label and a value, such as "Exit code", "137"."""

    name: str
    value: str
    lines: tuple[str, ...] = ()
    """Lines below the value, such as the victims one by one."""

    @property
    def line(self) -> str:
        """Both: "Exit code: 137"."""
        return f"{self.name}: {self.value}"


def list_facts(case: Case) -> Iterator[Fact]:
    """Yield the facts about the root cause: its place, its end, its time,
    and what the machine counted.
    """
    verdict, root, engine = case.verdict, case.verdict.root, case.engine
    shown = case.job.failures[:1] if root is None else (root,)
    is_log = any(failure.place.engine == OF_LOGS for failure in shown)
    write_time = format_log_time if is_log else format_time
    when = write_time(verdict.timestamp_ns) if verdict.timestamp_ns is not None else ""
    when += ", when the hang began (computed)" if has_computed_time(verdict) else ""
    if root is None:
        named_values = (
            (engine.node.capitalize(), verdict.node),
            ("Machine", find_machine(case.job, verdict)),
            ("Time", when),
        )
        yield from (Fact(name, value) for name, value in named_values if value)
        return
    yield from _place_facts(root, engine)
    if engine.cites and root.documents:
        yield Fact("Lines", ", ".join(document.name for document in root.documents))
    yield from _end_facts(root)
    if when:
        yield Fact("Time", when)
    if root.place.restart_count:
        yield Fact("Restarts before", str(root.place.restart_count))
    if root.expired is not None:
        since = "last ping" if root.expired.heartbeat else "started"
        at = f", {since} at {root.expired.since}" if root.expired.since else ""
        yield Fact("Deadline", f"{root.expired.text}{at}")
    if (cause := root.caused_by) is not None:
        rank = f"rank {cause.rank}" if cause.rank is not None else ""
        yield Fact("Stopped after", " on ".join(filter(None, [rank, cause.node])) or "another node")
    yield from _counted_facts(root)


def _place_facts(root: WorkerError, engine: EngineWords) -> Iterator[Fact]:
    place = root.place
    if place.rank is not None:
        yield Fact(
            "Rank",
            f"{place.rank}{'' if place.local_rank is None else f' (local rank {place.local_rank})'}",
        )
    if root.node:
        yield Fact(engine.node.capitalize(), root.node)
    if place.machine and place.machine != root.node:
        yield Fact("Machine", place.machine)
    # in Kubernetes the host's name is the pod's, which is shown already
    elif place.host and place.host != root.node:
        yield Fact("Host", place.host)
    if place.gpu:
        yield Fact("GPU", place.gpu)


def _end_facts(root: WorkerError) -> Iterator[Fact]:
    # the exit code of a stopped process comes from its agent's signal
    if root.exit_code is not None and not root.stopped_by_agent:
        yield Fact("Exit code", str(root.exit_code))
    by_agent = next((sent for sent in root.sent_signals if sent.signal == root.signal), None)
    if by_agent is not None:
        yield Fact("Signal", f"{root.signal}, sent by its agent: {by_agent.reason}")
    elif root.signal and root.expired is not None:
        yield Fact("Signal", f"{root.signal}, sent by its agent for a deadline")
    elif root.signal:
        is_known = explain_signal(root.signal, root.resources)
        explained = explain_end(root) if is_known and root.expired is None else ""
        yield Fact("Signal", f"{root.signal}: {explained}" if explained else root.signal)


def _counted_facts(root: WorkerError) -> Iterator[Fact]:
    """Yield the counts at the root cause: dead threads, memory, disk, limits and collectives."""
    threads = []
    for failure in root.thread_failures:
        kind = failure.exception.type.rsplit(".", 1)[-1]
        text = one_line(failure.exception.message)
        threads.append(
            f"{failure.thread} ended by {kind}: {text}"
            if text
            else f"{failure.thread} ended by {kind}"
        )
    yield from (Fact("Thread", text) for text in shorten_list(threads, MAX_LISTED_ITEMS))
    # if a file system is full, only full ones are worth a line
    disks = [disk.text for disk in root.system.full or root.system.file_systems]
    limits = [
        (
            f"{root.system.open_files} of {limit} files open"
            if name == "RLIMIT_NOFILE" and root.system.open_files is not None
            else f"{name} {limit if name in _COUNTS else size(limit)}"
        )
        for name, limit in root.system.limits
    ]
    for name, texts in (
        ("Memory", list(_list_memory_facts(root))),
        ("Disk", disks),
        ("Limits", limits),
    ):
        if texts:
            yield Fact(name, ", ".join(texts))
    collectives = []
    for progress in root.collectives:
        number = f"{progress.last_operation} #{progress.enqueued}".lstrip()
        completed = f", {progress.completed} completed" if progress.completed is not None else ""
        collectives.append(f"{number}{completed} (group {progress.group})")
    yield from (
        Fact("Last collective", text) for text in shorten_list(collectives, MAX_LISTED_ITEMS)
    )


def _list_memory_facts(root: WorkerError) -> Iterator[str]:
    resources = root.resources
    limit = (
        f" of {size(resources.memory_limit_bytes)}"
        if resources.memory_limit_bytes is not None
        else ""
    )
    if resources.memory_peak_bytes is not None:
        yield f"peak {size(resources.memory_peak_bytes)}{limit}"
    if resources.memory_used_bytes is not None:
        yield f"in use {size(resources.memory_used_bytes)}" + (
            "" if resources.memory_peak_bytes is not None else limit
        )
    elif resources.memory_peak_bytes is None and limit:
        yield f"limit {size(resources.memory_limit_bytes or 0)}"
    if resources.oom_kill is not None:
        yield (
            f"{counted(resources.oom_kill, 'OOM kill')} counted"
            if resources.oom_kill
            else "no OOM kill counted"
        )


def list_raw_facts(verdict: Verdict) -> Iterator[Fact]:
    """Yield rarely needed values: process ids, exact times, digests."""
    named_values = [("Time", format_timestamp(verdict.timestamp_ns))]
    if (root := verdict.root) is not None:
        named_values += [("PID", str(root.place.pid or "")), ("Address", root.place.ip)]
        named_values += [("Boot ID", root.boot_id), ("Round", str(root.place.round))]
    named_values += [
        ("Fingerprint", verdict.fingerprint),
        ("Rule", verdict.rule),
        ("Documents", str(verdict.document_count)),
    ]
    yield from (Fact(name, value) for name, value in named_values if value)
