"""Lists the failed attempts below a folder, and counts which fault,
pod or machine they have in common.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from firstfault import layout
from firstfault.attempt_reader import AttemptReader
from firstfault.conclude import conclude
from firstfault.errors import FirstFaultError, StoreError
from firstfault.evidence.completion import classify_outcome
from firstfault.model import Decision, Outcome, Seal, Verdict, WorkerError
from firstfault.reading.assemble import assemble
from firstfault.reading.fetch import build_snapshot, read_document, read_listed
from firstfault.report.engine_words import find_engine_words
from firstfault.report.first_line import first_line, shorten_pod_name
from firstfault.store import ObjectInfo, Page, ReadableStore, Store, join, open_store
from firstfault.utils.run_sync import gather_all, map_concurrently, run_sync, try_await
from firstfault.utils.text import one_line
from firstfault.wire.json_schemas import from_json

_MAX_CONCURRENT_ATTEMPTS = 32
"""Attempts that are read at the same time."""
_MAX_CONCURRENT_WHOLE_ATTEMPTS = 4
"""Of these, attempts without a sealed verdict: each opens many documents at the same time."""
_MAX_ERROR_FILES = 16
"""Maximum number of Flyte's own error files to open for one attempt."""
_MAX_LINE_CHARACTERS = 160
_SIGNIFICANCE_LEVEL = 0.05
_NS_PER_HOUR = 3600 * 10**9
_LISTING_CUTS = "048cgkosw"
"""Characters at which the rest of a listing is split: names of executions are hexadecimal,
or letters and digits.
"""


@dataclass
class FoundAttempt:
    """What the names below one output prefix show."""

    path: str
    """Path of the output prefix, relative to the listed folder."""
    error_files: list[ObjectInfo] = field(default_factory=list)
    """Flyte's own, with their paths relative to the listed folder."""
    documents: list[str] = field(default_factory=list)
    """Names of error documents; of a large attempt only some."""
    has_outputs: bool = False
    started_ns: int | None = None
    """When the first agent started, or None if no name contains the time."""
    changed_ns: int | None = None
    """When an error was last stored, or None if the storage doesn't record this time."""

    @property
    def may_have_failed(self) -> bool:
        """Whether it has an error file, a document (of a round that recovered, perhaps),
        or a start without outputs.
        """
        return bool(self.error_files or self.documents) or (
            self.started_ns is not None and not self.has_outputs
        )


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """One failed attempt in short."""

    uri: str
    """URI of its output prefix."""
    time_ns: int | None
    """Time of the root cause or, if unknown, when an error was last stored."""
    outcome: Outcome = Outcome.UNKNOWN
    line: str = ""
    """The first line of its report."""
    fingerprint: str = ""
    category: str = ""
    pod: str = ""
    """The end of the root cause's pod or node, without the execution's name."""
    machine: str = ""
    """Empty if unknown or not requested."""
    ranks: int = 0
    """Ranks that failed or were stopped."""
    rank_hours: float | None = None
    """Time from the start of the agents until the fault, times the ranks; None if unknown."""
    retry: bool | None = None
    note: str = ""
    """Why it could not be read; then nothing else is known."""

    @property
    def node(self) -> str:
        """The machine, else the node's name."""
        return self.machine or self.pod

    @property
    def execution(self) -> str:
        """Name of its execution, or of its local run."""
        run = layout.parse_attempt_number(self.uri)
        return layout.parse_execution(self.uri) or (
            run[0].rpartition("/")[2] if run is not None else self.uri
        )


@dataclass(frozen=True, slots=True)
class FaultGroup:
    """Attempts that have something in common."""

    key: str
    """Empty if unknown."""
    attempts: int
    executions: int
    rank_hours: float | None
    """Sum over the attempts with known rank-hours, or None if no attempt has any."""
    last: FailedAttempt
    """The newest."""
    is_suspicious: bool = False
    """For a machine, whether it fails more often than chance explains."""


