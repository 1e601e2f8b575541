"""Heartbeats between the monitor processes: the rank of a process that falls silent is lost."""

from __future__ import annotations

import time
from collections.abc import Callable

from firstfault_inprocess.options import InProcessOptions
from firstfault_inprocess.progress import SharedProgress
from firstfault_inprocess.store import Fault, FaultKind, Iteration, IterationEnd


class HeartbeatRing:
    """Sends the heartbeats of one rank, and reports the next rank if its heartbeats stay away.

    A ring: each monitor process checks the next rank only, at the same cost for any world size.
    Behind a silent rank it also checks the following ones, because nobody else does.
    `open_iteration` returns the current iteration.
    """

    def __init__(
        self,
        progress: SharedProgress,
        initial_rank: int,
        options: InProcessOptions,
        open_iteration: Callable[[], Iteration],
    ) -> None:
        self._progress = progress
        self._initial_rank = initial_rank
        self._interval = options.seconds("heartbeat_interval")
        self._timeout = options.seconds("heartbeat_timeout")
        self._open_iteration = open_iteration
        self._last_changes: dict[tuple[int, int], tuple[int, float]] = {}
        """By iteration and rank: the number of heartbeats, and when it last changed."""
        self._next_beat = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it's time for the next heartbeat."""
        return time.monotonic() >= self._next_beat

    def forget(self) -> None:
        """Forget the heartbeats of the peers."""
        self._last_changes = {}

    def postpone(self, seconds: float) -> None:
        """Give the peers this much longer."""
        # A list first: the thread of the store's calls may add a rank at the same time, which would
        # end an iteration over the dict.
        self._last_changes = {
            key: (beats, since + seconds)
            for key, (beats, since) in list(self._last_changes.items())
        }

    def beat(self) -> None:
        """Send a heartbeat, and look for the next rank's;
        report a rank that hasn't sent one for too long.
        """
        now = time.monotonic()
        # First: a store that fails below is asked again only after the interval.
        self._next_beat = now + self._interval
        iteration = self._open_iteration()
        rank = self._progress.rank
        world = self._progress.world_size
        iteration.beat(rank, self._initial_rank)
        for step in range(1, world):
            other = (rank + step) % world
            # After COMPLETED monitor processes end one by one, and silence is normal.
            if (
                not self._is_silent(iteration, other, now)
                or iteration.outcome() is IterationEnd.COMPLETED
            ):
                return
            # Another monitor process may have reported the rank: arriving twice would open the
            # barrier too early.
            if other in iteration.gone():
                continue  # its monitor process is gone too, so this one checks the next rank
            began_as = iteration.initial_rank(other)
            what = "no heartbeat of its monitor process"
            iteration.interrupt(
                Fault(other, FaultKind.UNRESPONSIVE, what, time.time_ns(), began_as)
            )
            iteration.leave(other)
            iteration.arrive()

    def _is_silent(self, iteration: Iteration, other: int, now: float) -> bool:
        """Whether a rank has sent nothing for too long."""
        key = (iteration.number, other)
        beats, since = self._last_changes.get(key, (-1, now))
        # The time counts from this process's own first check in the iteration, so clocks of other
        # hosts don't matter.
        current = iteration.beats(other)
        if current != beats:
            self._last_changes[key] = (current, now)
            return False
        return now - since >= self._timeout
