"""Several starts of a program in one log: the end of an earlier one proves
nothing about a later one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from firstfault_logs.attempts import find_progress
from firstfault_logs.completion.rounds import get_shape
from firstfault_logs.completion.words import is_noise

if TYPE_CHECKING:
    from firstfault_logs.framing.labels import LogRecord

_MIN_OPENING_LINES = 3
"""Different lines of an opening that show a start when they come again."""
_MIN_OPENING_SHARE = 0.5
"""A start prints at least this part of its opening again; the rest may depend on options."""
_MIN_LETTERS = 8
"""Shorter lines, such as a closing bracket, may be anywhere in a log."""
_MAX_STEPS_BEHIND = 1
"""A slow rank may print an earlier step than the fastest one did."""

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
    return any(find_progress(record) is not None for record in below) and _falls_back(tail, number)


def _repeats_opening(opening: Iterable[LogRecord], below: Iterable[LogRecord], number: int) -> bool:
    first = _list_shapes(record for record in opening if record.number < number)
    again = first & _list_shapes(below)
    return len(again) >= max(_MIN_OPENING_LINES, len(first) * _MIN_OPENING_SHARE)


def _list_shapes(records: Iterable[LogRecord]) -> set[str]:
    shapes = (get_shape(record.text) for record in records if not is_noise(record.text))
    return {shape for shape in shapes if len(_NO_LETTER.sub("", shape)) >= _MIN_LETTERS}


def _falls_back(tail: Iterable[LogRecord], number: int) -> bool:
    max_steps: dict[tuple[str, str], int] = {}
    for record in tail:
        progress = find_progress(record)
        if progress is None or is_noise(record.text) or _MENTIONED.search(record.text):
            continue
        kind = (progress.what.lower(), get_shape(record.text))
        if record.number > number and progress.step < max_steps.get(kind, -1) - _MAX_STEPS_BEHIND:
            return True
        if record.number < number:
            max_steps[kind] = max(max_steps.get(kind, -1), progress.step)
    return False