def failed_attempts(
    uri: str, *, since_ns: int | None = None, with_machines: bool = False
) -> tuple[list[FailedAttempt], int]:
    """Return the failed attempts below a folder, newest first, and the number of all attempts.

    Costs the listing and one request for an attempt with a sealed verdict, two `with_machines` of
    the root causes. Attempts with all errors stored before `since_ns`, nanoseconds since the Unix
    epoch, are left out.

    Raises:
        StoreError: the storage could not be listed.
    """
    return run_sync(_failed_attempts(uri, since_ns, with_machines))


def grouped(attempts: Iterable[FailedAttempt], by: str) -> list[FaultGroup]:
    """Return the groups of readable attempts, the most expensive first: by rank-hours,
    then by number.

    `attempts` are newest first; `by` is fingerprint, category, pod, machine or node.
    """
    members: dict[str, list[FailedAttempt]] = {}
    for attempt in attempts:
        if not attempt.note:
            members.setdefault(getattr(attempt, by), []).append(attempt)
    groups = []
    for key, alike in members.items():
        hours = [attempt.rank_hours for attempt in alike if attempt.rank_hours is not None]
        executions = {attempt.execution for attempt in alike}
        groups.append(
            FaultGroup(key, len(alike), len(executions), sum(hours) if hours else None, alike[0])
        )
    if by in {"node", "machine"}:
        known = [group for group in groups if group.key]
        total = sum(group.executions for group in known)
        groups = [
            replace(
                one, is_suspicious=one.last.machine != "" and _is_unlikely(one, total, len(known))
            )
            for one in groups
        ]
    return sorted(groups, key=lambda group: (-(group.rank_hours or 0), -group.attempts, group.key))


def _is_unlikely(group: FaultGroup, executions: int, machines: int) -> bool:
    """Whether a machine has more failures than chance explains,
    if all machines were equally reliable.

    The binomial distribution's tail, times the number of machines (Bonferroni's correction): among
    100 machines, one always has the most failures. Only machines that failed are known, which makes
    chance larger than it is.
    """
    # one failure, or one machine, shows nothing
    if group.executions < 2 or machines < 2:  # noqa: PLR2004
        return False

    def log_chance(count: int) -> float:
        ways = (
            math.lgamma(executions + 1)
            - math.lgamma(count + 1)
            - math.lgamma(executions - count + 1)
        )
        return ways - count * math.log(machines) + (executions - count) * math.log1p(-1 / machines)

    tail = sum(math.exp(log_chance(count)) for count in range(group.executions, executions + 1))
    return tail * machines < _SIGNIFICANCE_LEVEL


async def _failed_attempts(
    uri: str, since_ns: int | None, with_machines: bool
) -> tuple[list[FailedAttempt], int]:
    async with open_store(uri) as store:
        attempts = await attempts_below(store)
        wanted = [attempt for attempt in attempts if attempt.may_have_failed]
        if since_ns is not None:
            wanted = [
                attempt
                for attempt in wanted
                if attempt.changed_ns is None or attempt.changed_ns >= since_ns
            ]
        read = await map_concurrently(
            _Reader(store, with_machines=with_machines).read, wanted, _MAX_CONCURRENT_ATTEMPTS
        )
    failed = _drop_copies([attempt for attempt in read if attempt is not None])
    return sorted(failed, key=lambda attempt: (-(attempt.time_ns or 0), attempt.uri)), len(attempts)


def _drop_copies(failed: list[FailedAttempt]) -> list[FailedAttempt]:
    """Leave out attempts with the verdict of another one below their folder.

    Flyte 2 reads the error of an action above the folders of its attempts, which have the
    documents.
    """

    def get_verdict(attempt: FailedAttempt) -> tuple[object, ...]:
        return (attempt.time_ns, attempt.fingerprint, attempt.line)

    alike: dict[tuple[object, ...], list[str]] = {}
    for attempt in failed:
        alike.setdefault(get_verdict(attempt), []).append(attempt.uri)

    def is_copy(attempt: FailedAttempt) -> bool:
        folder = f"{attempt.uri.rstrip('/')}/"
        return any(uri.startswith(folder) for uri in alike[get_verdict(attempt)])

    return [attempt for attempt in failed if attempt.note or not is_copy(attempt)]


