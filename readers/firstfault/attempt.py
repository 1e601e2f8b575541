"""Read an attempt, or the logs of a job that ran without firstfault,
and summarize its task's remaining attempts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING

from firstfault.attempt_reader import AttemptReader
from firstfault.conclude import Conclusion, conclude
from firstfault.errors import BadDocumentError, FirstFaultError
from firstfault.evidence.completion import classify_outcome
from firstfault.layout import OUTPUTS, Layout, parse_attempt_number
from firstfault.model import DocumentRef, JobErrors, Outcome, Scope
from firstfault.reading.assemble import Snapshot, assemble
from firstfault.report.data import (
    AttemptSummary,
    Report,
    report_conclusion,
    summarize_attempt,
    with_attempts,
)
from firstfault.store import is_remote, join, open_store
from firstfault.strategies import get_strategy
from firstfault.utils.run_sync import gather_all, run_sync
from firstfault.utils.text import counted, one_line

if TYPE_CHECKING:
    from firstfault.brief import LineRanges, LogDigest

JOB_LOGS_GROUP = "firstfault.job_logs"
"""Entry-point group of log readers: functions that turn log files and streams into a snapshot, or
return None if the format is unsupported.
"""
_OWN_LOG_READER = "firstfault_logs"
"""The module of firstfault's own, which may be deleted."""
LOG_DIGESTS_GROUP = "firstfault.log_digests"
"""Entry-point group: functions from log files and streams, and the lines to quote,
to a `LogDigest`.
"""
_MAX_NEIGHBORS = 10
"""Maximum number of further attempts to read: the nearest earlier attempts, then later ones."""
_MAX_ATTEMPTS = 100
_MAX_MISSING_ATTEMPTS = 2
"""Maximum number of consecutive attempts without files; after a longer gap,
the search for attempts ends.
"""
_SUMMARIES_TIMEOUT_SECONDS = 5.0
_NOT_READABLE = "not readable: "
"""Prefix of a coverage note about an unreadable document, before its name and the reason."""


def find_run_logs(uri: str) -> dict[str, str]:
    """Return the log files of a ``firstfault run`` attempt, by pod;
    empty for attempts of an engine.
    """
    run_and_number = parse_attempt_number(uri)
    if run_and_number is None or is_remote(uri):
        return {}
    folder = (
        Path(run_and_number[0].removeprefix("file://")) / "logs" / f"attempt-{run_and_number[1]}"
    )
    return {log.stem: str(log) for log in sorted(folder.glob("*.log"))}


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read an attempt and find its root cause."""

    strategy: str | None = None
    """None selects the job's own strategy."""
    expected_nodes: int | None = None
    """Number of nodes that should have reported, or None for the number in the roster."""
    fresh: bool = False
    """Whether to open every document, instead of the copies that the pods left."""

    def __post_init__(self) -> None:
        if self.strategy is not None:
            get_strategy(self.strategy)  # refuse an unknown one before anything is read

    def reader(self, uri: str) -> AttemptReader:
        """Return a reader with these options."""
        return AttemptReader(
            uri, strategy=self.strategy, expected_nodes=self.expected_nodes, fresh=self.fresh
        )


_DEFAULTS = ReadOptions()


@dataclass(frozen=True, slots=True)
class Attempt:
    """One execution of a job, as it was read from documents or from logs."""

    uri: str
    """URI of the output prefix, the errors/ folder or the only document."""
    job: JobErrors
    conclusion: Conclusion | None
    """None if the attempt didn't fail or has no files."""
    has_outputs: bool = False
    """Whether the attempt has outputs; not checked after a failure."""
    is_of_logs: bool = False
    """Whether it was read from the logs of a job without firstfault."""
    sources: Sequence[Path | IO[bytes]] = ()
    """Logs that were read."""

    @property
    def errors_uri(self) -> str:
        """URI of the folder of error documents."""
        return Layout.of(self.uri).errors_uri()

    @property
    def outcome(self) -> Outcome:
        """How the attempt ended."""
        verdict = self.conclusion.verdict if self.conclusion is not None else None
        return classify_outcome(verdict, self.job, has_outputs=self.has_outputs)

    @property
    def exists(self) -> bool:
        """Whether the attempt failed, succeeded, or has at least a roster."""
        return self.outcome is not Outcome.UNKNOWN or bool(self.job.roster)

    def report(
        self,
        conclusion: Conclusion,
        *,
        attempts: Sequence[AttemptSummary] = (),
        logs: Mapping[str, str] | None = None,
    ) -> Report:
        """Return the report on its conclusion; see `firstfault.report.build_report`."""
        return with_attempts(report_conclusion(conclusion, uri=self.uri, logs=logs), attempts)


