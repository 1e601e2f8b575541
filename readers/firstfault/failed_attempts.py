"""Lists the failed attempts below a folder, and counts which fault, pod or machine they have in common."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.errors import FirstFaultError
from firstfault.layout.keys import ErrorKey
from firstfault.layout.paths import ERRORS, attempt_of, execution_of, join_name
from firstfault.model import Seal, WorkerError
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.reading.assemble import Snapshot, Unreadable
from firstfault.reading.attempts_below import attempts_below
from firstfault.reading.fetch import read_document
from firstfault.report.headline import first_line, short_pod
from firstfault.store import join, open_store
from firstfault.sync import gathered, run_sync
from firstfault.text import one_line
from firstfault.wire.verdict_json import decision_from_json, verdict_from_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from firstfault.model import Decision, Verdict
    from firstfault.reading.attempts_below import FoundAttempt
    from firstfault.store import ReadableStore, Store

_AT_ONCE = 32
"""Attempts that are read at the same time."""
_WHOLE_AT_ONCE = 4
"""Of these, attempts without a sealed verdict: each opens many documents at the same time."""
_ERROR_FILES = 16
"""Flyte's own error files of one attempt that are opened, at most."""
_LINE = 160
_HOUR_NS = 3600 * 10**9


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """One failed attempt in short."""

    uri: str
    """Of its output prefix."""
    time_ns: int | None
    """Of the root cause; if that is not known, when an error was last stored."""
    line: str = ""
    """The first line of its report."""
    fingerprint: str = ""
    category: str = ""
    pod: str = ""
    """The end of the root cause's pod or node, without the execution's name."""
    machine: str = ""
    """Empty: not known, or not asked for."""
    ranks: int = 0
    """Ranks that failed or were stopped."""
    rank_hours: float | None = None
    """From the start of the agents until the fault, times the ranks; None: not known."""
    retry: bool | None = None
    note: str = ""
    """Why it could not be read; then nothing else is known."""

    @property
    def execution(self) -> str:
        """Name of its execution, or of its local run."""
        run = attempt_of(self.uri)
        return execution_of(self.uri) or (run[0].rpartition("/")[2] if run is not None else self.uri)


@dataclass(frozen=True, slots=True)
class FaultGroup:
    """Attempts that have something in common."""

    key: str
    """Empty: not known."""
    attempts: int
    executions: int
    rank_hours: float | None
    """Of those attempts for which it is known; None: of none."""
    last: FailedAttempt
    """The newest."""


def failed_attempts(
    uri: str, *, since_ns: int | None = None, with_machines: bool = False
) -> tuple[list[FailedAttempt], int]:
    """Return the failed attempts below a folder, newest first, and the number of all attempts.

    Costs the listing and one request for an attempt with a sealed verdict, two with its machine.

    Args:
        uri: of the folder.
        since_ns: leave out attempts whose errors were all stored before, nanoseconds since the Unix epoch.
        with_machines: whether to find the root causes' machines.

    Raises:
        StoreError: the storage could not be listed.
    """
    return run_sync(_failed_attempts(uri, since_ns, with_machines))


def grouped(attempts: Iterable[FailedAttempt], by: str) -> list[FaultGroup]:
    """Return the groups of readable attempts, those that cost most first: by rank-hours, then by number.

    Args:
        attempts: newest first.
        by: fingerprint, category, pod or machine.
    """
    members: dict[str, list[FailedAttempt]] = {}
    for attempt in attempts:
        if not attempt.note:
            members.setdefault(getattr(attempt, by), []).append(attempt)
    groups = [_group(key, alike) for key, alike in members.items()]
    return sorted(groups, key=lambda group: (-(group.rank_hours or 0), -group.attempts, group.key))


def _group(key: str, alike: Sequence[FailedAttempt]) -> FaultGroup:
    hours = [attempt.rank_hours for attempt in alike if attempt.rank_hours is not None]
    executions = {attempt.execution for attempt in alike}
    return FaultGroup(key, len(alike), len(executions), sum(hours) if hours else None, alike[0])


async def _failed_attempts(uri: str, since_ns: int | None, with_machines: bool) -> tuple[list[FailedAttempt], int]:
    async with open_store(uri) as store:
        found = await attempts_below(store)
        wanted = iter(
            attempt
            for attempt in found
            if attempt.may_have_failed
            and not (since_ns is not None and attempt.changed_ns is not None and attempt.changed_ns < since_ns)
        )
        reader = _Reader(store, with_machines=with_machines)
        failed: list[FailedAttempt] = []

        async def work() -> None:
            for attempt in wanted:
                read = await reader.read(attempt)
                if read is not None:
                    failed.append(read)

        await gathered(*(work() for _ in range(_AT_ONCE)))
    return sorted(failed, key=lambda attempt: (-(attempt.time_ns or 0), attempt.uri)), len(found)