class _Reader:
    """Reads attempts with as few requests as each allows."""

    def __init__(self, store: Store, *, with_machines: bool) -> None:
        self._store: ReadableStore = store
        self._with_machines = with_machines
        self._whole = asyncio.Semaphore(_MAX_CONCURRENT_WHOLE_ATTEMPTS)

    async def read(self, attempt: FoundAttempt) -> FailedAttempt | None:
        """Return an attempt; None if it didn't fail. Its note has the reason
        why it could not be read.
        """
        uri = join(self._store.uri, attempt.path)
        failed, why = await try_await(self._read(uri, attempt))
        return (
            FailedAttempt(uri, attempt.changed_ns, note=one_line(why, _MAX_LINE_CHARACTERS))
            if why
            else failed
        )

    async def _read(self, uri: str, attempt: FoundAttempt) -> FailedAttempt | None:
        # a damaged or foreign folder may have any number of such files: the limit bounds the
        # requests
        files = sorted(attempt.error_files, key=lambda item: item.name)[:_MAX_ERROR_FILES]
        read = [await read_listed(self._store, item) for item in files]
        stock = [item for item in read if not isinstance(item, Seal)]
        # a sealed verdict saves opening the documents; of several, the one based on the most
        # documents comes first
        for seal in sorted(
            (item for item in read if isinstance(item, Seal)), key=lambda seal: seal.order
        ):
            if (sealed := from_json(seal.json)) is not None:
                verdict, decision = sealed
                line = one_line(seal.message, _MAX_LINE_CHARACTERS)
                return await self._with_machine(
                    _summarize(uri, attempt, verdict, decision, line), attempt, verdict
                )
        # there is more than Flyte's own error files, which have been read already
        if (
            attempt.documents
            or attempt.started_ns is not None
            or len(stock) < len(attempt.error_files)
        ):
            async with self._whole:
                job = await AttemptReader(uri).job_async()
        else:
            job = assemble(build_snapshot(stock))
        conclusion = conclude(job)
        if conclusion is None:
            return None
        if not job.failures and not job.seals and job.coverage.unreadable:
            # `read` turns this into the attempt's note: one unreadable attempt must not end the
            # list
            raise FirstFaultError(next(iter(job.coverage.notes), "its documents are not readable"))
        verdict = conclusion.verdict
        line = first_line(verdict, conclusion.decision, find_engine_words(job, verdict))
        summary = _summarize(uri, attempt, verdict, conclusion.decision, line)
        outcome = classify_outcome(verdict, job)
        return replace(summary, outcome=outcome, machine=_get_machine(verdict.root))

    async def _with_machine(
        self,
        summary: FailedAttempt,
        attempt: FoundAttempt,
        verdict: Verdict,
    ) -> FailedAttempt:
        """Return a summary with the machine that the root cause's document names."""
        name = _find_document(verdict, attempt.documents) if self._with_machines else ""
        if not name:
            return summary
        read = await read_document(
            self._store, layout.join_name(attempt.path, f"{layout.ERRORS}/{name}")
        )
        return replace(summary, machine=_get_machine(read))


def _get_machine(failure: object) -> str:
    return (failure.place.machine or failure.place.host) if isinstance(failure, WorkerError) else ""


def _summarize(
    uri: str,
    attempt: FoundAttempt,
    verdict: Verdict,
    decision: Decision,
    line: str,
) -> FailedAttempt:
    ranks = len(verdict.ranks) + verdict.victims.count
    hours = None
    if ranks and verdict.timestamp_ns is not None and attempt.started_ns is not None:
        hours = max(verdict.timestamp_ns - attempt.started_ns, 0) * ranks / _NS_PER_HOUR
    time_ns = verdict.timestamp_ns if verdict.timestamp_ns is not None else attempt.changed_ns
    pod = shorten_pod_name(verdict.node or "")
    outcome = classify_outcome(verdict)
    summary = FailedAttempt(uri, time_ns, outcome, line, verdict.fingerprint, verdict.category, pod)
    return replace(summary, ranks=ranks, rank_hours=hours, retry=decision.retry)


