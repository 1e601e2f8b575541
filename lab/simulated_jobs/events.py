"""The queue of events: a simulated clock that jumps from one to the next."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], None]


class Events:
    """Actions in the order of their times, which are seconds since the start of the schedule."""

    def __init__(self, *, trace: bool = False) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        """What has happened, if the schedule is traced."""
        self._trace = trace
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def at(self, when: float, action: Action) -> None:
        """Do something at a time, not before now."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        """Do something after a time."""
        self.at(self.now + seconds, action)

    def log(self, text: str) -> None:
        """Add a line to the trace."""
        if self._trace:
            self.lines.append(f"{self.now:9.3f} {text}")

    def play(self, until: float, most: int = 5_000_000) -> None:
        """Do what is due, in order, up to a time."""
        for _ in range(most):
            if not self._heap or self._heap[0][0] > until:
                return
            self.now, _, action = heapq.heappop(self._heap)
            action()
        raise RuntimeError(f"more than {most} events: an agent asks in a loop")
