"""The counters of a training's loops: which one is the outer loop's, and whether it's at its end."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_LOOPS = 16
"""Counters with different names or totals in one stream; a data set of varying size has more."""


@dataclass(slots=True)
class Loop:
    """A counter that a program prints with its total: "step 370/1000"."""

    what: str
    total: int
    step: int
    number: int
    """Of the line in which it had this step."""
    began_again: bool = False
    """Whether it fell back: it belongs to an inner loop, or the training was restarted."""

    @property
    def is_outer(self) -> bool:
        """Whether it counts the whole work, as far as the log shows."""
        return not self.began_again

    @property
    def is_at_end(self) -> bool:
        """Whether its last step was printed."""
        return self.step >= self.total


class Loops:
    """The counters in one stream."""

    def __init__(self) -> None:
        self._loops: dict[tuple[str, int], Loop] = {}

    def take(self, what: str, step: int, total: int, number: int) -> None:
        """Take a counter's value."""
        key = (what.lower(), total)
        loop = self._loops.get(key)
        if loop is None:
            if len(self._loops) < _MAX_LOOPS:
                self._loops[key] = Loop(*key, step, number)
            return
        loop.began_again |= step < loop.step
        loop.step, loop.number = step, number

    def find_finished(self) -> Loop | None:
        """Return the counter of the outer loop at its end; None: there's none, or another one isn't at its end."""
        if len(self._loops) >= _MAX_LOOPS:
            return None
        outer = [loop for loop in self._loops.values() if loop.is_outer]
        if not outer or not all(loop.is_at_end for loop in outer):
            return None
        return max(outer, key=lambda loop: loop.number)
