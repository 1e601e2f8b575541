"""Builders of failures, roster entries and jobs with plausible defaults."""

from __future__ import annotations

import dataclasses
from typing import Any

from firstfault.layout import error_key_for
from firstfault.model import (
    DocumentRef,
    ExceptionInfo,
    FrameInfo,
    JobErrors,
    Kind,
    NodePresence,
    Origin,
    Phase,
    Place,
    WorkerError,
    Writer,
)
from firstfault.reading.assemble import Snapshot, assemble

START_NS = 1_700_000_000_000_000_000
"""Start of the builders' clock, nanoseconds since the Unix epoch."""
_MS = 1_000_000
_PLACE_FIELDS = frozenset(field.name for field in dataclasses.fields(Place))


def make_error(
    rank: int | None = 0,
    *,
    node: str = "worker-0",
    at_ms: float | None = 0,
    exception: str | ExceptionInfo | None = "ValueError",
    message: str = "boom",
    **fields: Any,
) -> WorkerError:
    """Return a failure of the process with global rank `rank`.

    Args:
        rank: None for a failure without a rank.
        node: the node's name.
        at_ms: when it was recorded, milliseconds after `START_NS`; None for none.
        exception: the exception's qualified name, a whole record, or None for an end without an exception.
        message: of the exception, and of the document.
        fields: any other field of `WorkerError` or of its `Place`.
    """
    place = {name: fields.pop(name) for name in tuple(fields) if name in _PLACE_FIELDS}
    if isinstance(exception, str):
        frame = FrameInfo("/job/train.py", 7, "train", "step(batch)")
        exception = ExceptionInfo(exception, message, bases=("Exception", "BaseException"), frames=(frame,))
    values: dict[str, Any] = {
        "code": "USER",
        "message": message,
        "kind": Kind.NON_RECOVERABLE,
        "origin": Origin.USER,
        "timestamp_ns": None if at_ms is None else START_NS + int(at_ms * _MS),
        "worker": node,
        "place": Place(**{"rank": rank, "node": node, **place}),
        "writer": Writer.WORKER,
        "exception": exception,
        **fields,
    }
    error = WorkerError(**values)
    if error.documents:
        return error
    return dataclasses.replace(error, documents=(DocumentRef(error_key_for(error)),))


def make_presence(
    phase: Phase = Phase.FAILED, *, node: str = "worker-0", group_rank: int = 0, nodes: int = 1, **fields: Any
) -> NodePresence:
    """Return the roster entry of a node.

    Args:
        phase: the node's state.
        node: the node's name.
        group_rank: the node's rank.
        nodes: how many nodes take part in the round.
        fields: any other field of `NodePresence` or of its `Place`.
    """
    place = {name: fields.pop(name) for name in tuple(fields) if name in _PLACE_FIELDS}
    where = Place(**{"node": node, "group_rank": group_rank, "group_world_size": nodes, **place})
    return NodePresence(phase, where, **{"timestamp_ns": START_NS, **fields})


def make_job(*failures: WorkerError, **snapshot: Any) -> JobErrors:
    """Return the job that a reader assembles from these failures; `snapshot` are other fields of `Snapshot`."""
    return assemble(Snapshot(documents=failures, **snapshot))