def read(uri: str, options: ReadOptions = _DEFAULTS, additional: Sequence[Path] = ()) -> Attempt:
    """Read an attempt.

    In the folder of all attempts of a task, this is the last failed attempt, or the last attempt if
    none failed. In a local folder of runs, it is an attempt of the latest run. A local folder
    without attempts, and a local file that isn't an error document, are read as logs of a job
    without firstfault.

    Args:
        uri: an output prefix, an errors/ folder, a document, the folder of all attempts of a task,
            or of logs.
        options: how to read and judge it.
        additional: more logs and flight recorder dumps of the same job.

    Raises:
        StoreError: an attempt could not be listed, or the only document could not be read.
        BadDocumentError: a log has no known format.
    """
    path = None if is_remote(uri) else Path(uri.removeprefix("file://"))
    if path is not None and path.is_file() and path.suffix != ".pb":
        return read_logs([path, *additional], uri, options)
    # documents are better evidence than logs, so logs are read only without documents
    evidence = _read_logs_snapshot(additional) if additional else None
    recorded = _read_documents(uri, options, evidence)
    if recorded.exists or path is None or _is_part(uri):
        return replace(recorded, sources=additional)
    logs = read_logs([path, *additional], uri, options)
    return (
        logs if logs.conclusion is not None or logs.job.coverage.notes or logs.exists else recorded
    )


def _is_part(uri: str) -> bool:
    """Whether a URI is a part of an attempt: a document, or the folder of its documents."""
    return uri.rstrip("/").endswith((".pb", "/errors"))


def _read_documents(uri: str, options: ReadOptions, evidence: Snapshot | None) -> Attempt:
    """Read an attempt like `read`, without logs; if no attempt is found,
    the result's `exists` is False.
    """
    given_attempt = _read_one(uri, options, evidence)
    if given_attempt.exists or _is_part(uri):
        return given_attempt
    best = None
    missing = 0
    for number in range(_MAX_ATTEMPTS):
        attempt = _read_one(join(uri, str(number)), options, evidence)
        missing = 0 if attempt.exists else missing + 1
        if missing > _MAX_MISSING_ATTEMPTS:
            break
        if missing:
            continue  # an attempt without files: its pods may never have started
        # the last failed attempt wins over a later attempt that succeeded or is still running
        if attempt.conclusion is not None or best is None or best.conclusion is None:
            best = attempt
    return best or _newest_run(uri, options, evidence) or given_attempt


def _newest_run(uri: str, options: ReadOptions, evidence: Snapshot | None) -> Attempt | None:
    """Read the last attempt of the latest run in a local folder of runs;
    None if `uri` isn't such a folder.
    """
    from firstfault.run_folder import (  # noqa: PLC0415 - who reads logs doesn't need it
        find_newest_run,
    )

    run = None if is_remote(uri) else find_newest_run(Path(uri.removeprefix("file://")))
    return _read_documents(str(run), options, evidence) if run is not None else None


def _read_one(uri: str, options: ReadOptions, evidence: Snapshot | None) -> Attempt:
    reader = options.reader(uri)
    if evidence is not None:
        reader.with_additional_sources(evidence)
    job = reader.job()
    conclusion = reader.conclude_from(job)
    # only an output prefix can have outputs; the check is a request, so skip it after a failure
    has_outputs = conclusion is None and not _is_part(uri) and reader.exists()
    return Attempt(uri, job, conclusion, has_outputs)


