"""The log folder of a torchrun: each worker's ``error.json``, and what it printed.

torchrun lays it out as ``<log-dir>/<run id>_<random>/attempt_<k>/<local rank>/``, with one folder per node.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from firstfault.job_logs.book import Book
from firstfault.job_logs.documents import Documents
from firstfault.job_logs.lines import lines_of, open_log
from firstfault.job_logs.owners import Owner
from firstfault.job_logs.processes import exception_in
from firstfault.model import DocumentRef, ExceptionInfo, Kind, Origin, Place, WorkerError, Writer
from firstfault.reading.assemble import Snapshot, Unreadable
from firstfault.text import clean, one_line

if TYPE_CHECKING:
    from pathlib import Path

_ATTEMPT = re.compile(r"attempt_(\d{1,6})")
_ERROR = "error.json"
_MAX_ERROR_BYTES = 2 * 1024 * 1024
_MAX_TEXT = 64 * 1024
_SECOND_NS = 1_000_000_000
_LAST_SECOND = 253_402_300_799
"""Of the year 9999."""
_RANDOM = len("_hbse3iwq")
_APART_S = 3.0
"""Folders of one run begin at most so much after another one ended: torchrun itself takes longer to start again."""
_NOTES = (
    "torchrun's log folder has times in whole seconds, and neither exit codes nor signals",
    "a worker that was killed, or stopped by torchrun, leaves no error.json",
)


@dataclass(frozen=True, slots=True)
class _Node:
    """The last attempt of one node."""

    name: str
    number: int
    """Of the attempt: torchrun's restart count."""
    workers: tuple[tuple[int | None, Path], ...]
    """Local rank and folder of each."""


def snapshot_of_torchrun(folder: Path) -> Snapshot | None:
    """Return what the workers of the last attempt left; None if it is not a log folder of torchrun.

    If no worker left an error, the snapshot has notes alone.

    Args:
        folder: torchrun's ``--log-dir``, a folder of one run or attempt in it, or a folder with an ``error.json``.
    """
    nodes = _nodes(folder)
    if not nodes:
        return None
    printed = _printed(nodes)
    documents: list[WorkerError] = []
    unreadable: list[Unreadable] = []
    are_global = True
    for node in nodes:
        found = [_read(node, local_rank, path, printed) for local_rank, path in node.workers]
        unreadable += [item for item in found if isinstance(item, Unreadable)]
        failures = [item for item in found if isinstance(item, WorkerError)]
        # torchrun numbers the workers of a node one after the other
        first = {
            failure.place.rank - failure.place.local_rank
            for failure in failures
            if failure.place.rank is not None and failure.place.local_rank is not None
        }
        offset = first.pop() if len(first) == 1 else None
        are_global = are_global and offset is not None
        if offset is None and len(nodes) == 1:
            offset = 0  # local ranks: there is no other node's to mistake
        documents += [_ranked(failure, offset) for failure in failures]
    if all(document.writer is Writer.AGENT for document in documents) and not unreadable:
        return Snapshot(notes=("no worker left an error.json, and no stderr.log ends with a traceback",))
    notes = [*_NOTES]
    if not are_global:
        notes.append("ranks are local ranks: the folder does not tell the global ones")
    if len(nodes) > 1:
        notes.append(f"{len(nodes)} folders of the run {_run_of(nodes[0].name)!r} are taken for its nodes")
    return Snapshot(documents=tuple(documents), unreadable=tuple(unreadable), notes=tuple(notes))


# --- folders --------------------------------------------------------------------------------------------------------


def _nodes(folder: Path) -> list[_Node]:
    if (folder / _ERROR).is_file():
        is_worker = folder.name.isdecimal() and _ATTEMPT.fullmatch(folder.parent.name) is not None
        return [_Node(folder.name, 0, ((int(folder.name) if is_worker else None, folder),))]
    attempt = _ATTEMPT.fullmatch(folder.name)
    if attempt is not None and (workers := _workers(folder)):
        return [_Node(folder.parent.name, int(attempt[1]), workers)]
    own = _last_attempt(folder)
    if own is not None:
        return [own]
    return _of_last_run([node for path in _folders(folder) if (node := _last_attempt(path)) is not None])


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def _workers(attempt: Path) -> tuple[tuple[int | None, Path], ...]:
    return tuple(sorted((int(path.name), path) for path in _folders(attempt) if path.name.isdecimal()))


def _last_attempt(run: Path) -> _Node | None:
    attempts = [(int(match[1]), path) for path in _folders(run) if (match := _ATTEMPT.fullmatch(path.name))]
    for number, path in sorted(attempts, reverse=True):
        if workers := _workers(path):
            return _Node(run.name, number, workers)
    return None


def _run_of(name: str) -> str:
    """Return the run's id, without the eight random characters behind it, which may be underscores too."""
    return name[:-_RANDOM] if name[-_RANDOM : 1 - _RANDOM] == "_" else name


