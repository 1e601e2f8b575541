"""A worker's answer to its agent before it is stopped.

It tells the progress of the worker's collectives, its dead threads, and where an exception was raised that is on its
way out.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from firstfault.model import Collective, CollectiveProgress, ExceptionInfo, FrameInfo, ThreadFailure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MAX_GROUPS = 24
"""Process groups in one message, which holds at most 128 KiB."""
_MAX_TEXT = 2000
_MAX_FRAMES = 20


def to_message(
    collectives: Iterable[CollectiveProgress], threads: Iterable[ThreadFailure], raised_at: FrameInfo | None = None
) -> dict[str, Any]:
    """Return a worker's state as JSON data."""
    return {
        "raised_at": None if raised_at is None else (raised_at.file, raised_at.line, raised_at.function),
        "collectives": [asdict(item) for item in itertools.islice(collectives, _MAX_GROUPS)],
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


def from_message(
    message: Mapping[str, Any],
) -> tuple[tuple[CollectiveProgress, ...], tuple[ThreadFailure, ...], FrameInfo | None]:
    """Return the state that `to_message` wrote; empty where the worker did not answer."""
    collectives = tuple(
        CollectiveProgress(
            **{**item, "last": tuple(Collective(**entry) for entry in item["last"]), "members": tuple(item["members"])}
        )
        for item in message.get("collectives") or ()
    )
    threads = tuple(
        ThreadFailure(thread, when, ExceptionInfo(kind, text, frames=tuple(FrameInfo(*frame) for frame in frames)))
        for thread, when, kind, text, frames in message.get("thread_failures") or ()
    )
    raised_at = message.get("raised_at")
    return collectives, threads, FrameInfo(*raised_at) if raised_at else None
