"""Reads an attempt, or what a launcher without firstfault left, and summarises all further attempts of its task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from firstfault.conclude import Conclusion, has_failed
from firstfault.errors import FirstFaultError
from firstfault.layout import OUTPUTS, parse_attempt_number
from firstfault.model import DocumentRef, JobErrors, Scope
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.reading.assemble import Snapshot
from firstfault.reading.fetch import sorted_out
from firstfault.report.data import AttemptSummary, summarize_attempt
from firstfault.run_folder import runs_in
from firstfault.store import is_remote, join, open_store
from firstfault.utils.run_sync import gathered, run_sync
from firstfault.utils.text import counted, one_line
from firstfault.wire.documents import decode

JOB_LOGS_GROUP = "firstfault.job_logs"
"""Entry-point group: a function from paths and streams of logs to a snapshot; None if it knows nothing like them."""
_AROUND = 10
"""Maximum of other attempts to read: the nearest earlier ones, then later ones."""
_MOST_ATTEMPTS = 100
_GAP = 2
"""This many attempts in a row may have left nothing."""
_SECONDS = 5.0
_NOT_READABLE = "not readable: "
"""Prefix of a coverage's note about an unreadable document; the name and the reason follow."""
ReaderOf = Callable[[str], MultiErrorFileOutputReader]
"""Makes the reader of a URI."""


def find_run_logs(uri: str) -> dict[str, str]:
    """Return the log files of an attempt of ``firstfault run``, by pod; empty for any other attempt."""
    here = parse_attempt_number(uri)
    if here is None or is_remote(uri):
        return {}
    folder = Path(here[0].removeprefix("file://")) / "logs" / f"attempt-{here[1]}"
    return {log.stem: str(log) for log in sorted(folder.glob("*.log"))}


@dataclass(frozen=True, slots=True)
class ReadAttempt:
    """An attempt, read once."""

    uri: str
    """Of its output prefix, its errors/ folder or its only document."""
    reader: MultiErrorFileOutputReader
    job: JobErrors
    conclusion: Conclusion | None
    """None: it didn't fail, or nothing is there."""
    succeeded: bool
    """Whether it has outputs and didn't fail."""
    is_of_logs: bool = False
    """Whether it was read from the logs of a job without firstfault."""

    @property
    def exists(self) -> bool:
        """Whether anything is known of it."""
        return self.conclusion is not None or self.succeeded or bool(self.job.roster)


def read_attempt(uri: str, make_reader: ReaderOf, beside: Sequence[Path] = ()) -> ReadAttempt:
    """Read an attempt; if `uri` is the folder of all attempts, the last one that failed, else the last one.

    If it is a local folder of runs, it is that of the run that began last. A local folder in which no attempt is found
    may hold the logs of a job without firstfault, as may a local file that isn't an error document.

    `uri` is of an output prefix, an errors/ folder, a document, or the folder of all attempts of a task; `beside` are
    logs and dumps of flight recorders of the same job.

    Raises:
        StoreError: an attempt could not be listed, or the only document could not be read.
        BadDocumentError: a log can't be read as one.
    """
    path = None if is_remote(uri) else Path(uri.removeprefix("file://"))
    if path is not None and path.is_file() and path.suffix != ".pb":
        return read_logs([path, *beside], uri, make_reader)
    found = _read_documents(uri, _with_beside(make_reader, beside) if beside else make_reader)
    if found.exists or path is None or uri.rstrip("/").endswith((".pb", "/errors")):
        return found
    logs = read_logs([path, *beside], uri, make_reader)
    return logs if logs.conclusion is not None or logs.job.coverage.notes or logs.exists else found


def _with_beside(make_reader: ReaderOf, beside: Sequence[Path]) -> ReaderOf:
    """Return a maker of readers that add what logs and flight recorders contain."""
    found = _read_logs_snapshot(beside)
    return lambda uri: make_reader(uri).with_beside(found)


def _read_documents(uri: str, make_reader: ReaderOf) -> ReadAttempt:
    """As `read_attempt`, without logs; the result's `exists` is False if no attempt is found."""
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
            continue  # its pods may never have started
        if attempt.conclusion is not None or found is None or found.conclusion is None:
            found = attempt
    return found or _newest_run(uri, make_reader) or here


def _newest_run(uri: str, make_reader: ReaderOf) -> ReadAttempt | None:
    """Return the last attempt of the last run in a local folder of runs; None if `uri` isn't one."""
    runs = [] if is_remote(uri) else runs_in(Path(uri.removeprefix("file://")))
    return _read_documents(str(runs[0]), make_reader) if runs else None


def read_logs(sources: Sequence[Path | IO[bytes]], uri: str, make_reader: ReaderOf) -> ReadAttempt:
    """Return what a job left that ran without firstfault.

    `sources` are files and folders of logs, dumps of flight recorders, or a stream of a log, all of one job; `uri` is
    their name.

    Raises:
        BadDocumentError: it can't be read as a log.
    """
    job = make_reader(uri).job_of(_read_logs_snapshot(sources))
    # a report names no output prefix: there is none
    here = "" if has_failed(job) else uri
    reader = make_reader(here)
    return ReadAttempt(here, reader, job, reader.conclude_from(job), succeeded=False, is_of_logs=True)