def _of_last_run(nodes: Sequence[_Node]) -> list[_Node]:
    """Return the folders of the newest run: those with its id that were in use at the same time."""
    spans = {node.name: _span(node) for node in nodes}
    newest = max(nodes, key=lambda node: spans[node.name][1], default=None)
    if newest is None:
        return []
    began, ended = spans[newest.name]
    return [
        node
        for node in nodes
        if _run_of(node.name) == _run_of(newest.name)
        and spans[node.name][1] >= began - _APART_S
        and spans[node.name][0] <= ended + _APART_S
    ]


def _span(node: _Node) -> tuple[float, float]:
    """Return when a node's folder was first and last written, seconds."""
    times = []
    for _, worker in node.workers:
        with suppress(OSError):  # a running job may remove files
            times += [path.lstat().st_mtime for path in (worker.parent, worker, *worker.iterdir())]
    return min(times, default=0.0), max(times, default=0.0)


# --- workers --------------------------------------------------------------------------------------------------------


def _printed(nodes: Sequence[_Node]) -> dict[tuple[str, int | None], WorkerError]:
    """Return what the workers' logs tell, by node and local rank."""
    book = Book()
    for node in nodes:
        for local_rank, folder in node.workers:
            for log in (folder / "stdout.log", folder / "stderr.log"):
                with suppress(OSError):
                    if log.is_file():  # a FIFO would wait for a writer
                        name = f"{node.name}/attempt_{node.number}/{local_rank}/{log.name}"
                        with open_log(log) as stream:
                            book.read(lines_of(stream), name, Owner(node=node.name, local_rank=local_rank))
    attempts = (Documents(attempt, 0).all() for attempt in reversed(book.attempts()))
    found = next(filter(None, attempts), [])
    return {(item.place.node, item.place.local_rank): item for item in found if item.place.local_rank is not None}


def _read(
    node: _Node, local_rank: int | None, folder: Path, printed: dict[tuple[str, int | None], WorkerError]
) -> WorkerError | Unreadable:
    place = Place(node=node.name, local_rank=local_rank, restart_count=node.number, engine="torchrun")
    path = folder / _ERROR
    document = DocumentRef(f"{node.name}/attempt_{node.number}/{local_rank}/{_ERROR}", str(path))
    silent = WorkerError(
        "SYSTEM:NoErrorFile",
        "",
        Kind.NON_RECOVERABLE,
        Origin.UNKNOWN,
        worker=node.name,
        place=place,
        writer=Writer.AGENT,
        documents=(document,),
    )
    if (told := printed.get((node.name, local_rank))) is not None:
        documents = told.documents or silent.documents
        silent = replace(told, place=replace(place, rank=told.rank), sent_signals=(), documents=documents)
        if told.sent_signals:
            silent = replace(silent, code="SYSTEM:NoErrorFile", writer=Writer.AGENT)
    if not path.is_file():
        return silent
    try:
        if path.stat().st_size > _MAX_ERROR_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes, more than the limit of {_MAX_ERROR_BYTES}")  # noqa: TRY301
        said = json.loads(path.read_text(encoding="utf-8", errors="replace"))["message"]
        return _by_error_file(silent, said if isinstance(said, dict) else {"message": said}, document)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return Unreadable(document.name, f"no error.json of torchrun: {error}")


def _by_error_file(silent: WorkerError, said: dict[str, Any], document: DocumentRef) -> WorkerError:
    text, extra = str(said["message"]), said.get("extraInfo") or {}
    if not isinstance(extra, dict):
        raise TypeError("extraInfo is not an object")
    stack = str(extra.get("py_callstack") or "")
    type_, _, message = text.partition(": ")
    raised = exception_in(stack, whole=True) or ExceptionInfo(type_, message)
    seconds = str(extra.get("timestamp") or "")
    if seconds.isdecimal() and int(seconds) > _LAST_SECOND:
        raise ValueError(f"the timestamp {one_line(seconds, 30)} is later than the year 9999")
    code = said.get("errorCode")
    return replace(
        silent,
        code=f"USER:{raised.type.rpartition('.')[2]}",
        message=clean(stack or text, _MAX_TEXT),
        origin=Origin.USER,
        exception=raised,
        signal="",
        writer=Writer.WORKER,
        timestamp_ns=int(seconds) * _SECOND_NS if seconds.isdecimal() else None,
        exit_code=code if isinstance(code, int) and code > 0 else None,
        documents=(document,),
    )


def _ranked(failure: WorkerError, offset: int | None) -> WorkerError:
    """Return a failure with its rank, counted from its node's first one."""
    local_rank = failure.place.local_rank
    rank = local_rank + offset if local_rank is not None and offset is not None else None
    return replace(failure, place=replace(failure.place, rank=rank))
