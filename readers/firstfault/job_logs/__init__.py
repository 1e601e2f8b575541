"""Reads what a failed job left that ran without firstfault: console logs, torchrun's log folder, flight recorder dumps.

`snapshot_of` is found by the entry point ``firstfault.job_logs``. What it returns takes the road of every attempt: the
rules of `firstfault.evidence`, the retry policy, the report.
"""

from __future__ import annotations

import lzma
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from firstfault.credentials import redact
from firstfault.errors import BadDocumentError
from firstfault.job_logs.book import Attempt, Book
from firstfault.job_logs.documents import Documents
from firstfault.job_logs.flight import documents_of, dumps_at, is_dump
from firstfault.job_logs.lines import files_below, is_text, lines_of, open_log, stream_of
from firstfault.job_logs.owners import RANK_WORD, Owner
from firstfault.job_logs.torchrun_folder import snapshot_of_torchrun
from firstfault.model import NodePresence, Phase, Place, RestartKind, RestartRecord, WorkerError
from firstfault.model.failure import OF_LOGS
from firstfault.reading.assemble import Snapshot, assemble
from firstfault.reading.beside import joined
from firstfault.strategies import DEFAULT_STRATEGY, get_strategy, run_strategy
from firstfault.text import one_line

_HEAD = 64 * 1024
_LOG = re.compile(
    r"(?i)\.(?:log|out|err|txt|stderr|stdout|jsonl?|gz|bz2|xz|zst|[oe]\d+|\d+)$|(?:log|stderr|stdout|slurm|nohup)[^/]*$"
    r"|^(?:[^.]*(?:rank|worker|node|task|pod|proc)[^.]*|\d+)$"
)
"""Names of files in a folder that may be logs."""
_ERROR = re.compile(r"rror\b|xception\b|FATAL|CRITICAL|[Kk]illed|[Aa]borted|[Ff]ailed\b|\bXid\b|[Tt]imed out|\breset\b")


def snapshot_of(sources: Sequence[Path | IO[bytes]]) -> Snapshot | None:
    """Return what the logs of a job tell.

    Args:
        sources: of one job. Each is a log, a folder of logs in any depth, torchrun's log folder, a dump of a flight
            recorder, the begin of the names of several, or a stream of a log.

    Returns:
        What a reader takes; None if there is no log. If nothing in a training's log tells of a failure, its only node
        has succeeded.

    Raises:
        BadDocumentError: a file is no text, or it is compressed in a way that cannot be read here.
    """
    paths = [source for source in sources if isinstance(source, Path)]
    dumps = [dump for path in paths for dump in ([path] if is_dump(path) else [] if path.is_file() else dumps_at(path))]
    known = set(dumps)
    if len(paths) == 1 and paths[0].is_dir() and (found := snapshot_of_torchrun(paths[0])) is not None:
        return with_dumps(found, dumps)
    logs = {path: path.name for path in paths if path.is_file() and path not in known}
    for folder in filter(Path.is_dir, paths):
        logs |= {path: str(path.relative_to(folder)) for path in _logs_in(folder, known)}
    book = Book()
    notes = _read(logs, book)
    for source in sources:
        if not isinstance(source, Path):
            _read_stream(source, "stdin", Owner(), book)
    return with_dumps(_of_book(book, notes), dumps)


def with_dumps(snapshot: Snapshot | None, paths: Sequence[Path]) -> Snapshot | None:
    """Return a snapshot with what the flight recorders of its ranks tell."""
    if not paths:
        return snapshot
    documents, unreadable = documents_of(paths)
    recorded = Snapshot(tuple(documents), unreadable=tuple(unreadable))
    if snapshot is None or not snapshot.documents:
        return replace(recorded, notes=snapshot.notes if snapshot is not None else ())
    return joined(snapshot, recorded)


def _read_stream(stream: IO[bytes], name: str, owner: Owner, book: Book) -> bool:
    """Read a log; return whether it is a text."""
    begin = getattr(stream, "read1", stream.read)(_HEAD)
    if is_text(begin):
        book.read(lines_of(stream_of(begin, stream)), name, owner)
    return is_text(begin)


def _logs_in(folder: Path, dumps: Collection[Path]) -> list[Path]:
    return [path for path in files_below(folder) if path not in dumps and _LOG.search(path.name)]