def _read_logs_snapshot(sources: Sequence[Path | IO[bytes]]) -> Snapshot:
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow, and attempts don't need it

    snapshot = None
    for point in entry_points(group=JOB_LOGS_GROUP):
        with suppress(ImportError):  # its folder was deleted
            snapshot = snapshot or point.load()(sources)
    return snapshot or Snapshot()


def read_document(data: bytes, name: str, make_reader: ReaderOf) -> ReadAttempt:
    """Read one error document that is in no storage.

    `name` is used in errors: the place that its bytes are from.

    Raises:
        BadDocumentError: it isn't valid.
    """
    reader = make_reader("")
    job = reader.job_of(sorted_out([decode(data, DocumentRef(name, size=len(data)))]))
    return ReadAttempt("", reader, job, reader.conclude_from(job), succeeded=False)


def _read_one(uri: str, make_reader: ReaderOf) -> ReadAttempt:
    reader = make_reader(uri)
    job = reader.job()
    conclusion = reader.conclude_from(job)
    may_succeed = conclusion is None and not uri.rstrip("/").endswith((".pb", "/errors"))
    return ReadAttempt(uri, reader, job, conclusion, may_succeed and reader.exists())


def sibling_attempts(
    uri: str, conclusion: Conclusion, *, strategy: str | None = None, seconds: float = _SECONDS
) -> tuple[AttemptSummary, ...]:
    """Return summaries of an attempt and of up to ten more, by number; empty if it is the only one.

    Earlier attempts are read concurrently, later ones one by one until the first that doesn't exist. The note of an
    attempt has the reason why it, or its documents, could not be read. A missing attempt is left out.

    `uri` is the attempt's output prefix, or a path below it. Without a `strategy`, that of each other job is taken.
    `seconds` is the longest read of each earlier attempt, and of all later ones together.
    """
    here = parse_attempt_number(uri)
    if here is None:
        return ()
    folder, number = here

    def make_reader(other: int) -> MultiErrorFileOutputReader:
        return MultiErrorFileOutputReader(join(folder, str(other)), strategy=strategy)

    others = run_sync(_around(folder, number, make_reader, seconds))
    everyone = [*others, _concluded(number, conclusion)] if others else []
    return tuple(sorted(everyone, key=lambda attempt: attempt.number))


async def _around(
    folder: str, number: int, make_reader: Callable[[int], MultiErrorFileOutputReader], seconds: float
) -> list[AttemptSummary]:
    async def after() -> list[AttemptSummary]:
        deadline = time.monotonic() + seconds
        found: list[AttemptSummary] = []
        for other in range(number + 1, number + 1 + _AROUND - len(before)):
            left = deadline - time.monotonic()
            summary = await _summary(folder, other, make_reader(other), left) if left > 0 else None
            if summary is None:
                break
            found.append(summary)
        return found

    async def one(other: int) -> list[AttemptSummary]:
        summary = await _summary(folder, other, make_reader(other), seconds)
        return [summary] if summary is not None else []

    before = range(max(number - _AROUND, 0), number)
    found = await gathered(*(one(other) for other in before), after())
    return [summary for part in found for summary in part]


async def _summary(
    folder: str, number: int, reader: MultiErrorFileOutputReader, seconds: float
) -> AttemptSummary | None:
    """Return the summary of an attempt; None if it doesn't exist."""
    try:
        return await asyncio.wait_for(_read(folder, number, reader), seconds)
    except asyncio.TimeoutError:
        return AttemptSummary(number, note=f"could not be read: no answer within {seconds:.1f} s")
    except FirstFaultError as error:
        return AttemptSummary(number, note=f"could not be read: {error}")


async def _read(folder: str, number: int, reader: MultiErrorFileOutputReader) -> AttemptSummary | None:
    job = await reader.job_async()
    conclusion = reader.conclude_from(job)
    if conclusion is not None:
        return _concluded(number, conclusion)
    async with open_store(folder) as store:
        if job.all_succeeded or await store.exists(f"{number}/{OUTPUTS}"):
            return AttemptSummary(number, note="succeeded")
    if job.roster or job.history:
        return AttemptSummary(number, note="has neither an error nor outputs; it may still run")
    return None


def _concluded(number: int, conclusion: Conclusion) -> AttemptSummary:
    """Return the summary of a failed attempt; with a note alone if no document is readable."""
    job, verdict = conclusion.job, conclusion.verdict
    if job.failures or verdict.scope is not Scope.UNDETERMINED:
        return summarize_attempt(number, job, verdict, conclusion.decision)
    count = job.coverage.unreadable
    notes = [note.removeprefix(_NOT_READABLE) for note in job.coverage.notes if note.startswith(_NOT_READABLE)]
    if not count:
        why = "a node reported that it failed, but its error documents are not there"
    elif not notes:
        why = counted(count, "document")
    else:
        why = one_line(notes[0]) + (f", and {counted(count - 1, 'more document')}" if count > 1 else "")
    return AttemptSummary(number, note=f"could not be read: {why}")
