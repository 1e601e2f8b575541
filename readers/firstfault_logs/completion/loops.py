"""The counters of a training's loops: which one is the outer loop's,
and whether it's at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.attempts import TRAINING_STEP

_MAX_LOOPS = 16
"""Counters with different names or totals in one stream; a data set of varying size has more."""
_MAX_CONFIGURED_TOTALS = 8
"""Different totals of a configuration that are kept for each unit."""
_BRACKET_CHARS = 40
"""Characters at the begin of a line in which a counter in brackets ends."""
_MIN_FROM_ZERO = 10
"""With fewer rounds, the last but one would often be taken for the last one of a counter from 0."""
NO_EPOCH = -1
"""The epoch of a line that shows none."""
_EPOCH = "epoch"
_STEP = "step"

# How long the training shall be, in a configuration, a command or a sentence of its begin
_CONFIGURED_COUNT = LazyPattern(
    r"""(?i)
            (?<![a-z\d_.-]) (?:--)?
            (?: (?:(?:num(?:ber[ ]of)?|n|nb|max|total)[ _-]{1,2})? (?:train(?:ing)?[ _-])? (?P<epochs>epochs)
              | (?:num|n|nb|max|total)[ _-] (?:train(?:ing)?[ _-])? (?P<epoch>epoch)
              | (?:max|total)[ _-] (?:(?:train(?:ing)?|optimization)[ _-])? (?:steps|iter(?:ation)?s?)
              | (?:num|n)[ _-] (?:train(?:ing)?[ _-])? (?:iters|iterations)
              | (?:num[ _-])?train[ _-](?:steps|iters|iterations) | iters
            )
            (?:["']?\s{0,4}[=:|,]\s{0,12}|\s{1,12}) ["']?
            (?P<total>\d[\d,]{0,11})(?:\.0+)?(?![\w./:%])
        """
)

# The epochs of a training as a range, from the first epoch to one past the last
_STEP_RANGE = LazyPattern(
    r"""(?i)
            \bstart[ _-]?epoch\W{1,3}(?P<begin>\d{1,6})\W{1,3}end[ _-]?epoch\W{1,3}(?P<end>\d{1,6})\b
        """
)

# A counter at the begin of a line, as in: [ Train | 012/100 ] loss 0.3
_BRACKETED_STEP = LazyPattern(
    r"""
            ^\W{0,3}\[\s{0,3}
            (?:(?P<what>[A-Za-z]{3,12})[ ]{0,3}[|:]?[ ]{0,3})?
            (?P<step>\d{1,9})/(?P<total>\d{1,9})\s{0,3}\]
        """
)

# An earlier step that is mentioned, and not run again
_MENTIONED_STEP = LazyPattern(
    r"(?i)\b(?:best|eval\w*|valid\w*|test\w*|load\w*|resum\w*|sav\w*|checkpoint\w*)\b"
)


class CounterValue(NamedTuple):
    """A counter in a line."""

    what: str
    step: int
    total: int
    """0 if the line doesn't show it."""


def list_counters(text: str) -> Iterator[CounterValue]:
    """Yield the counters in a line: the first one, and all others that have a total."""
    for at, match in enumerate(TRAINING_STEP.finditer(text)):
        total = int(match["total"] or 0)
        if total or not at:
            yield CounterValue(match["what"].lower(), int(match["step"]), total)
    if has_brackets(text) and (bracket := _BRACKETED_STEP.match(text)) is not None:
        yield CounterValue(
            f"[{bracket['what'] or ''}]", int(bracket["step"]), int(bracket["total"])
        )


@dataclass(slots=True)
class Loop:
    """A counter that a program prints: "step 370/1000", or without its total, "epoch 3"."""

    what: str
    total: int
    """0 if the line doesn't show it."""
    step: int
    number: int
    """Number of the line in which it had this step."""
    first: int
    """The first step that was seen."""
    began_again: bool = False
    """Whether it fell back: it belongs to an inner loop, or the training was restarted."""
    first_epoch: int = NO_EPOCH
    """The epoch in the line with its first step."""
    last_epoch: int = NO_EPOCH
    """The epoch in the line with its last step."""

    @property
    def is_outer(self) -> bool:
        """Whether it counts the whole work, as far as the log shows."""
        return not self.began_again

    @property
    def is_at_end(self) -> bool:
        """Whether its last step was printed."""
        return self.step >= self.total or (
            self.total >= _MIN_FROM_ZERO and self.is_at_last_round(self.total)
        )

    @property
    def spans_epochs(self) -> bool:
        """Whether it went on from one epoch to the next, so it's not the loop within an epoch."""
        return not self.began_again and self.last_epoch > self.first_epoch > NO_EPOCH

    @property
    def may_be_of_an_epoch(self) -> bool:
        """Whether it counts steps and showed a single epoch: the next one may begin it again."""
        return self.unit != _EPOCH and self.first_epoch == self.last_epoch > NO_EPOCH

    @property
    def unit(self) -> str:
        """What it counts: epochs or steps."""
        return _EPOCH if self.what == _EPOCH else _STEP

    def is_at_last_round(self, total: int) -> bool:
        """Whether its step is the last one of this many;
        a counter that began at 0 ends one below them.
        """
        return self.step == total or (self.first == 0 and self.step == total - 1)


def may_configure(text: str) -> bool:
    """Whether a line may name the length of a training; without a loop,
    because each line of a log is tested.
    """
    return (
        "pochs" in text
        or "POCH" in text
        or "_epoch" in text
        or "-epoch" in text
        or "iters" in text
        or "_iter" in text
        or "steps" in text
    )


def has_brackets(text: str) -> bool:
    """Whether a line may begin with a counter in brackets; without a loop,
    because each line of a log is tested.
    """
    begin = text[:_BRACKET_CHARS]
    return "]" in begin and "/" in begin


@dataclass(slots=True)
class Loops:
    """The counters in one stream."""

    configured: dict[str, set[int]] = field(default_factory=dict)
    """How many epochs and steps a configuration names."""
    _loops: dict[tuple[str, int], Loop] = field(default_factory=dict)

    @property
    def open(self) -> list[Loop]:
        """The counters that are printed without their total."""
        return [loop for loop in self._loops.values() if not loop.total]

    def take(self, text: str, number: int) -> None:
        """Take the counters of a line."""
        if self._take_range(text):
            return
        counters = list(list_counters(text))
        epoch = next((counter.step for counter in counters if counter.what == _EPOCH), NO_EPOCH)
        if epoch != NO_EPOCH and len(counters) > 1 and self._start_over(counters):
            for counter in counters:
                self._loops.pop((counter.what, counter.total), None)
        for counter in counters:
            self._take(counter, epoch, number, text)

    def _take_range(self, text: str) -> bool:
        match = _STEP_RANGE.search(text) if "tart" in text else None
        if match is None:
            return False
        begin = int(match["begin"])
        end = int(match["end"])
        # with another begin, the end may be the last epoch, or one past it as in Python's
        # range
        if begin == 0 and end:
            self.configured.setdefault(_EPOCH, set()).add(end)
        return True

    def _start_over(self, counters: Sequence[CounterValue]) -> bool:
        """Whether a line with an epoch has the first value of each counter again, after a restart.

        When an inner loop begins again, the epoch is a later one.
        """
        loops = [self._loops.get((counter.what, counter.total)) for counter in counters]
        pairs = [
            (counter.step, loop)
            for counter, loop in zip(counters, loops, strict=True)
            if loop is not None and not loop.began_again
        ]
        is_first = all(step <= loop.first for step, loop in pairs)
        return (
            len(pairs) == len(counters)
            and is_first
            and any(step < loop.step for step, loop in pairs)
        )

    def _take(self, counter: CounterValue, epoch: int, number: int, text: str) -> None:
        key = (counter.what, counter.total)
        loop = self._loops.get(key)
        step = counter.step
        if loop is None:
            if len(self._loops) < _MAX_LOOPS:
                self._loops[key] = Loop(
                    *key,
                    step,
                    number,
                    step,
                    first_epoch=epoch,
                    last_epoch=epoch,
                )
            return
        if step < loop.step and not loop.total and _MENTIONED_STEP.search(text):
            return
        loop.began_again |= step < loop.step
        loop.step, loop.number, loop.last_epoch = step, number, epoch

    def take_configuration(self, text: str) -> None:
        """Take the length of the training that a line names, if it does."""
        self._take_range(text)
        for match in _CONFIGURED_COUNT.finditer(text):
            unit = _EPOCH if match["epochs"] or match["epoch"] else _STEP
            totals = self.configured.setdefault(unit, set())
            if len(totals) < _MAX_CONFIGURED_TOTALS:
                totals.add(int(match["total"].replace(",", "")))

    def find_finished(self) -> Loop | None:
        """Return the counter of the outer loop at its end, or None if there is none or another
        counter isn't at its end.
        """
        if len(self._loops) >= _MAX_LOOPS:
            return None
        outer = [loop for loop in self._loops.values() if loop.total and loop.is_outer]
        if not outer or not all(loop.is_at_end for loop in outer):
            return None
        return max(outer, key=lambda loop: loop.number)

    def is_unfinished(self) -> bool:
        """Whether the counter of an outer loop isn't at its end."""
        if any(
            loop.total and loop.is_outer and not loop.is_at_end for loop in self._loops.values()
        ):
            return True
        return any(self._is_below_configured(loop) for loop in self.open if loop.is_outer)

    def _is_below_configured(self, loop: Loop) -> bool:
        totals = self.configured.get(loop.unit, set())
        return bool(totals) and loop.step < max(totals) and not loop.is_at_last_round(max(totals))

    def list_ended(self, totals: dict[str, set[int]]) -> list[Loop]:
        """Return the counters of outer loops at their end.

        Args:
            totals: by unit, how many epochs and steps the training has; a counter without a total
                is measured by them.
        """
        if len(self._loops) >= _MAX_LOOPS or self.is_unfinished():
            return []
        outer = (loop for loop in self._loops.values() if loop.total and loop.is_outer)
        whole = [loop for loop in outer if not loop.may_be_of_an_epoch]
        of_open = (loop for loop in self.open if loop.is_outer and totals.get(loop.unit))
        return [
            *whole,
            *(loop for loop in of_open if loop.is_at_last_round(max(totals[loop.unit]))),
        ]
