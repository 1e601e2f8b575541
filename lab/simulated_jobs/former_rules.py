"""Rules that the product had before. With them the simulator finds what they did."""

from __future__ import annotations

from firstfault_torch.protocol.election import Election, ElectionPhase
from firstfault_torch.protocol.messages import Instruction, Lead, Publish
from firstfault_torch.protocol.notices import (
    NoticeInstruction,
    NoticePhase,
    RoundNotices,
    RoundOutcome,
)


class FormerElection(Election):
    """The election before its rules were repaired."""

    def _take_silence(self) -> list[Instruction]:
        if self.phase is ElectionPhase.ANNOUNCING:
            self.phase = ElectionPhase.PUBLISHING
            return [Publish(is_allowed=True)]  # no answer was a yes
        return super()._take_silence()

    def _take_leadership(self, values: tuple[bytes, ...], now: float) -> list[Instruction]:
        instructions = super()._take_leadership(values, now)
        return [self._accuse(item) if isinstance(item, Lead) else item for item in instructions]

    def _begin(self, report: bytes, closes_at: float) -> list[Instruction]:
        self._more_seconds_if_leaving = 0.0  # a signal after a failure left the wait as it was
        return super()._begin(report, closes_at)

    def _can_others_decide(self) -> bool:
        return False  # an agent that had to end decided before the others

    def _accuse(self, leading: Lead) -> Lead:
        """Joined agents without a report counted as lost."""
        if len(leading.arrived) >= self._nodes:
            return leading
        missing = frozenset(range(self._nodes)) - leading.arrived
        return Lead(
            leading.reports,
            leading.joined,
            leading.arrived,
            complete=True,
            lost=leading.lost | missing,
        )


class OnceNotices(RoundNotices):
    """Notices that are sent only once, also if the store doesn't answer."""

    def _take_silence(self, request: int) -> list[NoticeInstruction]:
        self._outstanding.pop(request, None)
        return super()._take_silence(request)


class FormerNotices(OnceNotices):
    """The notices before their rules were repaired."""

    def _take_answer(
        self, request: int, values: tuple[bytes, ...], now: float
    ) -> list[NoticeInstruction]:
        self._outstanding.pop(request, None)  # only the waiting connection said what counts
        return super()._take_answer(request, values, now)

    def _take_broken_connection(self, why: str) -> list[NoticeInstruction]:
        if self.phase is NoticePhase.ASKING:
            self._why_broken = why
            return self._lose_store()  # the host wasn't asked
        return super()._take_broken_connection(why)

    def _lose_store(self) -> list[NoticeInstruction]:
        if not self.is_fatal:
            self.outcome = RoundOutcome()  # a known failure was forgotten
        return super()._lose_store()
