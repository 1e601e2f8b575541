"""Reads the log folder of a torchrun that ran without firstfault: each worker's ``error.json`` and ``stderr.log``.

torchrun lays it out as ``<log-dir>/<run id>_<random>/attempt_<k>/<local rank>/``, with one folder per node.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from firstfault.exceptions.tracebacks import exceptions_in
from firstfault.model import DocumentRef, ExceptionInfo, Kind, Origin, Place, WorkerError, Writer
from firstfault.model.failure import fatal_error
from firstfault.reading.assemble import Snapshot, Unreadable
from firstfault.text import clean, one_line

if TYPE_CHECKING:
    from pathlib import Path

_ATTEMPT = re.compile(r"attempt_(\d{1,6})")
_ERROR, _STDERR = "error.json", "stderr.log"
_MAX_ERROR_BYTES = 2 * 1024 * 1024
_MAX_TEXT = 64 * 1024
_LOG_BYTES = 32 * 1024
_SECOND_NS = 1_000_000_000
_LAST_SECOND = 253_402_300_799
"""Of the year 9999."""
_RANDOM = len("_hbse3iwq")
_APART_S = 3.0
"""Folders of one run begin at most so much after another one ended: torchrun itself takes longer to start again."""
_OF_RANK = re.compile(r"^\[rank(?P<rank>\d{1,7})\]:(?: (?P<line>.*))?$", re.MULTILINE)
"""A line of the traceback that ends a process with an initialized process group."""
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):", re.MULTILINE)
_LINKED = ("direct cause of the following exception:", "another exception occurred:")
"""How the line between two tracebacks of one chain ends."""
_WRAPPER = "torch/distributed/elastic/multiprocessing/errors/"
"""The frames of torch's `record` do not belong to the failure."""
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
    documents: list[WorkerError] = []
    unreadable: list[Unreadable] = []
    are_global = True
    for node in nodes:
        found = [_read(node, local_rank, path) for local_rank, path in node.workers]
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


def _read(node: _Node, local_rank: int | None, folder: Path) -> WorkerError | Unreadable:
    place = Place(node=node.name, local_rank=local_rank, restart_count=node.number, engine="torchrun")
    stderr = _tail(folder / _STDERR)
    path = folder / _ERROR
    document = DocumentRef(f"{node.name}/attempt_{node.number}/{local_rank}/{_ERROR}", str(path))
    # torch puts the global rank before a traceback's lines
    ranks = {int(match["rank"]) for match in _OF_RANK.finditer(stderr)}
    silent = WorkerError(
        "SYSTEM:NoErrorFile",
        "",
        Kind.NON_RECOVERABLE,
        Origin.UNKNOWN,
        worker=node.name,
        place=replace(place, rank=ranks.pop() if len(ranks) == 1 else None),
        writer=Writer.AGENT,
        log_tail=clean(_OF_RANK.sub(r"\g<line>", stderr), _LOG_BYTES),
        documents=(replace(document, name=document.name.replace(_ERROR, _STDERR), uri=str(folder / _STDERR)),),
    )
    if not path.is_file():
        return _by_log(silent, stderr)
    try:
        if path.stat().st_size > _MAX_ERROR_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes, more than the limit of {_MAX_ERROR_BYTES}")  # noqa: TRY301
        said = json.loads(path.read_text(encoding="utf-8", errors="replace"))["message"]
        return _by_error_file(silent, said if isinstance(said, dict) else {"message": said}, document)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return Unreadable(document.name, f"no error.json of torchrun: {error}")


def _by_log(silent: WorkerError, stderr: str) -> WorkerError:
    """Return a failure without an ``error.json``, with what the end of its stderr tells."""
    raised, text = _raised_in(stderr)
    if raised is not None:
        return _raising(silent, raised, text)  # a crash in the log is that of a child, such as a DataLoader's worker
    said, signal = fatal_error(stderr)
    return replace(silent, code=f"USER:{signal}", message=said, signal=signal, writer=Writer.WORKER) if said else silent


def _raised_in(stderr: str) -> tuple[ExceptionInfo | None, str]:
    """Return the uncaught exception that ended a process, and its traceback; None if it is not certain.

    Only torch's own traceback, or one at the end: a program may print tracebacks and continue.
    """
    own = "\n".join(match["line"] or "" for match in _OF_RANK.finditer(stderr))
    text = own or stderr
    begins = [match.start() for match in _TRACEBACK.finditer(text)]
    start = begins.pop() if begins else len(text)
    while begins and text[begins[-1] : start].rstrip().endswith(_LINKED):
        start = begins.pop()
    return _exception(text[start:], whole=bool(own)), text[start:]


def _by_error_file(silent: WorkerError, said: dict[str, Any], document: DocumentRef) -> WorkerError:
    text, extra = str(said["message"]), said.get("extraInfo") or {}
    if not isinstance(extra, dict):
        raise TypeError("extraInfo is not an object")
    stack = str(extra.get("py_callstack") or "")
    type_, _, message = text.partition(": ")
    raised = _exception(stack) or ExceptionInfo(type_, message)
    seconds = str(extra.get("timestamp") or "")
    if seconds.isdecimal() and int(seconds) > _LAST_SECOND:
        raise ValueError(f"the timestamp {one_line(seconds, 30)} is later than the year 9999")
    code = said.get("errorCode")
    return replace(
        _raising(silent, raised, stack or text),
        timestamp_ns=int(seconds) * _SECOND_NS if seconds.isdecimal() else None,
        exit_code=code if isinstance(code, int) and code > 0 else None,
        documents=(document,),
    )


def _raising(silent: WorkerError, raised: ExceptionInfo, text: str) -> WorkerError:
    return replace(
        silent,
        code=f"USER:{raised.type.rpartition('.')[2]}",
        message=clean(text, _MAX_TEXT),
        origin=Origin.USER,
        exception=raised,
        writer=Writer.WORKER,
    )


def _exception(traceback: str, *, whole: bool = True) -> ExceptionInfo | None:
    """Return the exception of a traceback; its causes are those that Python printed before it."""
    found = exceptions_in(clean(traceback, _MAX_TEXT), whole=whole)
    if not found:
        return None
    first, *causes = (
        replace(link, frames=tuple(frame for frame in link.frames if _WRAPPER not in frame.file)) for link in found
    )
    return replace(first, relation="", causes=tuple(causes))


def _tail(path: Path) -> str:
    try:
        if not path.is_file():
            return ""  # a FIFO would wait for a writer
        with path.open("rb") as stream:
            stream.seek(max(path.stat().st_size - _LOG_BYTES, 0))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _ranked(failure: WorkerError, offset: int | None) -> WorkerError:
    """Return a failure with its rank, counted from its node's first one."""
    local_rank = failure.place.local_rank
    rank = local_rank + offset if local_rank is not None and offset is not None else None
    return replace(failure, place=replace(failure.place, rank=rank))
