"""Distinguish logged exceptions that a training survived from exceptions that ended a process."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from firstfault.exceptions.source_files import is_library_file
from firstfault_logs.attempts import shows_life
from firstfault_logs.own_reports import COLLECTIVE_TIMEOUT
from firstfault_logs.tracebacks import LOGGED_ERROR, ends_resource, find_specific_category

if TYPE_CHECKING:
    from firstfault.model import ExceptionInfo
    from firstfault_logs.attempt_logs import Attempt
    from firstfault_logs.processes import Process
    from firstfault_logs.tracebacks import Traceback

_MIN_LINES_AFTER_LOGGED = 10
"""Lines about other things below a logged exception that prove that its process continued."""

_MAX_LINES_BETWEEN = 5
"""Lines between the exception of a thread and that of the main thread that waited for it."""


@cache
def _harmless_line() -> re.Pattern[str]:
    """Match a line at a level below error, an empty one,
    and the sources that Python prints below a warning.
    """
    return re.compile(
        r"\[?[WI]\d{3,4}\s|.{0,100}\b(?:DEBUG|INFO|WARN(?:ING)?)\b|.{0,200}\bWarning: |\s|$"
    )


def shows_failure(text: str) -> bool:
    """Whether any line of a process may be about its end."""
    return not all(map(_harmless_line().match, text.splitlines()))


def drop_survived_tracebacks(
    attempt: Attempt,
    processes: Sequence[Process],
    tracebacks: Sequence[Traceback],
) -> list[Traceback]:
    """Return the tracebacks without those after which the training went on.

    A program that misses an optional package logs the exception and trains for hours; then a signal
    ends it. Two later steps prove that all ranks went on, because a training needs all of them. A
    process that exits by an exception has an exit code, so a traceback only counts as survived if a
    signal ended each process, or another one explains the exit code.
    """
    faults = Counter(traceback.fault for traceback in tracebacks)
    size = max(attempt.world_size, 1 + max((one.rank or 0 for one in processes), default=0))
    has_waits = any(COLLECTIVE_TIMEOUT.search(one.text) for one in processes)
    survived = [
        traceback
        for traceback in tracebacks
        if _has_later_steps(attempt, traceback)
        or (not has_waits and faults[traceback.fault] >= size and _is_logged_and_left(traceback))
    ]
    remaining = [
        traceback for traceback in tracebacks if not any(traceback is other for other in survived)
    ]
    is_by_signal = any(one.signal for one in processes) and not any(
        one.exit_code for one in processes
    )
    return remaining if remaining or is_by_signal else list(tracebacks)


def choose_ending(tracebacks: Sequence[Traceback]) -> Traceback:
    """Return the traceback that explains the end of one process: its last one,
    or an earlier one of a thread.

    A thread of rank 3 runs out of GPU memory and ends. Minutes later, the main thread gives up
    waiting for it. Or a thread that reads data raises, and what the main thread reads from raises
    at once.
    """
    last = tracebacks[-1]
    producer = tracebacks[-2] if len(tracebacks) > 1 else None
    if producer is not None and _has_stopped_supply(producer, last):
        return producer
    return find_thread_fault(tracebacks, last.exception) or last


def _has_stopped_supply(producer: Traceback, last: Traceback) -> bool:
    """Whether the program's code raised in a thread,
    and right after it a library in the main thread.
    """
    if not producer.is_in_thread or last.is_in_thread or producer.stream is not last.stream:
        return False
    if last.lines[0] - producer.lines[1] > _MAX_LINES_BETWEEN or not last.exception.frames:
        return False
    is_own = any(not is_library_file(frame.file) for frame in producer.exception.frames)
    return is_own and is_library_file(last.exception.frames[-1].file)


def find_thread_fault(tracebacks: Sequence[Traceback], raised: ExceptionInfo) -> Traceback | None:
    """Return the fault of a resource that had ended a thread of a process,
    if `raised` has no cause of its own.
    """
    of_threads = [
        traceback
        for traceback in tracebacks
        if traceback.is_in_thread and traceback.exception != raised
    ]
    if not of_threads or find_specific_category(raised):
        return None
    return next((traceback for traceback in of_threads if ends_resource(traceback.exception)), None)


def _has_later_steps(attempt: Attempt, traceback: Traceback) -> bool:
    """Whether a process printed several more steps after a traceback."""
    return any(
        stream.file == traceback.stream.file and stream.has_steps_after(traceback.lines[1])
        for stream in attempt.streams.values()
    )


def _is_logged_and_left(traceback: Traceback) -> bool:
    """Whether a logger printed a traceback, and its stream went on with something else."""
    if not any(map(LOGGED_ERROR.search, traceback.lines_around[:1])):
        return False
    below = (record for record in traceback.stream.tail if record.number > traceback.lines[1])
    return sum(map(shows_life, below)) >= _MIN_LINES_AFTER_LOGGED
