"""Whether the workers of a node make progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from firstfault.model import Progress

_STEADY = 3
"""Looks with progress after which a training has begun; its first steps may compile for long."""
_FIRST = 3
"""So many times longer the first steps may take."""


@dataclass
class ProgressTracker:
    """Tells from look to look since when no worker of a node has made progress in its collectives."""

    since: float
    """Seconds of the monotonic clock."""
    looks: int = 0
    """With progress, so far."""
    first: float | None = None
    """When the first of them was."""
    moved: dict[int, float] = field(default_factory=dict)
    """By local rank: when its collectives last made progress, seconds of the monotonic clock."""
    _counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    _places: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By local rank: where the main thread is, and since when."""
    _answered: dict[int, float] = field(default_factory=dict)
    has_moved: bool = False
    """Whether there was progress at the last look."""

    def look(self, now: float, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """Take the workers' answers to `PULSE`, by local rank; one that doesn't answer makes no progress."""
        self.has_moved = False
        for rank, answer in answers.items():
            counts = int(answer.get("begun", -1)), int(answer.get("ended", -1))
            if counts[0] >= 0 and self._counts.get(rank) != counts:  # below 0: its recorder didn't answer
                self.has_moved |= self._counts.get(rank, (0, 0)) != counts
                self._counts[rank], self.moved[rank] = counts, now
            self._answered[rank] = now
            if self._places.get(rank, (None,))[0] != answer.get("at"):
                self._places[rank] = answer.get("at", 0), now
        if self.has_moved:
            self.looks += 1
            self.since = now
            self.first = now if self.first is None else self.first

    def skip(self, seconds: float) -> None:
        """Leave out a time in which this agent didn't run: the pod or the machine was frozen."""
        self.since += seconds
        self.first = None if self.first is None else self.first + seconds
        self._places = {rank: (at, since + seconds) for rank, (at, since) in self._places.items()}

    def seconds(self, now: float) -> float:
        """Return how long no worker has made progress; of the first steps a third."""
        return (now - self.since) / (1 if self.looks >= _STEADY else _FIRST)

    def progress(self) -> Progress:
        """Return how far the workers came."""
        seconds = self.since - self.first if self.first is not None else 0.0
        return Progress(max(self.begun.values(), default=0), max(seconds, 0.0))

    @property
    def begun(self) -> dict[int, int]:
        """How many collectives each worker has begun, by local rank."""
        return {rank: begun for rank, (begun, _) in self._counts.items()}

    def silent(self, local_rank: int, now: float) -> float:
        """Return how long a worker hasn't answered."""
        return now - self._answered.get(local_rank, self.since)

    def stood(self, local_rank: int, now: float) -> float | None:
        """Return how long a worker's main thread has been at the same place at least; None: it doesn't answer."""
        place = self._places.get(local_rank)
        return now - place[1] if place is not None else None
