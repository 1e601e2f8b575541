"""What shows that the outer loop of a training has ended: its last round is whole, its bar is full,
or a summary follows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.attempts import TRAINING_STEP, find_progress
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


_MIN_ROUNDS_OF_SUMMARY = 3
"""Epochs, or steps of a training without epochs, among the last lines:
what each round prints came again in them.
"""
_MIN_ROUNDS_OF_TEST = 10
"""The same for a test, which a program may run every few rounds."""
_MAX_CHARS = 300

_SUMMARY_PREFIX = r"^(?:[^\w\n]|\d|[TZ]\b|\b(?:INFO|root|main|__main__)\b){0,60}"
_SUMMARY_LINE = LazyPattern(
    rf"""(?i)
            {_SUMMARY_PREFIX}(?:the[ ]|overall[ ]|final[ ])?best\b[ :=(]{{1,3}}
              (?:\w+[ _@.-]){{0,3}}(?:epoch|iter\w*|step|round|val\w*|test\w*|dev|acc\w*|loss|f1|score|metric\w*|m?ap
              |auc|bleu|wer|reward|result)\b[^\n]{{0,40}}\d
          | {_SUMMARY_PREFIX}(?:all[ ])?(?:done|finished|completed?)\W{{0,3}}$
          | \bresults?[ ](?:are[ ]|were[ ]|have[ ]been[ ])?(?:saved|written|stored)[ ](?:to|in|at|into)\b
          | \b(?:elapsed|execution|running|run)[ ]?time\b[^\n]{{0,20}}\d | \btime[ ]elapsed\b[^\n]{{0,20}}\d
          | ^wandb:[ ](?:Run[ ]summary:|Synced[ ]\d|Find[ ]logs[ ]at)
        """
)

# Of a round
_PASSING_RESULT = LazyPattern(
    r"""(?i)
            \b(?:new|improv\w*|so[ ]far|updat\w*|current\w*|patience|until[ ]now|previous|prev|eta|remaining)\b
        """
)
_TEST_RESULT = LazyPattern(
    r"""(?i)
            \b(?:test|testing)\b[^\n]{0,30}\b(?:acc\w*|loss|score|error|bleu|perplexity|ppl|m?ap|auc|wer|f1|rmse|mse|mae)\b
            [^\n]{0,30}\d
        """
)

# An earlier step that is mentioned, and not run
_MENTIONED_STEP = LazyPattern(r"(?i)\b(?:best|eval\w*|valid\w*|test\w*|load\w*|sav\w*)\b")


def find_summary(tail: Iterable[LogRecord], loops: Loops) -> LogRecord | None:
    """Return the line of a summary below the last step that no earlier round had, or None if there
    is no such line.

    Args:
        tail: the last lines of a stream.
        loops: the counters of that stream.
    """
    records = [record for record in tail if record.text.strip()]
    if loops.is_unfinished():
        return None
    steps = [
        (at, progress)
        for at, record in enumerate(records)
        if (progress := find_progress(record)) is not None
        and not _MENTIONED_STEP.search(record.text)
    ]
    counted = Counter(progress.what.lower() for _, progress in steps)
    unit = "epoch" if "epoch" in counted else next(iter(counted), "")
    rounds = len({progress.step for _, progress in steps if progress.what.lower() == unit})
    if rounds < _MIN_ROUNDS_OF_SUMMARY:
        return None
    return _find_below(records, steps[-1][0] + 1, rounds)


def _find_below(records: Sequence[LogRecord], begin: int, rounds: int) -> LogRecord | None:
    shapes = Counter(get_shape(record.text) for record in records)
    for record in records[begin:]:
        text = record.text
        if len(text) > _MAX_CHARS or shapes[get_shape(text)] > 1 or _PASSING_RESULT.search(text):
            continue
        if _SUMMARY_LINE.search(text):
            return record
        if rounds >= _MIN_ROUNDS_OF_TEST and _TEST_RESULT.search(text):
            return record
    return None