def read_logs(
    sources: Sequence[Path | IO[bytes]], uri: str, options: ReadOptions = _DEFAULTS
) -> Attempt:
    """Read the logs and flight recorder dumps of a job that ran without firstfault.

    Args:
        sources: log files, log folders, flight recorder dumps or a log stream, all of one job.
        uri: the name of the sources in messages.
        options: how to judge them.

    Raises:
        BadDocumentError: a source has no known format.
    """
    snapshot = _read_logs_snapshot(sources)
    job = assemble(snapshot, expected_nodes=options.expected_nodes)
    # a report on logs must not show an output prefix
    attempt_uri = "" if job.has_failed else uri
    conclusion = conclude(job, strategy=options.strategy)
    return Attempt(attempt_uri, job, conclusion, is_of_logs=True, sources=sources)


def read_document(data: bytes, name: str, options: ReadOptions = _DEFAULTS) -> Attempt:
    """Read one error document from bytes, such as standard input. `name`
    identifies the source in errors.

    Raises:
        BadDocumentError: the bytes aren't a valid document.
    """
    from firstfault.reading.fetch import (  # noqa: PLC0415 - who reads logs doesn't need it
        build_snapshot,
    )
    from firstfault.wire.documents import decode  # noqa: PLC0415 - as above

    snapshot = build_snapshot([decode(data, DocumentRef(name, size=len(data)))])
    job = assemble(snapshot, expected_nodes=options.expected_nodes)
    return Attempt("", job, conclude(job, strategy=options.strategy))


# --- logs -----------------------------------------------------------------------------------------


def _read_logs_snapshot(sources: Sequence[Path | IO[bytes]]) -> Snapshot:
    # our own reader first: to list entry points takes as long as to read a small log
    refused = None
    with suppress(ModuleNotFoundError):
        try:
            own_snapshot: Snapshot | None = import_module(_OWN_LOG_READER).snapshot_of(sources)
        except BadDocumentError as error:
            refused, own_snapshot = error, None
        if own_snapshot is not None:
            return own_snapshot
    snapshot = _read_with_entry_points(sources)
    if snapshot is None and refused is not None:
        raise refused
    return snapshot or Snapshot()


def _read_with_entry_points(sources: Sequence[Path | IO[bytes]]) -> Snapshot | None:
    """Return the snapshot of another distribution's log reader, or None if no installed reader
    supports the format.
    """
    from importlib.metadata import (  # noqa: PLC0415 - slow, and our own reader reads most logs
        entry_points,
    )

    for point in entry_points(group=JOB_LOGS_GROUP):
        with suppress(ImportError):  # the entry point of a deleted package
            snapshot: Snapshot | None = point.load()(sources)
            if snapshot is not None:
                return snapshot
    return None


