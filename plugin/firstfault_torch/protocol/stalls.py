"""One agent's watch for stalls: when to look closer, compare with peers, print, record and kill.

While a worker of the node makes progress, nothing is sent to other nodes. Otherwise:

| phase | what the agent does | event -> next phase |
|---|---|---|
| ADVANCING | polls its workers | no progress -> STALLED |
| STALLED | polls; the stall has no report | progress -> ADVANCING; a limit -> OBSERVING; |
|  |  | after the first limit at each poll -> ASKING |
| ASKING | asks the store whether peers compare | yes -> OBSERVING; else back |
| OBSERVING | takes snapshots of its workers | taken -> NUMBERING, one node: CONCLUDING; |
|  |  | no worker calls collectives: back |
| NUMBERING | asks the store for the number N | N -> COMPARING; silent: again, back, and |
|  |  | after the peers' wait -> CONCLUDING |
| CONCLUDING | concludes on its own workers | concluded -> REPORTED or CONFIRMING |
| COMPARING | takes part in the election stall-N | a report -> COUNTING; none -> CLOSING |
| CLOSING | closes that election | closed, perhaps with a report -> COUNTING |
| COUNTING | counts N up to N + 1 | counted -> REPORTED or CONFIRMING; no report: back |
| CONFIRMING | polls before it kills a worker | no progress: it kills; both -> REPORTED |
| REPORTED | polls; the stall has a report | as STALLED; progress completes the record |
| ENDED | nothing | |

"Back" is to STALLED, or to REPORTED if the stall has a report. A report without lines leads back,
too. In any phase, `PollEnded` leads back, because an instruction has failed, and after `RoundEnded`
nothing is printed or killed: a comparison is closed and counted, and then the phase is ENDED.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from firstfault_torch.protocol.election import MAX_LEADERS
from firstfault_torch.protocol.stall_limits import StallLimits
from firstfault_torch.protocol.stall_messages import (
    AskWorkers,
    CloseComparison,
    Compare,
    ComparisonClosed,
    Conclude,
    ConfirmStall,
    CountStall,
    DeleteStalls,
    KillWorkers,
    LookUpPeers,
    MeasureUsage,
    NoReportElected,
    NotifyOfStall,
    NumberRead,
    ObservationsTaken,
    Observe,
    PeersLookedUp,
    PollDue,
    PollEnded,
    ProgressPolled,
    ReadNumber,
    ReplaceConnections,
    ReportElected,
    ReportsCollected,
    RoundEnded,
    ShareReport,
    SkipFrozenTime,
    Stall,
    StallConcluded,
    StallCounted,
    StallEvent,
    StallInstruction,
    StallReport,
)
from firstfault_torch.protocol.stall_reports import StallReports
from firstfault_torch.protocol.stall_times import StallTimes

STALL_COUNT_KEY = "firstfault/stalls"
"""Number of the next stall. It names the election: nodes that notice the stall at different times
meet under the same keys, until the election is over and the number is counted up.
"""
MAX_EARLIER_STALLS_DELETED = 3
"""Stalls before the present one that are deleted from the round's store each time, at most. So the
store keeps what the nodes shared of one stall, and of two while they compare.
"""


class StallPhase(Enum):
    """What an agent does about stalls; the table above describes each."""

    ADVANCING = "advancing"
    STALLED = "stalled"
    ASKING = "asking"
    OBSERVING = "observing"
    NUMBERING = "numbering"
    CONCLUDING = "concluding"
    COMPARING = "comparing"
    CLOSING = "closing"
    COUNTING = "counting"
    CONFIRMING = "confirming"
    REPORTED = "reported"
    ENDED = "ended"


RESTING = {StallPhase.ADVANCING, StallPhase.STALLED, StallPhase.REPORTED}
"""Phases between two polls."""
_BUSY_WITH_STORE = {StallPhase.COMPARING, StallPhase.CLOSING, StallPhase.COUNTING}
"""Phases in which peers wait for this agent."""


def get_stall_topic(number: int) -> str:
    """Return the topic of the election on a stall."""
    return f"stall-{number}"


class StallProtocol:
    """One agent's watch for the stalls of a round.

    `handle` takes an event and returns what the driver has to do, in this order. The driver sends
    `PollDue` at each interval, the answers that instructions ask for, and then `PollEnded`.

    Args:
        own: group rank of this agent.
        nodes: number of nodes.
        limits: of the user's option.
        has_peers: whether other agents can be asked.
        now: monotonic time in seconds.
    """

    def __init__(
        self, own: int, nodes: int, limits: StallLimits, now: float, *, has_peers: bool
    ) -> None:
        self.phase = StallPhase.ADVANCING
        self.reports = StallReports()
        self._own = own
        self._nodes = nodes
        self._has_peers = has_peers
        self.times = StallTimes(limits, now)
        self._compared = -1
        """Number of the last comparison in which this agent took part."""
        self._silent_since: float | None = None
        """Since when the store has not answered; None if it has."""
        self._elected: tuple[StallReport, bool] | None = None
        """The report of the present comparison, and whether it's this agent's."""
        self._to_kill: tuple[int, ...] = ()
        """Local ranks of this node's workers that the report says to kill."""
        self._is_ending = False
        """Whether the round has ended."""

    def handle(  # noqa: C901, PLR0912 - one case for each row of the table
        self, event: StallEvent, now: float
    ) -> list[StallInstruction]:
        """Return what an event leads to, at this monotonic time."""
        match self.phase, event:
            case StallPhase.ENDED, _:
                return []
            case _, RoundEnded():
                return self._end()
            case _, PollEnded():
                return self._end_poll(now)
            case phase, PollDue(has_workers) if phase in RESTING:
                return self._poll(now, has_workers=has_workers)
            case phase, ProgressPolled() if phase in RESTING:
                return self._take_progress(event)
            case StallPhase.ASKING, NumberRead(number):
                return self._look_up_peers(number)
            case StallPhase.ASKING, PeersLookedUp(have_begun):
                return self._investigate() if have_begun else self._rest()
            case StallPhase.OBSERVING, ObservationsTaken(calls_collectives):
                return self._take_observations(calls_collectives=calls_collectives)
            case StallPhase.NUMBERING, NumberRead(number):
                return self._await_store(now) if number is None else self._compare(number)
            case StallPhase.CONCLUDING, StallConcluded(report):
                return self._take_own_report(report)
            case StallPhase.COMPARING, ReportsCollected(group_ranks):
                return self._conclude_as_leader(group_ranks)
            case StallPhase.COMPARING, StallConcluded(report):
                return self._share(report)
            case StallPhase.COMPARING, ReportElected(report, is_mine):
                return self._count(report, is_mine=is_mine)
            case StallPhase.COMPARING, NoReportElected():
                # If a leader has published just now, the answer has its report. Otherwise no node
                # waits, and the next comparison needs a new number.
                self.phase = StallPhase.CLOSING
                return [CloseComparison()]
            case StallPhase.CLOSING, ComparisonClosed(report):
                return self._count(report, is_mine=False)
            case StallPhase.COUNTING, StallCounted(next_number):
                return self._take_count(next_number)
            case StallPhase.CONFIRMING, ProgressPolled(has_moved):
                return self._kill(has_moved=has_moved)
            case _:
                return []

    # --- polls ------------------------------------------------------------------------------------

    def _poll(self, now: float, *, has_workers: bool) -> list[StallInstruction]:
        frozen = self.times.begin_poll(now)
        found: list[StallInstruction] = [SkipFrozenTime(frozen)] if frozen else []
        return [*found, AskWorkers()] if has_workers else found

    def _end_poll(self, now: float) -> list[StallInstruction]:
        # Not the poll's begin: an investigation takes seconds, in which the agent wasn't frozen.
        self.times.polled_until = now
        if self.phase not in RESTING or self._is_ending:
            self._return_to_stalled()
        return []

    def _end(self) -> list[StallInstruction]:
        self._is_ending = True
        if self.phase not in RESTING | _BUSY_WITH_STORE:
            self.phase = StallPhase.ENDED
        return []

    def _take_progress(self, polled: ProgressPolled) -> list[StallInstruction]:
        self.times.since = polled.since
        self.times.is_starting = polled.is_starting
        if polled.has_moved:
            return self._resume()
        self._return_to_stalled()
        # The workers had some time to answer, and the round may have ended.
        return [] if self._is_ending else self._look_closer_if_due()

    def _return_to_stalled(self) -> None:
        """Return to the phase between two polls of a stall."""
        has_report = self.reports.stall is not None
        self.phase = StallPhase.REPORTED if has_report else StallPhase.STALLED
        self.phase = StallPhase.ENDED if self._is_ending else self.phase

    def _look_closer_if_due(self) -> list[StallInstruction]:
        if self.times.is_look_due():
            return self._investigate()
        if self._has_peers and self.times.may_join():
            self.phase = StallPhase.ASKING
            return [ReadNumber()]
        return self._rest()

    def _look_up_peers(self, number: int | None) -> list[StallInstruction]:
        if number is None or number <= self._compared:
            return self._rest()
        return [LookUpPeers(number)]

    def _investigate(self) -> list[StallInstruction]:
        self.times.begin_look()
        self.phase = StallPhase.OBSERVING
        return [Observe(self.times.ends_attempt)]

    def _finish(self) -> list[StallInstruction]:
        """End an investigation."""
        self.times.end_look(has_report=self.reports.stall is not None)
        return self._rest()

    def _rest(self) -> list[StallInstruction]:
        """End a poll without progress."""
        self._return_to_stalled()
        return [MeasureUsage()] if self.times.needs_baseline else []

    # --- the comparison ---------------------------------------------------------------------------

    def _take_observations(self, *, calls_collectives: bool) -> list[StallInstruction]:
        # A program without collectives never makes progress here. Only one that is forming its
        # process group, or waits for NCCL's set-up, counts as stalled before its first collective.
        if not calls_collectives:
            return self._finish()
        if not self._has_peers:
            return self._conclude_alone()
        self.phase = StallPhase.NUMBERING
        return [ReadNumber()]

    def _await_store(self, now: float) -> list[StallInstruction]:
        """Ask a silent store again, over another connection, and then at each poll for as long as
        peers are waited for.
        """
        # A connection that wasn't used since the last stall may be broken, and that proves nothing
        # about the peers.
        if self._silent_since is None:
            self._silent_since = now
            return [ReadNumber()]
        if now - self._silent_since < self.times.limits.reports:
            self.times.postpone_look()
            return self._rest()
        self._silent_since = None
        return self._conclude_alone()

    def _compare(self, number: int) -> list[StallInstruction]:
        self._silent_since = None
        self._compared = number
        self.phase = StallPhase.COMPARING
        return [Compare(number)]

    def _conclude_alone(self) -> list[StallInstruction]:
        # With nodes missing no worker is killed: the straggler may be theirs.
        self.phase = StallPhase.CONCLUDING
        return [self._conclude(frozenset({self._own}))]

    def _conclude_as_leader(self, group_ranks: frozenset[int]) -> list[StallInstruction]:
        # A node without observations makes progress, or its agent is down. With most nodes missing,
        # no common report is possible.
        is_common = 2 * len(group_ranks) >= self._nodes
        return [self._conclude(group_ranks) if is_common else ShareReport(StallReport(()))]

    def _conclude(self, group_ranks: frozenset[int]) -> Conclude:
        return self.times.build_conclusion(set(range(self._nodes)) - group_ranks)

    def _share(self, report: StallReport) -> list[StallInstruction]:
        # The leader decides for all nodes: each counts only the stalls in which it took part.
        is_shown = self.reports.decide_to_print(report, is_long=self.times.is_long)
        return [ShareReport(replace(report, is_shown=is_shown))]

    def _count(self, report: StallReport | None, *, is_mine: bool) -> list[StallInstruction]:
        # All nodes count, because the leader may die before it does, and the number goes up by one.
        self._elected = (report, is_mine) if report is not None else None
        self.phase = StallPhase.COUNTING
        return [CountStall(self._compared)]

    def _take_count(self, next_number: int | None) -> list[StallInstruction]:
        if next_number is not None and next_number > self._compared + 1:
            # This agent was frozen, and what it saw is long over. The peers have deleted what they
            # shared of this stall, and it may have written there since.
            return [DeleteStalls((self._compared,)), ReplaceConnections(), *self._finish()]
        # Without a report there is no leader: the agents that would have led delete, and of 1,000
        # nodes not each.
        deletes = self._own < MAX_LEADERS if self._elected is None else self._elected[1]
        old = _list_old(self._compared) if deletes else ()
        deletions = [DeleteStalls(old)] if old else []
        if self._elected is None:
            return [ReplaceConnections(), *deletions, *self._finish()]
        report, is_mine = self._elected
        return [*deletions, *self._show(Stall(report, self._compared, self.times.since, is_mine))]

    # --- the report -------------------------------------------------------------------------------

    def _take_own_report(self, report: StallReport) -> list[StallInstruction]:
        number = self.reports.next_number
        return self._show(Stall(report, number, self.times.since, is_mine=True))

    def _show(self, stall: Stall) -> list[StallInstruction]:
        report = stall.report
        if not report.lines or self._is_ending:
            return self._finish()
        found = self.reports.show(stall, is_long=self.times.is_long)
        # All agents get the same report; each kills only its own workers.
        self._to_kill = tuple(
            local for group, local in report.workers_to_kill if group == self._own
        )
        if self._to_kill:
            # the election took seconds, and the job may have resumed since
            self.phase = StallPhase.CONFIRMING
            return [*found, ConfirmStall()]
        return [*found, *self._notify()]

    def _kill(self, *, has_moved: bool) -> list[StallInstruction]:
        kills = [] if has_moved else [KillWorkers(self._to_kill, round(self.times.seconds))]
        return [*kills, *self._notify()]

    def _notify(self) -> list[StallInstruction]:
        sent = [NotifyOfStall()] if self.reports.notifies else []
        return [*sent, *self._finish()]

    def _resume(self) -> list[StallInstruction]:
        """The workers make progress again."""
        self.phase = StallPhase.ENDED if self._is_ending else StallPhase.ADVANCING
        self.times.reset()
        self._silent_since = None
        return [*self.reports.complete(self.times.polled)]


def _list_old(number: int) -> tuple[int, ...]:
    """Return the stalls before this one that may have left something in the store."""
    # A round may last for weeks, with a stall at each checkpoint. More than the last one, because
    # its leader may have died before it could delete the one before.
    return tuple(range(max(number - MAX_EARLIER_STALLS_DELETED, 0), number))