def _read(logs: Mapping[Path, str], book: Book) -> tuple[str, ...]:
    """Read logs, each with its name; return what could not be read."""
    notes = []
    owners = _owners(list(logs.values()))
    for path, name in logs.items():
        try:
            with open_log(path) as stream:
                if not _read_stream(stream, name, owners[name], book) and len(logs) == 1:
                    raise BadDocumentError(f"{path} is neither an error document nor a text; give the job's log")
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            notes.append(f"not readable: {name}: {error}")
    return tuple(notes)


def _owners(names: Sequence[str]) -> dict[str, Owner]:
    """Return who wrote each file: by a rank in its name, by the only number that differs, else by its name."""
    if len(names) <= 1:
        return dict.fromkeys(names, Owner())
    numbers = {name: re.findall(r"\d+", name) for name in names}
    counts = {len(found) for found in numbers.values()}
    columns = list(zip(*numbers.values(), strict=False)) if len(counts) == 1 else []
    differ = [at for at, column in enumerate(columns) if len(set(column)) > 1]
    owners = {}
    for name in names:
        if ranked := RANK_WORD.search(name):
            owners[name] = Owner(rank=int(ranked[1]))
        elif len(differ) == 1 and set(map(int, columns[differ[0]])) == set(range(len(set(columns[differ[0]])))):
            owners[name] = Owner(label=int(numbers[name][differ[0]]))
        else:
            owners[name] = Owner(node=re.sub(r"\.(?:log|out|err|txt|stderr|stdout|gz)$", "", name))
    return owners


def _of_book(book: Book, notes: tuple[str, ...] = ()) -> Snapshot | None:
    if not book.lines:
        return Snapshot(notes=notes) if notes else None
    of_attempts = book.attempts()
    made = [Documents(attempt, number) for number, attempt in enumerate(of_attempts)]
    attempts = [each.all() for each in made]
    notes = (*notes, *made[-1].notes)
    documents = tuple(document for found in attempts for document in found)
    if not attempts[-1]:
        if why := _why_unknown(of_attempts[-1]):
            return Snapshot(documents, notes=(*notes, why))
        place = Place(round=len(attempts) - 1, node="the log", group_world_size=1, engine=OF_LOGS)
        return Snapshot(documents, roster=(NodePresence(Phase.SUCCEEDED, place),), notes=notes)
    return Snapshot(documents, notes=notes, restarts=tuple(_restarts(attempts)))


def _restarts(attempts: Sequence[Sequence[WorkerError]]) -> Iterator[RestartRecord]:
    """Yield a record for each attempt but the last."""
    for number, documents in enumerate(attempts[:-1]):
        if documents:
            verdict = run_strategy(get_strategy(DEFAULT_STRATEGY), assemble(Snapshot(tuple(documents))))
            rank = verdict.ranks[0] if len(verdict.ranks) == 1 else None
            why = "its launcher started it again"
            node, kind = verdict.node or "", RestartKind.ROUND
            yield RestartRecord(kind, number, verdict.headline, restart=True, reason=why, rank=rank, node=node)


def _why_unknown(attempt: Attempt) -> str:
    """Return why it is not known whether an attempt without a failure has succeeded; empty: it has."""
    streams = [stream for stream in attempt.streams.values() if stream.tail]
    if not (attempt.is_torchrun or attempt.told or any(stream.progress for stream in streams)):
        return "nothing in it tells of a training or of a failure"
    if not streams:
        return "its launcher started it again, and no line tells how that ended"
    files = {stream.file for stream in streams}
    of_training = {stream.file for stream in streams if stream.progress is not None}
    if len(files) > 1 and len(of_training) * 2 < len(files):
        return f"no line tells of a failure, and {len(of_training)} of its {len(files)} files are logs of a training"
    last = max(streams, key=lambda stream: stream.tail[-1].number, default=None)
    if last is not None and _ERROR.search(last.tail[-1].text):
        return f"whether it failed is not told; its last line is {one_line(redact(last.tail[-1].text), 100)!r}"
    if last is not None and last.progress is not None and last.progress.number == last.tail[-1].number:
        at = f"{last.progress.what} {last.progress.step}"
        return f"no line tells of a failure; it ends at {at}: the job may run on, or was killed"
    return ""
