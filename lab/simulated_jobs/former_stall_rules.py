"""Rules of the stall watch that the product had before. With them the simulator finds what they
did.
"""

from __future__ import annotations

from firstfault_torch.protocol.stall_messages import (
    DeleteStalls,
    ShareReport,
    StallEvent,
    StallInstruction,
    StallReport,
)
from firstfault_torch.protocol.stall_times import StallTimes
from firstfault_torch.protocol.stalls import StallProtocol


class DriftingTimes(StallTimes):
    """Each node doubled the time that it had measured, and looked at these moments only."""

    def may_join(self) -> bool:
        """A peer's moment wasn't of interest."""
        return False

    def _get_next_limit(self, first: float, seconds: float) -> float:  # noqa: ARG002
        return 2 * seconds


class DriftingStalls(StallProtocol):
    """The watch with drifting looks."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.times = DriftingTimes(self.times.limits, self.times.since)


class KeepingStalls(StallProtocol):
    """The watch that deleted nothing."""

    def handle(self, event: StallEvent, now: float) -> list[StallInstruction]:
        """Handle an event as the product, without deletions."""
        found = super().handle(event, now)
        return [each for each in found if not isinstance(each, DeleteStalls)]


class PatientTimes(StallTimes):
    """A node that could end the attempt within two polls joined no peer before."""

    def may_join(self) -> bool:
        """Whether to look at a moment that a peer has chosen."""
        end = self.limits.end
        is_near = end is not None and end - 2 * self.limits.poll <= self.steady_seconds < end
        return self.seconds >= self.limits.nearest and not is_near


class FormerStalls(StallProtocol):
    """The watch before this simulator."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.times = PatientTimes(self.times.limits, self.times.since)

    def _await_store(self, now: float) -> list[StallInstruction]:  # noqa: ARG002
        return self._conclude_alone()  # a broken connection was a silent store

    def _share(self, report: StallReport) -> list[StallInstruction]:
        return [ShareReport(report)]  # each node decided whether it prints

    def _take_count(self, next_number: int | None) -> list[StallInstruction]:
        # What a frozen agent saw was printed later, and only a leader deleted.
        in_time = min(next_number or 0, self._compared + 1)
        found = super()._take_count(in_time)
        is_mine = self._elected is not None and self._elected[1]
        last = self._compared - 2
        old = tuple(range(max(last - 3, 0), max(last, 0)))
        deletions = [DeleteStalls(old)] if is_mine and old else []
        return [*deletions, *(each for each in found if not isinstance(each, DeleteStalls))]
