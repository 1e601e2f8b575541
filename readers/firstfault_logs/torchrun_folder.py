"""The log folder of a torchrun: the workers of the last attempt, and the ``error.json`` of each.

torchrun lays it out as ``<log-dir>/<run id>_<random>/attempt_<k>/<local rank>/``, with one folder
per node.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from firstfault.model import DocumentRef, ExceptionInfo, Kind, Origin, Place, WorkerError, Writer
from firstfault.reading.assemble import Snapshot, Unreadable
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault.utils.stored_text import clean
from firstfault.utils.text import one_line
from firstfault_logs.processes import MAX_TEXT_CHARACTERS, exception_in

if TYPE_CHECKING:
    from pathlib import Path

_ERROR = "error.json"
_MAX_ERROR_BYTES = 2 * 1024 * 1024
_MAX_UNIX_SECONDS = 253_402_300_799
"""Last second of the year 9999, Unix time."""
_RANDOM = len("_hbse3iwq")
_MAX_GAP_SECONDS = 3.0
"""Longest gap between the folders of one run; torchrun needs longer to start again."""
_NOTES = (
    "torchrun's log folder has times in whole seconds, and neither exit codes nor signals",
    "a worker that was killed, or stopped by torchrun, leaves no error.json",
)


class Worker(NamedTuple):
    """The folder of a worker; `node` is the name of its run's folder,
    `attempt` torchrun's restart count.
    """

    folder: Path
    node: str
    attempt: int
    local_rank: int | None

    @property
    def name(self) -> str:
        """Name of its folder in references."""
        return f"{self.node}/attempt_{self.attempt}/{self.local_rank}"


def workers_in(folder: Path) -> list[Worker]:
    """Return the workers of each node's last attempt in the newest run;
    none if it is not a log folder of torchrun.

    Args:
        folder: torchrun's ``--log-dir``, a folder of one run or attempt in it, or a folder with an
            ``error.json``.
    """
    if (folder / _ERROR).is_file():
        return [_worker(folder) or Worker(folder, folder.name, 0, None)]
    depths = (
        folder.glob(pattern) for pattern in ("[0-9]*", "attempt_*/[0-9]*", "*/attempt_*/[0-9]*")
    )
    found_workers = next(
        filter(None, (list(filter(None, map(_worker, paths))) for paths in depths)), []
    )
    last: dict[str, int] = defaultdict(int)
    for worker in found_workers:
        last[worker.node] = max(last[worker.node], worker.attempt)
    return sorted(
        _of_newest_run([worker for worker in found_workers if worker.attempt == last[worker.node]])
    )


# The folder of one attempt in torchrun's log folder.
_ATTEMPT_FOLDER = LazyPattern(r"attempt_(\d{1,6})")


def _worker(folder: Path) -> Worker | None:
    attempt = _ATTEMPT_FOLDER.fullmatch(folder.parent.name)
    if attempt is None or not folder.name.isdecimal() or not folder.is_dir():
        return None
    return Worker(folder, folder.parent.parent.name, int(attempt[1]), int(folder.name))


def _run_of(node: str) -> str:
    """Return the run's id, without the eight random characters behind it,
    which may be underscores too.
    """
    return node[:-_RANDOM] if node[-_RANDOM : 1 - _RANDOM] == "_" else node


def _of_newest_run(workers: Sequence[Worker]) -> list[Worker]:
    """Return the workers of the newest run: those with its id that were in use at the same time."""
    times: dict[str, list[float]] = {worker.node: [] for worker in workers}
    for worker in workers:
        with suppress(OSError):  # a running job may remove files
            paths = (worker.folder.parent, worker.folder, *worker.folder.iterdir())
            times[worker.node] += [path.lstat().st_mtime for path in paths]
    spans = {
        node: (min(times_of_node, default=0.0), max(times_of_node, default=0.0))
        for node, times_of_node in times.items()
    }
    newest = max(spans, key=lambda node: spans[node][1], default="")
    return [
        worker
        for worker in workers
        if _run_of(worker.node) == _run_of(newest)
        and spans[worker.node][1] >= spans[newest][0] - _MAX_GAP_SECONDS
        and spans[worker.node][0] <= spans[newest][1] + _MAX_GAP_SECONDS
    ]


def with_error_files(printed: Iterable[WorkerError], workers: Sequence[Worker]) -> Snapshot:
    """Return what the workers left; if none left an error, the snapshot has notes alone.

    Args:
        printed: the failures in their logs.
        workers: those of one attempt.
    """
    known = {(item.node, item.place.local_rank): item for item in printed}
    documents: list[WorkerError] = []
    unreadable: list[Unreadable] = []
    for worker in workers:
        try:
            documents.append(
                _with_error_file(
                    _printed(worker, known.get((worker.node, worker.local_rank))), worker
                )
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            unreadable.append(
                Unreadable(f"{worker.name}/{_ERROR}", f"no error.json of torchrun: {error}")
            )
    if all(document.writer is Writer.AGENT for document in documents) and not unreadable:
        return Snapshot(
            notes=("no worker left an error.json, and no stderr.log ends with a traceback",)
        )
    notes, nodes = [*_NOTES], {worker.node for worker in workers}
    # torchrun numbers the workers of a node consecutively
    ranked = [
        (item.node, item.rank, item.place.local_rank or 0)
        for item in documents
        if item.rank is not None
    ]
    firsts = {
        node: {rank - local_rank for on, rank, local_rank in ranked if on == node} for node in nodes
    }
    if any(len(first) != 1 for first in firsts.values()):
        notes.append("ranks are local ranks: the folder has no global ones")
    if len(nodes) > 1:
        notes.append(f"{len(nodes)} folders of the run {_run_of(min(nodes))!r} count as its nodes")
    else:
        firsts = {node: first if len(first) == 1 else {0} for node, first in firsts.items()}
    ranked_documents = tuple(_ranked(item, firsts[item.node]) for item in documents)
    return Snapshot(ranked_documents, unreadable=tuple(unreadable), notes=tuple(notes))


def _ranked(document: WorkerError, first: set[int]) -> WorkerError:
    """Return a document with its rank, counted from that of its node's first worker."""
    local_rank = document.place.local_rank
    rank = local_rank + min(first) if local_rank is not None and len(first) == 1 else None
    return replace(document, place=replace(document.place, rank=rank))


