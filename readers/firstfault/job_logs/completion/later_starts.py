"""Several starts of a program in one log.

The end of an earlier start proves nothing about a later one, unless both ended in the same way
after the same rounds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from firstfault.job_logs.attempts import progress_in
from firstfault.job_logs.completion.rounds import get_shape
from firstfault.job_logs.completion.words import is_noise

if TYPE_CHECKING:
    from firstfault.job_logs.framing.labels import LogRecord

_MIN_OPENING_LINES = 3
"""Different lines of an opening that show a start when they come again."""
_MIN_OPENING_SHARE = 0.5
"""A start prints at least this part of its opening again; the rest may depend on options."""
_MIN_LETTERS = 8
"""Shorter lines, such as a closing bracket, may be anywhere in a log."""
_MAX_STEPS_BEHIND = 1
"""A slow rank may print an earlier step than the fastest one did."""

_MIN_ROUNDS = 10
"""Rounds of two starts that ended after the same one: a multiple of this, as in most trainings."""
_COMPARED_STARTS = 2

_NO_LETTER = re.compile(r"[^a-zA-Z]+")
_MENTIONED = re.compile(
    r"(?i)\b(?:best|eval\w*|valid\w*|test\w*|infer\w*|predict\w*"
    r"|load\w*|resum\w*|sav\w*|checkpoint\w*)\b"
)


def is_started_again(opening: Iterable[LogRecord], tail: Sequence[LogRecord], number: int) -> bool:
    """Whether below a line the first lines of a log came again, or a step far below earlier ones.

    Args:
        opening: the first lines of a file.
        tail: its last lines, in order.
        number: of a line that reports an end.
    """
    below = [record for record in tail if record.number > number]
    if not below:
        return False
    if _repeats_opening(opening, below, number):
        return True
    return any(progress_in(record) is not None for record in below) and _falls_back(tail, number)


def _repeats_opening(opening: Iterable[LogRecord], below: Iterable[LogRecord], number: int) -> bool:
    first = _list_shapes(record for record in opening if record.number < number)
    again = first & _list_shapes(below)
    return len(again) >= max(_MIN_OPENING_LINES, len(first) * _MIN_OPENING_SHARE)


def _list_shapes(records: Iterable[LogRecord]) -> set[str]:
    shapes = (get_shape(record.text) for record in records if not is_noise(record.text))
    return {shape for shape in shapes if len(_NO_LETTER.sub("", shape)) >= _MIN_LETTERS}


def _falls_back(tail: Iterable[LogRecord], number: int) -> bool:
    most: dict[tuple[str, str], int] = {}
    for record in tail:
        progress = progress_in(record)
        if progress is None or is_noise(record.text) or _MENTIONED.search(record.text):
            continue
        kind = (progress.what.lower(), get_shape(record.text))
        if record.number > number and progress.step < most.get(kind, -1) - _MAX_STEPS_BEHIND:
            return True
        if record.number < number:
            most[kind] = max(most.get(kind, -1), progress.step)
    return False


def find_same_end(opening: Sequence[LogRecord], tail: Sequence[LogRecord]) -> LogRecord | None:
    """Return the last line if the last two starts had the same rounds and ended alike below them.

    A failure, or the end of a log that is cut off, isn't after the same round twice. The rounds of
    one fold of several are, but they don't begin with the first lines of the log.

    Args:
        opening: the first lines of a file.
        tail: its last lines, in order.
    """
    starts = _split_starts(opening, tail)
    ends = [_find_end(start) for start in starts[-_COMPARED_STARTS:]]
    is_same = len(ends) == _COMPARED_STARTS and ends[0] is not None and ends[0] == ends[1]
    return tail[-1] if is_same else None


def _split_starts(opening: Sequence[LogRecord], tail: Sequence[LogRecord]) -> list[list[LogRecord]]:
    """Return the lines of each start: those from the first lines of a log on."""
    above = itertools.takewhile(lambda record: progress_in(record) is None, opening)
    shapes = [get_shape(record.text) for record in above][:_MIN_OPENING_LINES]
    if len(set(shapes)) < _MIN_OPENING_LINES or len(_NO_LETTER.sub("", shapes[0])) < _MIN_LETTERS:
        return []
    starts: list[list[LogRecord]] = []
    of_tail = [get_shape(record.text) for record in tail]
    for at, record in enumerate(tail):
        if of_tail[at : at + _MIN_OPENING_LINES] == shapes:
            starts.append([])
        if starts:
            starts[-1].append(record)
    return starts


def _find_end(start: Sequence[LogRecord]) -> tuple[int, int, tuple[str, ...]] | None:
    """Return the first and the last round of a start, and what it printed below.

    None: rounds or an end are missing.
    """
    found = [one for record in start if (one := progress_in(record)) is not None]
    steps = [progress.step for progress in found]
    if not steps or len({progress.what for progress in found}) > 1:
        return None
    if steps != list(range(steps[0], steps[0] + len(steps))):
        return None
    below = tuple(get_shape(one.text) for one in start if one.number > found[-1].number)
    is_whole = steps[0] in {0, 1} and len(steps) % _MIN_ROUNDS == 0 and bool(below)
    return (steps[0], steps[-1], below) if is_whole else None
