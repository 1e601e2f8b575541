"""The rounds of a training's outer loop in the last lines of a log,
and whether the last round is whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.attempts import TRAINING_STEP
from firstfault_logs.completion.loops import list_counters
from firstfault_logs.framing.lines import UNNAMED_BAR

if TYPE_CHECKING:
    from firstfault_logs.completion.loops import Loop, Loops
    from firstfault_logs.framing.labels import LogRecord

_MIN_ROUNDS = 3
"""Beginnings of rounds among the last lines: the first of them may be that of half a round."""
_SHAPE_CHARS = 120

_NUMBER = re.compile(r"(?i)(?<![a-z])(?:nan|inf)\b|[-+]?\d[\d.,:]*(?:e[-+]?\d+)?")
_BLANKS = re.compile(r"\s+")
_STEP_OF_TOTAL = LazyPattern(
    r"(?<![\d./])(?P<step>\d{1,9})[ ]?/[ ]{0,3}(?P<total>\d{1,9})(?![\d./])"
)

# The batch in "[3][120]" and in "[3, 120]"
_BATCH_IN_BRACKETS = LazyPattern(
    r"\[\s*\d{1,9}\s*\](?:\[\s*|\s*,\s*|,\s*)\d{1,9} | \[\s*\d{1,9},\s*\d{1,9}\s*\]"
)
_LETTER = LazyPattern(r"[^\W\d_]")
_TIME_LEFT = LazyPattern(r"(?i)\beta\W{0,3}(?!0+:0+(?::0+)?\b|0+s?\b)\d")


def get_shape(text: str) -> str:
    """Return a line without its numbers."""
    return _BLANKS.sub(" ", _NUMBER.sub("#", text.strip()))[:_SHAPE_CHARS]


def find_end_of_last_round(tail: Iterable[LogRecord], loop: Loop) -> LogRecord | None:
    """Return the line with which the last round of a loop ends, as earlier rounds ended, or None if
    that line may be cut off.

    Args:
        tail: the last lines of a stream.
        loop: a counter at its end.
    """
    rounds = list(_split(tail, loop))
    if len(rounds) < _MIN_ROUNDS:
        return None
    last = [(get_shape(record.text), record) for record in rounds[-1]]
    counts = Counter(shape for shape, _ in last)
    # the first one may have begun above the tail
    ends = {
        get_shape(one[-1].text): Counter(get_shape(record.text) for record in one)
        for one in rounds[1:-1]
    }
    for shape, record in reversed(last):
        of_round = ends.get(shape)
        if (
            of_round is not None
            and counts[shape] >= of_round[shape]
            and not is_within_round(record.text, loop)
        ):
            return next((one for one in rounds[-1][::-1] if _has_words(one, record)), record)
    return None


def _has_words(record: LogRecord, end: LogRecord) -> bool:
    """Whether a line isn't below the end of a round, and no rule of dashes."""
    return record.number <= end.number and _LETTER.search(record.text) is not None


def find_outer_bar(tail: Iterable[LogRecord], loops: Loops) -> LogRecord | None:
    """Return the bar without a name of the outer loop at its end, or None if there is none.

    It's the only one of its length, and a counter that is printed without its total ended with it.
    """
    bars = [
        (int(bar["total"]), record)
        for record in tail
        if "100%|" in record.text and (bar := UNNAMED_BAR.match(record.text))
    ]
    counts = Counter(total for total, _ in bars)
    if loops.is_unfinished():
        return None
    for total, record in reversed(bars):
        if counts[total] == 1 and any(
            loop.is_outer and loop.is_at_last_round(total) for loop in loops.open
        ):
            return record
    return None


def is_last_round_cut(tail: Iterable[LogRecord], loop: Loop) -> bool:
    """Whether the last line with a loop's counter came more often in each earlier round:
    batches are missing.
    """
    rounds = list(_split(tail, loop))
    if len(rounds) < _MIN_ROUNDS:
        return False
    shape = next(
        get_shape(one.text)
        for one in reversed(rounds[-1])
        if _find_step(one.text, loop) is not None
    )
    counts = [sum(get_shape(record.text) == shape for record in one) for one in rounds[1:]]
    return counts[-1] < min(counts[:-1])


def is_within_round(text: str, loop: Loop) -> bool:
    """Whether a line was printed while a round of a loop went on: it counts batches,
    or has time left.
    """
    if _BATCH_IN_BRACKETS.search(text) or _TIME_LEFT.search(text):
        return True
    for match in TRAINING_STEP.finditer(text):
        what = match["what"].lower()
        if what not in {loop.what, "epoch"} and "global" not in what and not match["total"]:
            return True
    pairs = [(int(match["step"]), int(match["total"])) for match in _STEP_OF_TOTAL.finditer(text)]
    return any(step < total and (step, total) != (loop.step, loop.total) for step, total in pairs)


def _split(tail: Iterable[LogRecord], loop: Loop) -> Iterator[list[LogRecord]]:
    """Yield the lines of each round: from the first line with a new value of the counter on."""
    current: list[LogRecord] | None = None
    last_step = -1
    for record in tail:
        step = _find_step(record.text, loop)
        if step is not None and step > last_step:
            if current:
                yield current
            current, last_step = [], step
        if current is not None and record.text.strip():
            current.append(record)
    if current:
        yield current


def _find_step(text: str, loop: Loop) -> int | None:
    """Return the value of a loop's counter in a line, or None if the line has none."""
    for counter in list_counters(text):
        if (counter.what, counter.total) == (loop.what, loop.total):
            return counter.step
    return None
