"""What a program prints once, below its last step: its best epoch, how long it took,
a test of its best model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.attempts import find_progress
from firstfault_logs.completion.rounds import get_shape

if TYPE_CHECKING:
    from firstfault_logs.completion.loops import Loops
    from firstfault_logs.framing.labels import LogRecord

_MIN_ROUNDS = 3
"""Epochs, or steps of a training without epochs, among the last lines:
what each round prints came again in them.
"""
_MIN_ROUNDS_OF_TEST = 10
"""The same for a test, which a program may run every few rounds."""
_MAX_CHARS = 300

_PREFIX = r"^(?:[^\w\n]|\d|[TZ]\b|\b(?:INFO|root|main|__main__)\b){0,60}"
_SUMMARY_LINE = LazyPattern(
    rf"""(?i)
            {_PREFIX}(?:the[ ]|overall[ ]|final[ ])?best\b[ :=(]{{1,3}}
              (?:\w+[ _@.-]){{0,3}}(?:epoch|iter\w*|step|round|val\w*|test\w*|dev|acc\w*|loss|f1|score|metric\w*|m?ap
              |auc|bleu|wer|reward|result)\b[^\n]{{0,40}}\d
          | {_PREFIX}(?:all[ ])?(?:done|finished|completed?)\W{{0,3}}$
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
    if rounds < _MIN_ROUNDS:
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