def _printed(worker: Worker, report: WorkerError | None) -> WorkerError:
    """Return the failure in a worker's logs; a worker that torchrun stopped has none."""
    place = Place(
        node=worker.node,
        local_rank=worker.local_rank,
        restart_count=worker.attempt,
        engine="torchrun",
    )
    refs = (DocumentRef(f"{worker.name}/{_ERROR}", str(worker.folder / _ERROR)),)
    code, kind, origin, by_agent = (
        "SYSTEM:NoErrorFile",
        Kind.NON_RECOVERABLE,
        Origin.UNKNOWN,
        Writer.AGENT,
    )
    if report is None:
        return WorkerError(
            code,
            "",
            kind,
            origin,
            worker=worker.node,
            place=place,
            writer=by_agent,
            documents=refs,
        )
    report = replace(
        report, place=replace(place, rank=report.rank), documents=report.documents or refs
    )
    return (
        replace(report, code=code, writer=by_agent, sent_signals=())
        if report.sent_signals
        else report
    )


def _with_error_file(printed: WorkerError, worker: Worker) -> WorkerError:
    """Return the failure in a worker's error file, if it has one.

    Raises:
        OSError, ValueError, KeyError, TypeError, RecursionError: it is not one of torchrun's.
    """
    path = worker.folder / _ERROR
    if not path.is_file():
        return printed
    if path.stat().st_size > _MAX_ERROR_BYTES:
        raise ValueError(f"{path.stat().st_size} bytes, more than the limit of {_MAX_ERROR_BYTES}")
    report = json.loads(path.read_text(encoding="utf-8", errors="replace"))["message"]
    report = report if isinstance(report, dict) else {"message": report}
    text = str(report["message"])
    extra = report.get("extraInfo") or {}
    if not isinstance(extra, dict):
        raise TypeError("extraInfo is not an object")
    stack = str(extra.get("py_callstack") or "")
    seconds = str(extra.get("timestamp") or "")
    type_, _, message = text.partition(": ")
    raised = exception_in(stack, whole=True) or ExceptionInfo(type_, message)
    if seconds.isdecimal() and int(seconds) > _MAX_UNIX_SECONDS:
        raise ValueError(f"the timestamp {one_line(seconds, 30)} is later than the year 9999")
    return replace(
        printed,
        code=f"USER:{raised.type.rpartition('.')[2]}",
        message=clean(stack or text, MAX_TEXT_CHARACTERS),
        origin=Origin.USER,
        exception=raised,
        signal="",
        sent_signals=(),
        writer=Writer.WORKER,
        timestamp_ns=int(seconds) * 1_000_000_000 if seconds.isdecimal() else None,
        exit_code=code if isinstance(code := report.get("errorCode"), int) and code > 0 else None,
        documents=(DocumentRef(f"{worker.name}/{_ERROR}", str(path)),),
    )
