"""The time limits of a stall watch."""

from __future__ import annotations

from dataclasses import dataclass

from firstfault_torch import time_limits

FIRST_STEPS_FACTOR = 3
"""In the first steps, busy ranks are reported, and a stalled attempt is ended,
after this many times longer.
"""
POLLS_PER_WARNING = 6
"""Polls in the shortest time until a warning or an end."""
FROZEN_AGENT_FACTOR = 3
"""If two polls are this many intervals apart, the agent was frozen in between."""


@dataclass(frozen=True, slots=True)
class StallLimits:
    """Time limits of a stall watch in seconds."""

    warn: float | None
    """Without progress until the first report; None if none is printed."""
    end: float | None
    """Without progress until the attempt is ended; None if it isn't."""
    busy: float | None
    """Like `end` if the straggler is busy."""
    poll: float
    """Between two polls."""
    frozen: float
    """Between two polls if the agent was frozen."""
    reports: float
    """For the peers' observations."""

    @property
    def nearest(self) -> float:
        """Seconds without progress until anything is done."""
        return min(seconds for seconds in (self.warn, self.end) if seconds is not None)


def build_stall_limits(
    warn: float | None, end: float | None = None, busy: float | None = None
) -> StallLimits:
    """Return the limits for a user's option."""
    given = [seconds for seconds in (warn, end) if seconds is not None]
    longest_poll = float(time_limits.PROGRESS_POLL_SECONDS)
    poll = min([longest_poll, *(seconds / POLLS_PER_WARNING for seconds in given)])
    reports = time_limits.STALL_REPORTS_TIMEOUT_SECONDS * poll / longest_poll
    return StallLimits(
        warn,
        end,
        busy,
        poll,
        frozen=FROZEN_AGENT_FACTOR * poll + time_limits.WORKER_QUERY_TIMEOUT_SECONDS,
        reports=reports + time_limits.STORE_TIMEOUT_SECONDS,
    )