def _find_document(verdict: Verdict, names: Iterable[str]) -> str:
    """Return the name of a document about the root cause; empty if no name identifies it."""
    keys = [(name, layout.ErrorKey.parse(name)) for name in names]
    # the best name has both the time and the rank of the root cause; else the rank counts more
    exact = [
        name for name, key in keys if key is not None and key.timestamp_ns == verdict.timestamp_ns
    ]
    of_rank = [
        name
        for name, key in keys
        if key is not None and key.rank is not None and key.rank in verdict.ranks
    ]
    return next((name for name in exact if name in of_rank), next(iter([*of_rank, *exact]), ""))


# --- the names below a folder ---------------------------------------------------------------------


async def attempts_below(store: ReadableStore) -> list[FoundAttempt]:
    """Return the attempts below a store's root, by path, with or without failures.

    Lists page by page, and skips what is left of a large attempt's documents. From the second page
    on, the rest is split and its parts are listed at the same time. A store that doesn't page in
    order is listed once.

    Raises:
        StoreError: the storage could not be listed, or not in the order of names.
    """
    attempts: dict[str, FoundAttempt] = {}

    async def list_page(start: str, end: str | None = None) -> Page:
        page = await store.page(start)
        # the list is split and skips names by their order: unsorted pages would lose attempts
        # unnoticed
        if not page.is_sorted:
            raise StoreError(
                f"{store.uri} is not listed in the order of names; name one attempt and use"
                " firstfault show"
            )
        for item in page.objects:
            # a page may reach into the next part, which lists these names itself
            if end is None or item.name <= end:
                _add(attempts, item)
        return page

    async def list_part(start: str, end: str | None) -> None:
        while True:
            page = await list_page(start, end)
            if not page.has_more or (
                end is not None and page.objects and page.objects[-1].name >= end
            ):
                return
            start = _find_next_name(page, attempts)

    first = await list_page("")
    if first.has_more:
        start = _find_next_name(first, attempts)
        # the rest is split where the names of the first page differ, and one character before
        common = os.path.commonprefix([first.objects[0].name, first.objects[-1].name])  # noqa: RUF071
        cuts = sorted(
            {f"{head}{character}" for head in {common, common[:-1]} for character in _LISTING_CUTS}
        )
        cuts = [name for name in cuts if name > start]
        await gather_all(
            *(list_part(*part) for part in zip([start, *cuts], [*cuts, None], strict=True))
        )
    return [attempts[path] for path in sorted(attempts)]


def _find_next_name(page: Page, attempts: dict[str, FoundAttempt]) -> str:
    """Return the name behind which to continue."""
    last = page.objects[-1].name
    for folder in (layout.ERRORS, layout.ROSTER):
        path, inside = _split(last, folder)
        # the names of a round's first nodes contain their start time
        if inside and (folder == layout.ERRORS or attempts[path].started_ns is not None):
            return f"{path}/{folder}0".lstrip("/")  # 0 sorts behind the slash
    return last


def _split(name: str, folder: str) -> tuple[str, str]:
    """Return the output prefix of a file in one of our folders and the file's name there;
    else empty names.
    """
    path, between, rest = f"/{name}".partition(f"/{folder}/")
    return (path.lstrip("/"), rest) if between else ("", "")


def _add(attempts: dict[str, FoundAttempt], item: ObjectInfo) -> None:
    is_error = True
    path, name = _split(item.name, layout.ERRORS)
    if not name:
        is_error = False
        path, name = _split(item.name, layout.ROSTER)
    if name:
        attempt = attempts.setdefault(path, FoundAttempt(path))
        key = layout.ErrorKey.parse(name) if is_error else layout.RosterKey.parse(name)
        if key is not None and key.incarnation:
            # an incarnation is the start of its agent, in milliseconds
            started = key.incarnation * 1_000_000
            attempt.started_ns = min(attempt.started_ns or started, started)
        if is_error:
            attempt.documents.append(name)
    else:
        path, _, name = item.name.rpartition("/")
        is_error = layout.is_stock_error_file(name)
        if not is_error and name != layout.OUTPUTS:
            return
        attempt = attempts.setdefault(path, FoundAttempt(path))
        attempt.has_outputs |= name == layout.OUTPUTS
        if is_error:
            attempt.error_files.append(item)
    if is_error and item.last_modified_ns is not None:
        attempt.changed_ns = max(attempt.changed_ns or 0, item.last_modified_ns)
