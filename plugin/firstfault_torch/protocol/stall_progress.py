"""Whether the workers of a node make progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from firstfault.model import Progress

POLLS_UNTIL_STEADY = 3
"""Polls with progress until a training counts as running steadily;
its first steps may compile for minutes.
"""


@dataclass
class ProgressTracker:
    """Tracks from poll to poll when a worker of this node last made progress in its collectives."""

    since: float
    """Time of the last progress, seconds of the monotonic clock."""
    looks: int = 0
    """Polls with progress so far."""
    first: float | None = None
    """Time of the first of them."""
    moved: dict[int, float] = field(default_factory=dict)
    """By local rank: time of its last progress, seconds of the monotonic clock."""
    _counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    _places: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By local rank: hash of the main thread's position, and since when."""
    _answered: dict[int, float] = field(default_factory=dict)
    has_moved: bool = False
    """Whether the last poll saw progress."""

    def look(self, now: float, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """Process the workers' answers to `PULSE`, by local rank;
        an unresponsive worker makes no progress.
        """
        self.has_moved = False
        for rank, answer in answers.items():
            counts = int(answer.get("begun", -1)), int(answer.get("ended", -1))
            # below 0: its recorder didn't answer
            if counts[0] >= 0 and self._counts.get(rank) != counts:
                # The first answer of a rank counts as progress only if it has called a collective.
                self.has_moved |= self._counts.get(rank, (0, 0)) != counts
                self._counts[rank], self.moved[rank] = counts, now
            self._answered[rank] = now
            if self._places.get(rank, (None,))[0] != answer.get("at"):
                self._places[rank] = answer.get("at", 0), now
        if self.has_moved:
            self.looks += 1
            self.since = now
            self.first = now if self.first is None else self.first

    def skip_frozen_time(self, seconds: float) -> None:
        """Ignore a period in which this agent didn't run: the pod or the machine was frozen."""
        self.since += seconds
        self.first = None if self.first is None else self.first + seconds
        self._places = {rank: (at, since + seconds) for rank, (at, since) in self._places.items()}

    def seconds(self, now: float) -> float:
        """Return the seconds without progress."""
        return now - self.since

    @property
    def is_starting(self) -> bool:
        """Whether the training is in its first steps, which load and compile."""
        return self.looks < POLLS_UNTIL_STEADY

    def progress(self, now: float) -> Progress:
        """Return the progress of the worker that is furthest ahead."""
        seconds = self.since - self.first if self.first is not None else 0.0
        collectives = max(self.enqueued.values(), default=0)
        return Progress(collectives, max(seconds, 0.0), self.seconds(now) if collectives else 0.0)

    @property
    def enqueued(self) -> dict[int, int]:
        """Number of enqueued collectives by local rank."""
        return {rank: begun for rank, (begun, _) in self._counts.items()}

    def has_answered(self, local_rank: int) -> bool:
        """Whether a worker has ever answered."""
        return local_rank in self._answered

    def seconds_without_answer(self, local_rank: int, now: float) -> float:
        """Return how long a worker has been unresponsive."""
        return now - self._answered.get(local_rank, self.since)

    def seconds_at_position(self, local_rank: int, now: float) -> float | None:
        """Return the minimum seconds that a worker's main thread has been at its position. Return
        None if the worker never answered.
        """
        place = self._places.get(local_rank)
        return now - place[1] if place is not None else None
