"""When an agent looks closer at a stall."""

from __future__ import annotations

import math
from collections.abc import Iterable

from firstfault_torch.protocol.stall_limits import FIRST_STEPS_FACTOR, StallLimits
from firstfault_torch.protocol.stall_messages import Conclude

NEXT_LIMIT_FACTOR = 1.5
"""How much longer than at the last check a stall has to be, at least, for the next check."""
LONG_STALL_FACTOR = 4
"""A stall is long after this many times the warning's time."""


class StallTimes:
    """The times of one agent's stall: since when, and when the next look is due.

    All times are seconds of the monotonic clock, or seconds without progress.
    """

    def __init__(self, limits: StallLimits, now: float) -> None:
        self.limits = limits
        self.since = now
        """Time of the last progress."""
        self.is_starting = True
        """Whether the training is in its first steps, which load and compile."""
        self.polled = now
        """When the present poll began."""
        self.polled_until = now
        """When the last poll ended."""
        self._warn_at = limits.warn or 0.0
        """Seconds without progress until the next warning: the option's, and then twice,
        four times... as many.
        """
        self._end_at = 0.0
        """Like `_warn_at` for ending the attempt: the reason that spared it may be gone by then."""
        self._before_look = self._warn_at, self._end_at
        """The limits before the present look."""
        self._warn_at_if_busy: float | None = None
        """The next warning if this look reports nothing because ranks are busy loading or
        compiling; None between two looks.
        """

    @property
    def seconds(self) -> float:
        """The time without progress at this poll."""
        return self.polled - self.since

    @property
    def steady_seconds(self) -> float:
        """The time that counts for an end: the first steps may compile for minutes."""
        return self.seconds / (FIRST_STEPS_FACTOR if self.is_starting else 1)

    @property
    def ends_attempt(self) -> bool:
        """Whether this node has been without progress for long enough to end the attempt."""
        return self.limits.end is not None and self.steady_seconds >= self.limits.end

    @property
    def is_long(self) -> bool:
        """Whether the stall is reported even if the job often resumes from there."""
        return self.seconds >= LONG_STALL_FACTOR * (self.limits.warn or 0.0)

    @property
    def needs_baseline(self) -> bool:
        """Whether the next poll's observation may need a baseline: not earlier in a stall."""
        return self.seconds >= self.limits.nearest / 2

    def build_conclusion(self, missing: Iterable[int]) -> Conclude:
        """Return how to conclude without the observations of the missing nodes."""
        limits, steady_seconds = self.limits, self.steady_seconds
        is_early = steady_seconds < (limits.warn or 0.0)
        return Conclude(
            tuple(sorted(missing)),
            self.seconds,
            self.ends_attempt,
            continues_if_busy=self._spares_busy_ranks(),
            is_starting=self.is_starting,
            is_silent_if_busy=self.is_starting and not self.ends_attempt and is_early,
        )

    def _spares_busy_ranks(self) -> bool:
        return self.limits.busy is None or self.steady_seconds < self.limits.busy

    def begin_poll(self, now: float) -> float:
        """Begin a poll; return for how long this agent was frozen before, 0 if it wasn't."""
        passed = now - self.polled_until
        self.polled = self.polled_until = now
        # CLOCK_MONOTONIC advances while a cgroup is frozen or the agent is stopped. The workers may
        # not have run either: that time isn't a stall.
        return passed if passed > self.limits.frozen else 0.0

    def is_warning_due(self) -> bool:
        """Whether a limit of a warning has come. A warning can be taken back, so it doesn't wait
        for longer in the first steps.
        """
        return self.limits.warn is not None and self.seconds >= self._warn_at

    def is_look_due(self) -> bool:
        """Whether a limit has come."""
        is_end_due = self.ends_attempt and self.steady_seconds >= self._end_at
        return self.is_warning_due() or is_end_due

    def may_join(self) -> bool:
        """Whether to look at a moment that a peer has chosen."""
        # The nodes' times of the last progress differ, by up to minutes if their last collectives
        # did. So each would look at moments of its own, find no peer, and report that none
        # responds. All nodes look at the same moments instead: when the first of them does. A node
        # that may end the attempt in a moment joins then: the peers wait for it, and compare once.
        limits, steady_seconds = self.limits, self.steady_seconds
        is_end_near = (
            limits.end is not None and limits.end - limits.poll <= steady_seconds < limits.end
        )
        return self.seconds >= limits.nearest and not is_end_near

    def begin_look(self) -> None:
        """Set the next limits."""
        # Before the look, which may fail: it isn't repeated at each poll.
        limits, seconds, steady_seconds = self.limits, self.seconds, self.steady_seconds
        self._before_look = self._warn_at, self._end_at
        warn = limits.warn
        self._warn_at_if_busy = seconds + (warn or 0.0) if self.is_warning_due() else self._warn_at
        if limits.end is not None and self.ends_attempt:
            # A busy straggler is spared only until `busy`, so look again by then at the latest.
            again = self._get_next_limit(limits.end, steady_seconds)
            is_spared = limits.busy is not None and self._spares_busy_ranks()
            self._end_at = min(again, limits.busy or again) if is_spared else again
        self._warn_at = self._get_next_limit(warn or math.inf, seconds)

    def end_look(self, *, has_report: bool) -> None:
        """End a look. Ranks that are busy loading or compiling may hang by the next warning."""
        next_warning, self._warn_at_if_busy = self._warn_at_if_busy, None
        if self.is_starting and not has_report and next_warning is not None:
            self._warn_at = next_warning

    def postpone_look(self) -> None:
        """Repeat this look at the next poll."""
        self._warn_at, self._end_at = self._before_look
        self._warn_at_if_busy = None

    def reset(self) -> None:
        """Begin anew: the workers make progress."""
        self._warn_at = self.limits.warn or 0.0
        self._end_at = 0.0
        self._warn_at_if_busy = None

    def _get_next_limit(self, first: float, seconds: float) -> float:
        """Return when to check next after `seconds`: at the first limit times 2, 4, 8 and so on.

        The nominal time is doubled. The measured time is longer by part of a poll, a different part
        on each node, and doubling would make the nodes drift apart.
        """
        limit = 2 * first
        while limit < NEXT_LIMIT_FACTOR * seconds:
            limit *= 2
        return limit
