"""Read an attempt, or the logs of a job that ran without firstfault,
and summarize its task's remaining attempts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING

from firstfault.conclude import Conclusion, has_failed
from firstfault.errors import BadDocumentError, FirstFaultError
from firstfault.evidence.outcome import classify_outcome
from firstfault.layout import OUTPUTS, parse_attempt_number
from firstfault.model import DocumentRef, JobErrors, Outcome, Scope
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.reading.assemble import Snapshot
from firstfault.report.data import AttemptSummary, summarize_attempt
from firstfault.store import is_remote, join, open_store
from firstfault.utils.run_sync import gathered, run_sync
from firstfault.utils.text import counted, one_line

if TYPE_CHECKING:
    from firstfault.brief import LineRanges, LogDigest

JOB_LOGS_GROUP = "firstfault.job_logs"
"""Entry-point group of log readers: functions from log files and streams to a snapshot; None:
unsupported format.
"""
_OWN_LOG_READER = "firstfault_logs"
"""The module of firstfault's own, which may be deleted."""
LOG_DIGESTS_GROUP = "firstfault.log_digests"
"""Entry-point group: functions from log files and streams, and the lines to quote,
to a `LogDigest`.
"""
_AROUND = 10
"""Maximum number of further attempts to read: the nearest earlier attempts, then later ones."""
_MOST_ATTEMPTS = 100
_GAP = 2
"""Maximum number of consecutive attempts without files; after a longer gap,
the search for attempts ends.
"""
_SECONDS = 5.0
_NOT_READABLE = "not readable: "
"""Prefix of a coverage note about an unreadable document, before its name and the reason."""
ReaderOf = Callable[[str], MultiErrorFileOutputReader]
"""Creates the reader for a URI."""


def find_run_logs(uri: str) -> dict[str, str]:
    """Return the log files of a ``firstfault run`` attempt, by pod;
    empty for attempts of an engine.
    """
    here = parse_attempt_number(uri)
    if here is None or is_remote(uri):
        return {}
    folder = Path(here[0].removeprefix("file://")) / "logs" / f"attempt-{here[1]}"
    return {log.stem: str(log) for log in sorted(folder.glob("*.log"))}


@dataclass(frozen=True, slots=True)
class ReadAttempt:
    """The result of reading an attempt."""

    uri: str
    """URI of the output prefix, the errors/ folder or the only document."""
    reader: MultiErrorFileOutputReader
    job: JobErrors
    conclusion: Conclusion | None
    """None: the attempt didn't fail, or has no files."""
    has_outputs: bool = False
    """Whether the attempt has outputs; not checked after a failure."""
    is_of_logs: bool = False
    """Whether it was read from the logs of a job without firstfault."""
    sources: Sequence[Path | IO[bytes]] = ()
    """Logs that were read."""

    @property
    def outcome(self) -> Outcome:
        """How the attempt ended."""
        verdict = self.conclusion.verdict if self.conclusion is not None else None
        return classify_outcome(verdict, self.job, has_outputs=self.has_outputs)

    @property
    def exists(self) -> bool:
        """Whether the attempt failed, succeeded, or has at least a roster."""
        return self.outcome is not Outcome.UNKNOWN or bool(self.job.roster)


def read_attempt(uri: str, make_reader: ReaderOf, beside: Sequence[Path] = ()) -> ReadAttempt:
    """Read an attempt.

    In the folder of all attempts of a task, this is the last failed attempt, or the last attempt if
    none failed. In a local folder of runs, it is an attempt of the latest run. A local folder
    without attempts, and a local file that isn't an error document, are read as logs of a job
    without firstfault.

    Args:
        uri: an output prefix, an errors/ folder, a document, the folder of all attempts of a task,
            or of logs.
        make_reader: creates the reader.
        beside: additional logs and flight recorder dumps of the same job.

    Raises:
        StoreError: an attempt could not be listed, or the only document could not be read.
        BadDocumentError: a log has no known format.
    """
    path = None if is_remote(uri) else Path(uri.removeprefix("file://"))
    if path is not None and path.is_file() and path.suffix != ".pb":
        return read_logs([path, *beside], uri, make_reader)
    # documents are better evidence than logs, so logs are read only without documents
    found = _read_documents(uri, _with_beside(make_reader, beside) if beside else make_reader)
    if found.exists or path is None or uri.rstrip("/").endswith((".pb", "/errors")):
        return replace(found, sources=beside)
    logs = read_logs([path, *beside], uri, make_reader)
    return logs if logs.conclusion is not None or logs.job.coverage.notes or logs.exists else found


