"""Encodes and decodes exceptions and failed threads, within limits for writers and for readers."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar, cast

from firstfault.model import ExceptionInfo, FrameInfo, ThreadFailure
from firstfault.text import clean, elide
from firstfault_proto.v1 import errors_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

__all__ = [
    "MAX_LINE",
    "MAX_NAMES",
    "MAX_READ_LINE",
    "Budget",
    "exception_from_pb",
    "exception_to_pb",
    "interned",
    "line_from_pb",
    "long_to_pb",
    "thread_to_pb",
    "threads_from_pb",
]

_MAX_LONG = 2**64 - 1
MAX_LINE = 500
"""Characters of a name or a line."""
MAX_READ_LINE = 4_096
"""Characters of a name or a line that a reader takes: it may be drawn hundreds of times."""
MAX_NAMES = 50
_MAX_TEXT = 16 * 1024
_MAX_CAUSES = 10
_MAX_FRAMES = 100
_MAX_CONTEXT = 5
"""Lines around a frame's line, with it."""
_MAX_DEPTH = 6
"""Nested exceptions; protobuf's parsers refuse more than 100 nested messages."""
_MAX_READ_EXCEPTIONS = 2000
"""Exceptions that a reader takes from one document: causes, members and those of threads together."""
_MAX_READ_DEPTH = 6
"""Exceptions within exceptions that a reader takes: the time for a report can double with each level."""
_MAX_READ_FRAMES = 1000
"""Frames of one exception that a reader takes."""
_MAX_READ_THREADS = 100
"""Failed threads that a reader takes from one document."""


def exception_to_pb(exception: ExceptionInfo, depth: int = 1) -> pb.ExceptionRecord:
    """Return an exception's message, with texts cut and redacted; `depth` counts the exceptions around it."""
    deeper = _MAX_CAUSES if depth < _MAX_DEPTH else 0
    frames = exception.frames
    omitted = exception.frames_omitted
    if len(frames) > _MAX_FRAMES:
        omitted += len(frames) - _MAX_FRAMES
        frames = frames[: _MAX_FRAMES // 2] + frames[-_MAX_FRAMES // 2 :]
    return pb.ExceptionRecord(
        type=clean(exception.type, MAX_LINE),
        bases=[clean(base, MAX_LINE) for base in exception.bases[:MAX_NAMES]],
        message=clean(exception.message, _MAX_TEXT),
        frames=list(map(_frame_to_pb, frames)),
        notes=[clean(note, _MAX_TEXT) for note in exception.notes[:MAX_NAMES]],
        causes=[exception_to_pb(cause, depth + 1) for cause in exception.causes[:deeper]],
        relation=clean(exception.relation, MAX_LINE),
        frames_omitted=omitted,
        members=[exception_to_pb(member, depth + 1) for member in exception.members[:deeper]],
        text_frames=list(map(_frame_to_pb, exception.text_frames[:_MAX_FRAMES])),
    )


def _frame_to_pb(frame: FrameInfo) -> pb.Frame:
    code = clean(frame.code, MAX_LINE)
    marked = frame.marked if code == frame.code else (0, 0)  # what is redacted moves what is marked
    return pb.Frame(
        file=clean(frame.file, MAX_LINE),
        line=max(frame.line, 0),
        function=clean(frame.function, MAX_LINE),
        code=code,
        context=[clean(line, MAX_LINE) for line in frame.context[:_MAX_CONTEXT]],
        context_line=max(frame.context_line, 0),
        marked_from=max(marked[0], 0),
        marked_to=max(marked[1], 0),
    )


def _frame_from_pb(frame: pb.Frame) -> FrameInfo:
    return FrameInfo(
        line_from_pb(frame.file),
        frame.line,
        line_from_pb(frame.function),
        line_from_pb(frame.code),
        tuple(map(line_from_pb, frame.context[:_MAX_CONTEXT])),
        frame.context_line,
        (frame.marked_from, frame.marked_to),
    )


def line_from_pb(text: str) -> str:
    """Return a name or a line with what the reader's limit admits."""
    return elide(text, MAX_READ_LINE)


class Budget:
    """How many exceptions a reader may still take from a document."""

    def __init__(self) -> None:
        self.left = _MAX_READ_EXCEPTIONS


def exception_from_pb(record: pb.ExceptionRecord, budget: Budget, depth: int = 1) -> ExceptionInfo:
    """Return an exception with what the reader's limits admit; its last notes say how much they cut off."""
    budget.left -= 1
    frames: Sequence[pb.Frame] = record.frames
    omitted = record.frames_omitted
    if len(frames) > _MAX_READ_FRAMES:
        omitted += len(frames) - _MAX_READ_FRAMES
        frames = [*frames[: _MAX_READ_FRAMES // 2], *frames[-_MAX_READ_FRAMES // 2 :]]
    causes = _inner_from_pb(record.causes, budget, depth)
    members = _inner_from_pb(record.members, budget, depth)
    inner = ((record.causes, causes, "causes"), (record.members, members, "members"))
    cut = [_left_out(len(all_of) - len(taken), name) for all_of, taken, name in inner if len(all_of) > len(taken)]
    return ExceptionInfo(
        type=line_from_pb(record.type),
        message=record.message,
        bases=interned(tuple(record.bases)),
        frames=interned(tuple(map(_frame_from_pb, frames))),
        notes=(*record.notes, *cut),
        causes=causes,
        relation=record.relation,
        frames_omitted=omitted,
        members=members,
        text_frames=interned(tuple(map(_frame_from_pb, record.text_frames[:_MAX_FRAMES]))),
    )


def _inner_from_pb(records: Sequence[pb.ExceptionRecord], budget: Budget, depth: int) -> tuple[ExceptionInfo, ...]:
    taken: list[ExceptionInfo] = []
    if depth < _MAX_READ_DEPTH:
        for record in records:
            if budget.left <= 0:
                break
            taken.append(exception_from_pb(record, budget, depth + 1))
    return tuple(taken)


def _left_out(count: int, what: str) -> str:
    return f"... {count} more {what} left out: the document holds more than firstfault reads ..."


def thread_to_pb(thread: ThreadFailure) -> pb.ThreadFailure:
    """Return a failed thread's message."""
    return pb.ThreadFailure(
        thread=clean(thread.thread, MAX_LINE),
        wall_time_ns=long_to_pb(thread.timestamp_ns),
        exception=exception_to_pb(thread.exception),
    )


def threads_from_pb(threads: Sequence[pb.ThreadFailure], budget: Budget) -> tuple[ThreadFailure, ...]:
    """Return failed threads with what the reader's limits admit."""
    taken: list[ThreadFailure] = []
    for thread in threads:
        if len(taken) == _MAX_READ_THREADS or (taken and budget.left <= 0):
            last = taken[-1]
            notes = (*last.exception.notes, _left_out(len(threads) - len(taken), "failed threads"))
            taken[-1] = replace(last, exception=replace(last.exception, notes=notes))
            break
        exception = exception_from_pb(thread.exception, budget)
        taken.append(ThreadFailure(thread.thread, thread.wall_time_ns or None, exception))
    return tuple(taken)


def interned(value: T) -> T:
    """Return one object for all equal values, which saves memory: thousands of victims have the same stacks."""
    return cast("T", _kept(value))


@lru_cache(maxsize=4096)
def _kept(value: object) -> object:
    return value


def long_to_pb(number: int | None) -> int | None:
    """Return a number within the range of uint64."""
    return None if number is None else min(max(number, 0), _MAX_LONG)
