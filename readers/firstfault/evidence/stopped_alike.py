"""Ranks that their agents stopped where the root cause was raised: they failed too, or may have been about to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.exceptions.first_cause import causes_of, first_cause, own_frames
from firstfault.exceptions.stack_position import Stood, where_it_stood
from firstfault.exceptions.tracebacks import library_of, place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault.evidence.classification import ClassifiedFailure
    from firstfault.model import FrameInfo, WorkerError


def stopped_raising(first: ClassifiedFailure, classified: Sequence[ClassifiedFailure]) -> list[ClassifiedFailure]:
    """Return the ranks that were stopped while an exception was on its way out that was raised where `first` was."""
    exception = first.failure.exception
    if exception is None or causes_of(exception).wrappers:
        return []  # peers' errors are wrapped at the same line
    frames = first_cause(exception).frames
    if not frames or _is_of_torch(frames[-1]):
        return []
    raised_at = place_of(frames[-1])
    return [item for item in _stopped(first, classified) if _left(item.failure) == raised_at]


def stopped_near(first: ClassifiedFailure, classified: Sequence[ClassifiedFailure]) -> list[ClassifiedFailure]:
    """Return the ranks that were stopped in the function that raised, or while raising, and waited for no peer."""
    exception = first.failure.exception
    own = own_frames(exception) if exception is not None else ()
    return [item for item in _stopped(first, classified) if own and _is_near(item.failure, own[-1])]


def place_of_raise(failure: WorkerError) -> str:
    """Return where the exception was raised that was leaving a stopped process: "train.py:12 in step", or nothing."""
    raised_at = where_it_stood(failure).raised_at
    return place_of(raised_at) if raised_at is not None and not _is_of_torch(raised_at) else ""


def _is_of_torch(frame: FrameInfo) -> bool:
    """Whether torch raised it: errors about peers are raised there, too."""
    return library_of(frame) == "torch"


def _left(failure: WorkerError) -> str:
    """Return the raise point of a stopped process; of one that did not answer, the line at which a finaliser ran."""
    where = where_it_stood(failure)
    return place_of_raise(failure) or (where.frame if where.finalises else "")


def _stopped(first: ClassifiedFailure, classified: Sequence[ClassifiedFailure]) -> list[ClassifiedFailure]:
    return [item for item in classified if item is not first and item.failure.stopped_by_agent and not item.waited]


def _is_near(failure: WorkerError, raised_in: FrameInfo) -> bool:
    where = where_it_stood(failure)
    if place_of_raise(failure):
        return True
    if where.stood is not Stood.ELSEWHERE or any(progress.is_outstanding for progress in failure.collectives):
        return False
    file, function = raised_in.file.rsplit("/", 1)[-1], raised_in.function
    return where.frame.startswith(f"{file}:") and where.frame.endswith(f" in {function}")
