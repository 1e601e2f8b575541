"""The simulated object storage of an attempt: its ``error.pb``, and who wrote it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from lab.simulated_jobs.events import Events


@dataclass
class Storage:
    """One folder that all nodes share."""

    events: Events
    draw: random.Random
    creates_once: bool
    """Whether an upload fails if the file exists, as S3's ``If-None-Match: *`` does."""
    verdict: bytes = b""
    writes: list[tuple[float, int, bytes]] = field(default_factory=list)
    """Time, group rank and content of each write."""
    down_until: float = 0.0

    def read(self, seconds: float, answer: Callable[[bytes | None], None]) -> None:
        """Read the file; None if that takes longer than `seconds`."""
        took = self._get_seconds(0.03, 10.0)
        if took > seconds:
            self.events.after(seconds, lambda: answer(None))
        else:
            self.events.after(took, lambda: answer(self.verdict))

    def write(
        self,
        group_rank: int,
        document: bytes,
        seconds: float,
        answer: Callable[[bytes | None], None],
    ) -> None:
        """Upload the file unless it exists. `answer` gets what counts; None after `seconds` without
        an answer. The upload may still land then.

        If the storage can't do that at once, it is asked first whether there is a file.
        """
        took = self._get_seconds(0.05, 8.0)
        if not self.creates_once and self.verdict:
            self.events.after(min(took, seconds), lambda: answer(self.verdict))
            return

        def land() -> None:
            if not (self.creates_once and self.verdict):
                self.verdict = document
                self.writes.append((self.events.now, group_rank, document))
                self.events.log(f"    error.pb := {document!r} by {group_rank}")
            if took <= seconds:
                answer(self.verdict if self.creates_once else document)

        self.events.after(took, land)
        if took > seconds:
            self.events.after(seconds, lambda: answer(None))

    def _get_seconds(self, least: float, rate: float) -> float:
        slow = self.draw.uniform(1, 7) if self.draw.random() < 0.1 else 0.0
        outage = max(self.down_until - self.events.now, 0.0)
        return least + self.draw.expovariate(rate) + slow + outage
