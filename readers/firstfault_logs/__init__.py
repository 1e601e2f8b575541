"""Read the logs of a failed job that ran without firstfault: console logs, torchrun's folder,
flight recorder dumps.

A pipeline of small stages:

1. `framing.lines`: bytes of any size, compressed or not, to numbered lines
2. `framing.exports`: CSV, JSON and reversed exports of log collectors to the lines that programs
   printed
3. `framing.records`: lines to `LogRecord`s without prefixes, which `framing.labels` turns into the
   `Label` of the process that printed them
4. `collector`: records to streams, tracebacks, launcher reports and torch's boxes (`attempt_logs`),
   and to the marks of attempts (`attempts`)
5. `splitting`: the same of each attempt
6. `documents`, for each attempt:

   - `processes`: streams, reports and boxes to processes
   - `assignment`: tracebacks and messages to processes, surest evidence first; `causes` decides
     which of them count
   - `stops`: processes that were stopped, killed for memory, or failed with their GPU
   - `completion`: lines that prove that the job had finished, and what that makes of its failures
   - what is left as `WorkerError`s, in a `Snapshot`

``launchers.toml`` has what one launcher prints; other patterns are beside the functions that use
them. The result is judged, reported and retried like that of a recorded job.
`firstfault.attempt` finds `snapshot_of` by its name.
"""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

from firstfault.errors import BadDocumentError
from firstfault.reading.additional_sources import merge_sources
from firstfault.reading.assemble import Snapshot
from firstfault_logs.collector import LogCollector
from firstfault_logs.documents import build_snapshot
from firstfault_logs.flight import documents_of, dumps_at, is_dump
from firstfault_logs.framing.files import Log, ask_for_one, find_logs, find_separate_jobs
from firstfault_logs.framing.labels import Label
from firstfault_logs.framing.lines import NoTextError, decompress, find_unpack_command, open_log
from firstfault_logs.torchrun_folder import Worker, with_error_files, workers_in

_HEAD_BYTES = 64 * 1024


def snapshot_of(sources: Sequence[Path | IO[bytes]]) -> Snapshot | None:
    """Return the failures and restarts in the logs of a job.

    Args:
        sources: all of one job. Each is a log, a folder of logs at any depth, torchrun's log
            folder, a flight recorder dump, the common start of the names of several dumps, or the
            stream of a log.

    Returns:
        The input of a reader; None without a log. If the last attempt provably succeeded, its only
        node, "the log", has succeeded.

    Raises:
        BadDocumentError: a file isn't text, its compression isn't supported, or the logs are of
            several jobs.
    """
    collector = LogCollector()
    notes, dumps, workers = read_sources(sources, collector)
    if not workers and any(isinstance(source, Path) and source.is_dir() for source in sources):
        jobs = find_separate_jobs(collector.find_training_times())
        if len(jobs) > 1:
            raise BadDocumentError(ask_for_one([files[0] for files in jobs]))
    snapshot = None
    if collector.records.line_count:
        all_notes = [*notes, *collector.records.notes]
        cut = collector.describe_cut()
        snapshot = build_snapshot(collector.split_attempts(), all_notes, cut)
    elif notes:
        snapshot = Snapshot(notes=tuple(notes))
    if workers:
        snapshot = with_error_files(snapshot.documents if snapshot is not None else (), workers)
    if not dumps:
        return snapshot
    documents, unreadable = documents_of(dumps)
    recorded = Snapshot(tuple(documents), unreadable=tuple(unreadable), notes=tuple(notes))
    return (
        merge_sources(snapshot, recorded)
        if snapshot is not None and snapshot.documents
        else recorded
    )


def read_sources(
    sources: Sequence[Path | IO[bytes]], collector: LogCollector
) -> tuple[list[str], list[Path], list[Worker]]:
    """Read the logs of a job into a collector. `sources` are the same as for `snapshot_of`.

    Returns:
        What could not be read, flight recorder dumps, and the workers in torchrun's log folder.
    """
    paths = [source for source in sources if isinstance(source, Path)]
    dumps = [
        dump
        for path in paths
        for dump in ([path] if is_dump(path) else [] if path.is_file() else dumps_at(path))
    ]
    workers = workers_in(paths[0]) if len(paths) == 1 and paths[0].is_dir() else []
    logs = _logs_of_workers(workers) if workers else find_logs(paths, set(dumps))
    notes: list[str] = []
    for path, name, label in logs:
        try:
            with open_log(path) as stream:
                collector.read(stream, name, label)
        except NoTextError as error:
            if len(logs) == 1:
                raise BadDocumentError(_explain_no_text(error.begin, str(path))) from error
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            notes.append(f"not readable: {name}: {error}")
    for source in sources:
        if not isinstance(source, Path):
            _read_stream(source, collector, is_only=len(sources) == 1)
    return notes, dumps, workers


def _read_stream(source: IO[bytes], collector: LogCollector, *, is_only: bool) -> None:
    """Read a log from a stream, which stays open."""
    buffered = io.BufferedReader(cast("io.RawIOBase", source), _HEAD_BYTES)
    try:
        collector.read(decompress(buffered, "stdin"), "stdin", Label())
    except NoTextError as error:
        if is_only:
            raise BadDocumentError(_explain_no_text(error.begin, "-")) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise BadDocumentError(
            f"stdin can't be decompressed: {error}; check the command before the pipe"
        ) from error
    finally:
        buffered.detach()


def _explain_no_text(begin: bytes, path: str) -> str:
    """Return why a file can't be read as a log, and what to do."""
    name = "stdin" if path == "-" else path
    if command := find_unpack_command(begin, path):
        return f"{name} is an archive; unpack it first ({command}), then give its log or folder"
    return f"{name} is neither an error document nor a text; give the job's log"


def _logs_of_workers(workers: Sequence[Worker]) -> list[Log]:
    logs = [
        (
            worker.folder / log,
            f"{worker.name}/{log}",
            Label(node=worker.node, local_rank=worker.local_rank),
        )
        for worker in workers
        for log in ("stdout.log", "stderr.log")
    ]
    return [log for log in logs if log[0].is_file()]  # a FIFO would wait for a writer
