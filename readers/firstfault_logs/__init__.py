"""Read the logs of a failed job that ran without firstfault: console logs, torchrun's folder,
flight recorder dumps.

A pipeline of small stages:

1. `framing.lines`: bytes of any size, compressed or not, to numbered lines
2. `framing.exports`: CSV, JSON and reversed exports of log collectors to the lines that programs
   printed
3. `framing.labels`: a line to a `LogRecord` with the `Label` of the process that printed it
4. `collector`: records to streams, tracebacks, launcher reports and torch's boxes, split into
   `attempt_logs` by `attempts`
5. `processes`: streams, reports and boxes to processes
6. `assignment`: tracebacks and messages to processes, surest evidence first; `causes` decides
   which of them count
7. `stops`: processes that were stopped, killed for memory, or failed with their GPU
8. `completion`: lines that prove that the job had finished; failures below them are of its teardown
9. `documents`: processes to `WorkerError`s; `outcome` decides whether a job without failures
   succeeded

``launchers.toml`` has what one launcher prints; other patterns are beside the functions that use
them. The result, a `Snapshot`, is judged, reported and retried like that of a recorded job.
`firstfault.attempt` finds `snapshot_of` by its name.
"""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from firstfault.errors import BadDocumentError
from firstfault_logs.causes.empty_starts import find_empty_starts
from firstfault_logs.collector import LogCollector
from firstfault_logs.completion.proof import CompletionProof
from firstfault_logs.documents import build_documents, build_size
from firstfault_logs.flight import documents_of, dumps_at, is_dump
from firstfault_logs.framing.files import Log, find_logs
from firstfault_logs.framing.lines import (
    UTF16_MARKS,
    Utf8Stream,
    decompress,
    find_unpack_command,
    is_text,
    lines_of,
    open_log,
)
from firstfault_logs.outcome import explain_missing_proof
from firstfault_logs.framing.labels import Label
from firstfault_logs.framing.separate_jobs import ask_for_one, describe_cut, find_separate_jobs
from firstfault_logs.torchrun_folder import Worker, with_error_files, workers_in
from firstfault.model import NodePresence, Phase, Place, RestartKind, RestartRecord, WorkerError
from firstfault.model.failure import OF_LOGS
from firstfault.reading.assemble import Snapshot, assemble
from firstfault.reading.additional_sources import merge_sources
from firstfault.strategies import DEFAULT_STRATEGY, get_strategy, run_strategy

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
    snapshot = _build_snapshot(collector, notes)
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
                begin = _read(stream, name, label, collector)
            if begin is not None and len(logs) == 1:
                raise BadDocumentError(_explain_no_text(begin, str(path)))
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            notes.append(f"not readable: {name}: {error}")
    for source in sources:
        if not isinstance(source, Path):
            _read_stream(source, collector, is_only=len(sources) == 1)
    return notes, dumps, workers


def _read_stream(source: IO[bytes], collector: LogCollector, *, is_only: bool) -> None:
    """Read a log from a stream, which stays open."""
    buffered = io.BufferedReader(cast("io.RawIOBase", source), _HEAD_BYTES)
    begin = None
    try:
        begin = _read(decompress(buffered, "stdin"), "stdin", Label(), collector)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise BadDocumentError(
            f"stdin can't be decompressed: {error}; check the command before the pipe"
        ) from error
    finally:
        buffered.detach()
    if begin is not None and is_only:
        raise BadDocumentError(_explain_no_text(begin, "-"))


def _explain_no_text(begin: bytes, path: str) -> str:
    """Return why a file can't be read as a log, and what to do."""
    name = "stdin" if path == "-" else path
    if command := find_unpack_command(begin, path):
        return f"{name} is an archive; unpack it first ({command}), then give its log or folder"
    return f"{name} is neither an error document nor a text; give the job's log"


def _read(stream: IO[bytes], name: str, label: Label, collector: LogCollector) -> bytes | None:
    """Read a log; if it isn't a text, return its first bytes."""
    buffered = io.BufferedReader(cast("io.RawIOBase", stream), _HEAD_BYTES)
    text = buffered
    begin = buffered.peek()
    if begin.startswith(UTF16_MARKS):
        text = io.BufferedReader(Utf8Stream(buffered), _HEAD_BYTES)
        begin = text.peek()
    is_of_text = is_text(begin)
    if is_of_text:
        collector.read(lines_of(text, reads_all=collector.reads_all), name, label)
    buffered.detach()
    return None if is_of_text else begin


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


def _build_snapshot(collector: LogCollector, notes: Sequence[str]) -> Snapshot | None:
    if not collector.line_count:
        return Snapshot(notes=tuple(notes)) if notes else None
    attempts = collector.attempts(find_empty_starts)
    built = [build_documents(attempt, number) for number, attempt in enumerate(attempts)]
    documents, proof = [reading.documents for reading in built], built[-1].proof
    notes = (*notes, *collector.notes, *built[-1].notes)
    why = "" if documents[-1] else explain_missing_proof(attempts[-1], proof)
    if why and (cut := describe_cut(collector.first_texts.values(), collector.find_last_texts())):
        notes = (*notes, cut)
    place = Place(round=len(documents) - 1, node="the log", group_world_size=1, engine=OF_LOGS)
    phase = Phase.JOINED if why else Phase.SUCCEEDED
    # without it, the failure of an earlier attempt would be the outcome of the job
    is_listed = not documents[-1] and (not why or any(documents))
    # a rank that only lines of an earlier start name is named, too
    labels = (stream.label.rank for attempt in attempts for stream in attempt.streams.values())
    named = attempts[-1].size.named_ranks | {rank for rank in labels if rank is not None}
    return Snapshot(
        tuple(document for every in documents for document in every),
        roster=(NodePresence(phase, place),) if is_listed else (),
        notes=(*notes, why) if why else notes,
        restarts=tuple(_restarts(documents)),
        completion=_describe_completion(proof, has_failed=bool(documents[-1])) if not why else "",
        size=build_size(attempts[-1], documents[-1]),
        named_ranks=tuple(sorted(named)),
    )


def _describe_completion(proof: CompletionProof | None, *, has_failed: bool) -> str:
    """Return the sentence that proves the completion; failures below it are of the teardown."""
    if proof is None:
        return ""
    return proof.describe() if has_failed else proof.describe_with_noise()


def _restarts(attempts: Sequence[Sequence[WorkerError]]) -> Iterator[RestartRecord]:
    """Yield a record for each attempt but the last."""
    for number, documents in enumerate(attempts[:-1]):
        if documents:
            verdict = run_strategy(
                get_strategy(DEFAULT_STRATEGY), assemble(Snapshot(tuple(documents)))
            )
            rank = verdict.ranks[0] if len(verdict.ranks) == 1 else None
            why = "its launcher started it again"
            node = verdict.node or ""
            kind = RestartKind.ROUND
            yield RestartRecord(
                kind,
                number,
                verdict.headline,
                restart=True,
                reason=why,
                rank=rank,
                node=node,
            )