def digest_logs(
    sources: Sequence[Path | IO[bytes]], wanted: LineRanges, *, reads_all: bool = False
) -> LogDigest:
    """Return what a brief quotes from the logs of a job.

    Args:
        sources: the same as for `read_logs`, with streams reset to their beginning.
        wanted: for each file, the first and last line numbers of each range to quote.
        reads_all: read parts without a failure, too.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow, and attempts don't need it

    from firstfault.brief import LogDigest  # noqa: PLC0415 - only briefs need it

    for point in entry_points(group=LOG_DIGESTS_GROUP) if sources else ():
        with suppress(ImportError):  # the entry point of a deleted package
            digest: LogDigest = point.load()(sources, wanted, reads_all=reads_all)
            return digest
    return LogDigest()


# --- sibling attempts of a task -------------------------------------------------------------------


def sibling_attempts(
    uri: str,
    conclusion: Conclusion,
    *,
    strategy: str | None = None,
    seconds: float = _SUMMARIES_TIMEOUT_SECONDS,
) -> tuple[AttemptSummary, ...]:
    """Return summaries of an attempt and of up to ten more, ordered by number, or an empty tuple if
    there is no other attempt.

    Earlier attempts are read concurrently, later attempts one by one until an attempt doesn't
    exist. A summary's note has the reason if an attempt or its documents could not be read. Missing
    attempts are skipped.

    Args:
        uri: the attempt's output prefix, or a path below it.
        conclusion: the conclusion on this attempt.
        strategy: the strategy for the remaining attempts, or None for each attempt's own.
        seconds: timeout for each earlier attempt, and for all later attempts together.
    """
    run_and_number = parse_attempt_number(uri)
    if run_and_number is None:
        return ()
    folder, number = run_and_number

    others = run_sync(_summarize_neighbors(folder, number, ReadOptions(strategy), seconds))
    everyone = [*others, _summarize_failure(number, conclusion)] if others else []
    return tuple(sorted(everyone, key=lambda attempt: attempt.number))


async def _summarize_neighbors(
    folder: str,
    number: int,
    options: ReadOptions,
    seconds: float,
) -> list[AttemptSummary]:
    async def after() -> list[AttemptSummary]:
        # one by one: usually the next attempt doesn't exist, and concurrent reads of ten would be
        # wasted
        deadline = time.monotonic() + seconds
        summaries: list[AttemptSummary] = []
        for other in range(number + 1, number + 1 + _MAX_NEIGHBORS - len(earlier_numbers)):
            remaining_seconds = deadline - time.monotonic()
            summary = (
                await _summarize(folder, other, options, remaining_seconds)
                if remaining_seconds > 0
                else None
            )
            if summary is None:
                break
            summaries.append(summary)
        return summaries

    async def one(other: int) -> list[AttemptSummary]:
        summary = await _summarize(folder, other, options, seconds)
        return [summary] if summary is not None else []

    # earlier attempts have priority; later attempts only fill up the limit
    earlier_numbers = range(max(number - _MAX_NEIGHBORS, 0), number)
    parts = await gather_all(*(one(other) for other in earlier_numbers), after())
    return [summary for part in parts for summary in part]


async def _summarize(
    folder: str,
    number: int,
    options: ReadOptions,
    seconds: float,
) -> AttemptSummary | None:
    """Summarize an attempt; None if it doesn't exist."""
    import asyncio  # noqa: PLC0415 - who reads logs doesn't need it

    try:
        return await asyncio.wait_for(_read(folder, number, options), seconds)
    except asyncio.TimeoutError:
        note = f"could not be read: no answer within {seconds:.1f} s"
        return AttemptSummary(number, Outcome.UNKNOWN, note=note)
    except FirstFaultError as error:
        return AttemptSummary(number, Outcome.UNKNOWN, note=f"could not be read: {error}")


async def _read(folder: str, number: int, options: ReadOptions) -> AttemptSummary | None:
    reader = options.reader(join(folder, str(number)))
    job = await reader.job_async()
    conclusion = reader.conclude_from(job)
    if conclusion is not None:
        return _summarize_failure(number, conclusion)
    # without a failure: outputs distinguish a finished attempt from a running one
    async with open_store(folder) as store:
        has_outputs = not job.all_succeeded and await store.exists(f"{number}/{OUTPUTS}")
    outcome = classify_outcome(None, job, has_outputs=has_outputs)
    if outcome is Outcome.SUCCEEDED:
        return AttemptSummary(number, outcome)
    if job.roster or job.history:
        note = "has neither an error nor outputs; it may still run"
        return AttemptSummary(number, outcome, note=note)
    return None


def _summarize_failure(number: int, conclusion: Conclusion) -> AttemptSummary:
    """Summarize a failed attempt; if no document is readable, the summary has only a note."""
    job, verdict = conclusion.job, conclusion.verdict
    if job.failures or verdict.scope is not Scope.UNDETERMINED:
        return summarize_attempt(number, job, verdict, conclusion.decision)
    count = job.coverage.unreadable
    notes = [
        note.removeprefix(_NOT_READABLE)
        for note in job.coverage.notes
        if note.startswith(_NOT_READABLE)
    ]
    if not count:
        why = "a node reported that it failed, but its error documents are not there"
    elif not notes:
        why = counted(count, "document")
    else:
        why = one_line(notes[0]) + (
            f", and {counted(count - 1, 'more document')}" if count > 1 else ""
        )
    outcome = classify_outcome(verdict, job)
    return AttemptSummary(number, outcome, note=f"could not be read: {why}")
