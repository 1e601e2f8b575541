"""How exceptions and failed threads are written and read, within limits for writers and for readers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from firstfault.model import ExceptionInfo, FrameInfo, ThreadFailure
from firstfault.wire.forms import COUNT, LINE, MAX_NAMES, TIME, Field, Form, Table, many, text

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

_MAX_TEXT = 16 * 1024
_MAX_CAUSES = 10
_MAX_FRAMES = 100
_MAX_CONTEXT = 5
"""Lines around a frame's line, with it."""
_MAX_DEPTH = 6
"""Exceptions within exceptions. Protobuf's parsers refuse more than 100 nested messages, and the time for a report can
double with each level."""
_MAX_THREADS = 10
_MAX_READ_EXCEPTIONS = 2000
"""Exceptions that a reader takes of a document's own exception, and of all its threads: with causes and members."""
_MAX_READ_FRAMES = 1000
"""Frames of one exception that a reader takes."""
_MAX_READ_THREADS = 100
"""Failed threads that a reader takes from one document."""


# --- frames ---------------------------------------------------------------------------------------------------------

FRAME = Table(
    FrameInfo,
    (
        Field("file", LINE, json="file"),
        Field("line", COUNT, json="line"),
        Field("function", LINE, json="function"),
        Field("code", LINE, json="source"),
        Field("context", many(LINE, _MAX_CONTEXT), json="context"),
        Field("context_line", COUNT, json="context_line"),
    ),
)
"""Without the marked characters, which are two numbers on the wire."""


def _frame_to_pb(frame: FrameInfo) -> dict[str, Any]:
    message = FRAME.write(frame)
    # what is redacted moves what is marked
    first, last = frame.marked if message["code"] == frame.code else (0, 0)
    return {**message, "marked_from": max(first, 0), "marked_to": max(last, 0)}


def _frame_from_pb(message: Any) -> Any:
    return FRAME.read(message, marked=(message.marked_from, message.marked_to))


_ONE_FRAME = Form(_frame_to_pb, _frame_from_pb, is_redacted=True)
_FRAMES = many(_ONE_FRAME, keep=True)


def _both_ends(frames: Sequence[T], most: int) -> tuple[Sequence[T], int]:
    """Return the outermost and the innermost frames of a deep stack, and how many lie between them."""
    if len(frames) <= most:
        return frames, 0
    return [*frames[: most // 2], *frames[-most // 2 :]], len(frames) - most


# --- exceptions -----------------------------------------------------------------------------------------------------

_PARTS = Table(
    ExceptionInfo,
    (
        Field("type", LINE),
        Field("message", text(_MAX_TEXT)),
        Field("bases", many(LINE, MAX_NAMES, keep=True)),
        Field("notes", many(text(_MAX_TEXT), MAX_NAMES)),
        Field("relation", LINE),
        Field("text_frames", many(_ONE_FRAME, _MAX_FRAMES, keep=True)),
    ),
)
"""Without the frames, causes and members, of which readers and writers take different numbers."""


def _exception_to_pb(exception: ExceptionInfo, depth: int = 1) -> dict[str, Any]:
    """Return an exception's message, with texts cut and redacted; `depth` counts the exceptions around it."""
    deeper = _MAX_CAUSES if depth < _MAX_DEPTH else 0
    frames, omitted = _both_ends(exception.frames, _MAX_FRAMES)
    return _PARTS.write(
        exception,
        frames=_FRAMES.write(frames),
        frames_omitted=exception.frames_omitted + omitted,
        causes=[_exception_to_pb(cause, depth + 1) for cause in exception.causes[:deeper]],
        members=[_exception_to_pb(member, depth + 1) for member in exception.members[:deeper]],
    )


class _Budget:
    """How many exceptions a reader may still take from a document."""

    def __init__(self) -> None:
        self.left = _MAX_READ_EXCEPTIONS


def _exception_from_pb(record: Any, budget: _Budget | None = None, depth: int = 1) -> ExceptionInfo:
    """Return an exception with what the reader's limits admit; its last notes count what is left out."""
    budget = budget or _Budget()
    budget.left -= 1
    frames, omitted = _both_ends(record.frames, _MAX_READ_FRAMES)
    inner = {name: _inner_from_pb(getattr(record, name), budget, depth) for name in ("causes", "members")}
    left_out = {name: len(getattr(record, name)) - len(taken) for name, taken in inner.items()}
    exception: ExceptionInfo = _PARTS.read(
        record, frames=_FRAMES.read(frames), frames_omitted=record.frames_omitted + omitted, **inner
    )
    cut = [_left_out(count, name) for name, count in left_out.items() if count]
    return replace(exception, notes=(*exception.notes, *cut)) if cut else exception


def _inner_from_pb(records: Sequence[Any], budget: _Budget, depth: int) -> tuple[ExceptionInfo, ...]:
    taken: list[ExceptionInfo] = []
    for record in records if depth < _MAX_DEPTH else ():
        if budget.left <= 0:
            break
        taken.append(_exception_from_pb(record, budget, depth + 1))
    return tuple(taken)


def _left_out(count: int, what: str) -> str:
    return f"... {count} more {what} left out: the document holds more than firstfault reads ..."


_THREAD = Table(ThreadFailure, (Field("thread", LINE), Field("timestamp_ns", TIME, "wall_time_ns")))
"""Without the exception."""


def _threads_to_pb(threads: Sequence[ThreadFailure]) -> list[dict[str, Any]]:
    """Return the messages of the first failed threads."""
    return [_THREAD.write(thread, exception=_exception_to_pb(thread.exception)) for thread in threads[:_MAX_THREADS]]


def _threads_from_pb(threads: Sequence[Any]) -> tuple[ThreadFailure, ...]:
    """Return failed threads with what the reader's limits admit."""
    taken: list[ThreadFailure] = []
    budget = _Budget()
    for thread in threads:
        if len(taken) == _MAX_READ_THREADS or (taken and budget.left <= 0):
            last = taken[-1]
            notes = (*last.exception.notes, _left_out(len(threads) - len(taken), "failed threads"))
            taken[-1] = replace(last, exception=replace(last.exception, notes=notes))
            break
        taken.append(_THREAD.read(thread, exception=_exception_from_pb(thread.exception, budget)))
    return tuple(taken)


EXCEPTION = Form(
    lambda value: value and _exception_to_pb(value), _exception_from_pb, is_optional=True, is_redacted=True
)
THREADS = Form(_threads_to_pb, _threads_from_pb, is_redacted=True, cap=_MAX_THREADS)