def _with_beside(make_reader: ReaderOf, beside: Sequence[Path]) -> ReaderOf:
    """Return a factory of readers that add the evidence in logs and flight recorder dumps."""
    found = _read_logs_snapshot(beside)
    return lambda uri: make_reader(uri).with_beside(found)


def _read_documents(uri: str, make_reader: ReaderOf) -> ReadAttempt:
    """Read an attempt like `read_attempt`, without logs; if no attempt is found,
    the result's `exists` is False.
    """
    here = _read_one(uri, make_reader)
    if here.exists or uri.rstrip("/").endswith((".pb", "/errors")):
        return here
    found = None
    missing = 0
    for number in range(_MOST_ATTEMPTS):
        attempt = _read_one(join(uri, str(number)), make_reader)
        missing = 0 if attempt.exists else missing + 1
        if missing > _GAP:
            break
        if missing:
            continue  # an attempt without files: its pods may never have started
        # the last failed attempt wins over a later attempt that succeeded or is still running
        if attempt.conclusion is not None or found is None or found.conclusion is None:
            found = attempt
    return found or _newest_run(uri, make_reader) or here


def _newest_run(uri: str, make_reader: ReaderOf) -> ReadAttempt | None:
    """Read the last attempt of the latest run in a local folder of runs;
    None if `uri` isn't such a folder.
    """
    from firstfault.run_folder import (  # noqa: PLC0415 - who reads logs doesn't need it
        find_newest_run,
    )

    run = None if is_remote(uri) else find_newest_run(Path(uri.removeprefix("file://")))
    return _read_documents(str(run), make_reader) if run is not None else None


def read_logs(sources: Sequence[Path | IO[bytes]], uri: str, make_reader: ReaderOf) -> ReadAttempt:
    """Read the logs and flight recorder dumps of a job that ran without firstfault.

    Args:
        sources: log files, log folders, flight recorder dumps or a log stream, all of one job.
        uri: the name of the sources in messages.
        make_reader: creates the reader.

    Raises:
        BadDocumentError: a source has no known format.
    """
    job = make_reader(uri).job_of(_read_logs_snapshot(sources))
    # a report on logs must not show an output prefix
    here = "" if has_failed(job) else uri
    reader = make_reader(here)
    return ReadAttempt(
        here,
        reader,
        job,
        reader.conclude_from(job),
        is_of_logs=True,
        sources=sources,
    )


def _read_logs_snapshot(sources: Sequence[Path | IO[bytes]]) -> Snapshot:
    # our own reader first: to list entry points takes as long as to read a small log
    refused = None
    with suppress(ModuleNotFoundError):
        try:
            own: Snapshot | None = import_module(_OWN_LOG_READER).snapshot_of(sources)
        except BadDocumentError as error:
            refused, own = error, None
        if own is not None:
            return own
    snapshot = _read_with_entry_points(sources)
    if snapshot is None and refused is not None:
        raise refused
    return snapshot or Snapshot()