class _Reader:
    """Reads attempts with as few requests as each allows."""

    def __init__(self, store: Store, *, with_machines: bool) -> None:
        self._store: ReadableStore = store
        self._with_machines = with_machines
        self._whole = asyncio.Semaphore(_WHOLE_AT_ONCE)

    async def read(self, found: FoundAttempt) -> FailedAttempt | None:
        """Return an attempt; None if it did not fail. Its note has the reason why it could not be read."""
        uri = join(self._store.uri, found.path)
        try:
            return await self._read(uri, found)
        except Exception as error:  # noqa: BLE001 - one attempt must not hide the others
            why = str(error) if isinstance(error, FirstFaultError) else f"{type(error).__name__}: {error}"
            return FailedAttempt(uri, found.changed_ns, note=one_line(why, _LINE))

    async def _read(self, uri: str, found: FoundAttempt) -> FailedAttempt | None:
        files = sorted(found.error_files, key=lambda item: item.name)[:_ERROR_FILES]
        read = [await read_document(self._store, item.name, item) for item in files]
        stock = [item for item in read if not isinstance(item, Seal)]
        for seal in sorted((item for item in read if isinstance(item, Seal)), key=lambda seal: seal.order):
            verdict, decision = verdict_from_json(seal.json), decision_from_json(seal.json)
            if verdict is not None and decision is not None:
                line = one_line(seal.message, _LINE)
                return await self._with_machine(_summary(uri, found, verdict, decision, line), found, verdict)
        reader = MultiErrorFileOutputReader(uri)
        if found.documents or found.started_ns is not None or len(stock) < len(found.error_files):
            async with self._whole:
                job = await reader.job_async()
        else:
            job = reader.job_of(
                Snapshot(
                    documents=tuple(item for item in stock if isinstance(item, WorkerError)),
                    unreadable=tuple(item for item in stock if isinstance(item, Unreadable)),
                )
            )
        conclusion = reader.conclude_from(job)
        if conclusion is None:
            return None
        if not job.failures and not job.seals and job.coverage.unreadable:
            raise FirstFaultError(next(iter(job.coverage.notes), "its documents are not readable"))
        verdict = conclusion.verdict
        summary = _summary(uri, found, verdict, conclusion.decision, first_line(verdict, conclusion.decision))
        place = verdict.root.place if verdict.root is not None else None
        return replace(summary, machine=(place.machine or place.host) if place is not None else "")

    async def _with_machine(self, summary: FailedAttempt, found: FoundAttempt, verdict: Verdict) -> FailedAttempt:
        """Return a summary with the machine that the root cause's document names."""
        name = _document_of(verdict, found.documents) if self._with_machines else ""
        if not name:
            return summary
        read = await read_document(self._store, join_name(found.path, f"{ERRORS}/{name}"), None)
        place = read.place if isinstance(read, WorkerError) else None
        return replace(summary, machine=(place.machine or place.host) if place is not None else "")


def _summary(uri: str, found: FoundAttempt, verdict: Verdict, decision: Decision, line: str) -> FailedAttempt:
    ranks = len(verdict.ranks) + verdict.victims.count
    hours = None
    if ranks and verdict.timestamp_ns is not None and found.started_ns is not None:
        hours = max(verdict.timestamp_ns - found.started_ns, 0) * ranks / _HOUR_NS
    return FailedAttempt(
        uri,
        verdict.timestamp_ns if verdict.timestamp_ns is not None else found.changed_ns,
        line,
        verdict.fingerprint,
        verdict.category,
        short_pod(verdict.node or ""),
        ranks=ranks,
        rank_hours=hours,
        retry=decision.retry,
    )


def _document_of(verdict: Verdict, names: Iterable[str]) -> str:
    """Return the name of a document about the root cause; empty if no name tells it."""
    keys = [(name, ErrorKey.parse(name)) for name in names]
    exact = [name for name, key in keys if key is not None and key.timestamp_ns == verdict.timestamp_ns]
    of_rank = [name for name, key in keys if key is not None and key.rank is not None and key.rank in verdict.ranks]
    return next((name for name in exact if name in of_rank), next(iter([*of_rank, *exact]), ""))
