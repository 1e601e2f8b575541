"""A worker's answer to its agent before it is stopped: the progress of its collectives, and its dead threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firstfault.model import CollectiveProgress, ExceptionInfo, FrameInfo, ThreadFailure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["from_message", "to_message"]

_MAX_TEXT = 2000
_MAX_FRAMES = 20


def to_message(collectives: Iterable[CollectiveProgress], threads: Iterable[ThreadFailure]) -> dict[str, Any]:
    """Return a worker's state as JSON data."""
    return {
        "collectives": [(item.group, item.last_operation, item.enqueued, item.completed) for item in collectives],
        "thread_failures": [
            (
                item.thread,
                item.timestamp_ns,
                item.exception.type,
                item.exception.message[:_MAX_TEXT],
                [
                    (frame.file, frame.line, frame.function, frame.code)
                    for frame in item.exception.frames[-_MAX_FRAMES:]
                ],
            )
            for item in threads
        ],
    }


def from_message(message: Mapping[str, Any]) -> tuple[tuple[CollectiveProgress, ...], tuple[ThreadFailure, ...]]:
    """Return the state that `to_message` wrote; empty where the worker did not answer."""
    collectives = tuple(CollectiveProgress(*item) for item in message.get("collectives") or ())
    threads = tuple(
        ThreadFailure(thread, when, ExceptionInfo(kind, text, frames=tuple(FrameInfo(*frame) for frame in frames)))
        for thread, when, kind, text, frames in message.get("thread_failures") or ()
    )
    return collectives, threads