def _read_with_entry_points(sources: Sequence[Path | IO[bytes]]) -> Snapshot | None:
    """Return what the log reader of another distribution reads; None: there is none,
    or none knows the format.
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
        sources: as of `read_logs`; streams are at their beginning again.
        wanted: by file, the numbers of the first and the last line of each place to quote.
        reads_all: read parts without a failure, too.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow, and attempts don't need it

    from firstfault.brief import LogDigest  # noqa: PLC0415 - only briefs need it

    for point in entry_points(group=LOG_DIGESTS_GROUP) if sources else ():
        with suppress(ImportError):  # the entry point of a deleted package
            found: LogDigest = point.load()(sources, wanted, reads_all=reads_all)
            return found
    return LogDigest()


def read_document(data: bytes, name: str, make_reader: ReaderOf) -> ReadAttempt:
    """Read one error document from bytes, such as standard input. `name`
    identifies the source in errors.

    Raises:
        BadDocumentError: the bytes aren't a valid document.
    """
    from firstfault.reading.fetch import (  # noqa: PLC0415 - who reads logs doesn't need it
        sorted_out,
    )
    from firstfault.wire.documents import decode  # noqa: PLC0415 - as above

    reader = make_reader("")
    job = reader.job_of(sorted_out([decode(data, DocumentRef(name, size=len(data)))]))
    return ReadAttempt("", reader, job, reader.conclude_from(job))


def _read_one(uri: str, make_reader: ReaderOf) -> ReadAttempt:
    reader = make_reader(uri)
    job = reader.job()
    conclusion = reader.conclude_from(job)
    # only an output prefix can have outputs; the check is a request, so skip it after a failure
    may_succeed = conclusion is None and not uri.rstrip("/").endswith((".pb", "/errors"))
    has_outputs = may_succeed and reader.exists()
    return ReadAttempt(uri, reader, job, conclusion, has_outputs)


def sibling_attempts(
    uri: str,
    conclusion: Conclusion,
    *,
    strategy: str | None = None,
    seconds: float = _SECONDS,
) -> tuple[AttemptSummary, ...]:
    """Return summaries of an attempt and of up to ten more, by number;
    empty if it is the only attempt.

    Earlier attempts are read concurrently, later attempts one by one until an attempt doesn't
    exist. A summary's note has the reason if an attempt or its documents could not be read. Missing
    attempts are skipped.

    Args:
        uri: the attempt's output prefix, or a path below it.
        conclusion: the conclusion on this attempt.
        strategy: the strategy for the remaining attempts; None: each attempt's own.
        seconds: timeout for each earlier attempt, and for all later attempts together.
    """
    here = parse_attempt_number(uri)
    if here is None:
        return ()
    folder, number = here

    def make_reader(other: int) -> MultiErrorFileOutputReader:
        return MultiErrorFileOutputReader(join(folder, str(other)), strategy=strategy)

    others = run_sync(_summarize_neighbors(folder, number, make_reader, seconds))
    everyone = [*others, _summarize_failure(number, conclusion)] if others else []
    return tuple(sorted(everyone, key=lambda attempt: attempt.number))


async def _summarize_neighbors(
    folder: str,
    number: int,
    make_reader: Callable[[int], MultiErrorFileOutputReader],
    seconds: float,
) -> list[AttemptSummary]:
    async def after() -> list[AttemptSummary]:
        # one by one: usually the next attempt doesn't exist, and concurrent reads of ten would be
        # wasted
        deadline = time.monotonic() + seconds
        found: list[AttemptSummary] = []
        for other in range(number + 1, number + 1 + _AROUND - len(before)):
            left = deadline - time.monotonic()
            summary = (
                await _summarize(folder, other, make_reader(other), left) if left > 0 else None
            )
            if summary is None:
                break
            found.append(summary)
        return found

    async def one(other: int) -> list[AttemptSummary]:
        summary = await _summarize(folder, other, make_reader(other), seconds)
        return [summary] if summary is not None else []

    # earlier attempts have priority; later attempts only fill up the limit
    before = range(max(number - _AROUND, 0), number)
    found = await gathered(*(one(other) for other in before), after())
    return [summary for part in found for summary in part]


async def _summarize(
    folder: str,
    number: int,
    reader: MultiErrorFileOutputReader,
    seconds: float,
) -> AttemptSummary | None:
    """Summarize an attempt; None if it doesn't exist."""
    import asyncio  # noqa: PLC0415 - who reads logs doesn't need it

    try:
        return await asyncio.wait_for(_read(folder, number, reader), seconds)
    except asyncio.TimeoutError:
        note = f"could not be read: no answer within {seconds:.1f} s"
        return AttemptSummary(number, Outcome.UNKNOWN, note=note)
    except FirstFaultError as error:
        return AttemptSummary(number, Outcome.UNKNOWN, note=f"could not be read: {error}")


async def _read(
    folder: str, number: int, reader: MultiErrorFileOutputReader
) -> AttemptSummary | None:
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
