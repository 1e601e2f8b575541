"""Ranks that print all their output when they exit:
one rank's end may be above its peers' steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.attempts import Progress, find_progress
from firstfault_logs.completion.words import is_noise
from firstfault_logs.framing.named_ranks import DECLARED_RANK, LOGGED_RANK

if TYPE_CHECKING:
    from firstfault_logs.framing.labels import LogRecord

_NOT_OF_TRAINING = LazyPattern(
    r"""(?i)
        \b(?:eval\w*|val|valid\w*|test\w*|infer\w*|predict\w*|best)\b
        [^\n]{0,40}?(?:step|iter\w*|epoch|batch)\W{0,3}\d
    """
)


def find_training_step(record: LogRecord) -> Progress | None:
    """Return the training step in a line, or None if it has none or that of an evaluation."""
    progress = find_progress(record)
    if progress is None or is_noise(record.text):
        return None
    return None if _NOT_OF_TRAINING.search(record.text) else progress


def drop_steps_of_peers(tail: Sequence[LogRecord], number: int) -> Sequence[LogRecord]:
    """Return the lines without steps below an end that show no further work; otherwise all lines.

    A program may print all its lines when it exits if its stdout is a file or a pipe, so each
    rank's steps are in one piece. Steps below the end belong to the same training if each line has
    a rank, each rank's steps are above or below the end, and all ranks stop at the same step.

    Args:
        tail: the last lines of a file, in order.
        number: of the line that reports the end.
    """
    last_steps: dict[int, dict[str, int]] = {}
    above: set[int] = set()
    dropped: set[int] = set()
    for record in tail:
        step = find_training_step(record)
        if step is None:
            continue
        rank = _find_rank(record)
        unit = step.what.lower()
        is_below = record.number > number
        if rank is None or (is_below and rank in above):
            return tail
        last_of_rank = last_steps.setdefault(rank, {})
        if step.step < last_of_rank.get(unit, 0):
            return tail
        last_of_rank[unit] = step.step
        dropped.update([record.number] if is_below else [])
        above.update([] if is_below else [rank])
    first = next(iter(last_steps.values()), None)
    if not above or any(one != first for one in last_steps.values()):
        return tail
    return [record for record in tail if record.number not in dropped]


def _find_rank(record: LogRecord) -> int | None:
    """Return the rank that a line gives as its process's, or None if it gives none."""
    if record.label.rank is not None:
        return record.label.rank
    forms = (LOGGED_RANK, DECLARED_RANK)
    named = next(filter(None, (form.match(record.text) for form in forms)), None)
    return int(named["rank"]) if named is not None else record.label.task
