"""The vote on a restart: the agents decide together whether torch restarts the workers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from firstfault_torch.protocol.restart_vote import (
    AskWhoFailed,
    CancelVote,
    DecisionElected,
    DecisionRecorded,
    EndRound,
    FatalFailureAsked,
    FollowDecision,
    HoldElection,
    InterruptElection,
    NobodyElected,
    NodeFailedForGood,
    ProcessEnds,
    ReportLeaving,
    RestartUnagreed,
    RestartVote,
    ReturnToTorch,
    VoteCanceled,
    VoteEvent,
    VoteInstruction,
    VoteOpened,
)
from firstfault_torch.rounds.election import CollectedReports, VerdictElection
from firstfault_torch.rounds.failure_broadcast import FailureBroadcast
from firstfault_torch.rounds.report_packing import ElectedVerdict


class PeersVote:
    """Carries out what `RestartVote` decides, with an election and the failure broadcast."""

    def __init__(self, own: int, nodes: int, shutdown_requested: threading.Event) -> None:
        self.election = VerdictElection(own, nodes, "restart")
        """Who decides for all nodes."""
        self._shutdown_requested = shutdown_requested
        self._vote = RestartVote()
        self._lock = threading.Lock()
        """The broadcast's thread learns of fatal failures."""

    def hold(
        self,
        broadcast: FailureBroadcast,
        copies: Mapping[str, bytes],
        seconds: float,
        judge: Callable[[CollectedReports], bytes],
    ) -> FollowDecision | RestartUnagreed | EndRound:
        """Vote with the peers; return what this node does.

        `judge` returns a decision by the reports of all nodes, empty for none; it is called if this
        agent is the leader. The values of `VerdictElection.settle` explain `copies` and `seconds`.
        """
        connections = broadcast.connections(to_agree=True)
        events: deque[VoteEvent] = deque([VoteOpened(connections is not None)])
        while events:
            if broadcast.is_fatal:
                self.interrupt()
            for instruction in self._handle(events.popleft()):
                match instruction:
                    case HoldElection() if connections is not None:
                        events.append(self._elect(connections, copies, seconds, judge))
                    case CancelVote() if connections is not None:
                        # also ends the waiting thread: the next round may fork, and its connection
                        # is needed for the verdict
                        elected = self.election.cancel(connections[0])
                        events.append(VoteCanceled(elected.document if elected else b""))
                    case AskWhoFailed():
                        failure = broadcast.find_fatal_failure()
                        if failure is not None:
                            broadcast.accept(failure)
                        events.append(FatalFailureAsked(failure is not None))
                    case FollowDecision() | RestartUnagreed() | EndRound():
                        return instruction
                    case _:
                        pass
        return RestartUnagreed()

    def may_restart(self, broadcast: FailureBroadcast) -> bool:
        """Whether no node has failed for good by now, after the vote."""
        if broadcast.is_fatal:
            self.interrupt()
        return ReturnToTorch() in self._handle(DecisionRecorded())

    def leave(self, broadcast: FailureBroadcast, copies: Mapping[str, bytes]) -> None:
        """Announce in a vote, if there is one, that this node's process exits."""
        outcome = broadcast.outcome
        is_open = outcome is not None and outcome.failure is not None and outcome.failure.asks
        connections = broadcast.connections(to_agree=True) if is_open else None
        has_reported = self.election.arrival_number > 0
        left = self._handle(ProcessEnds(connections is not None, has_reported))
        if ReportLeaving() in left and connections is not None:
            self.election.leave(connections[0], copies)

    def interrupt(self) -> None:
        """End a vote that a fatal failure has made pointless, from any thread."""
        if InterruptElection() in self._handle(NodeFailedForGood()):
            self.election.interrupt()

    def _handle(self, event: VoteEvent) -> list[VoteInstruction]:
        with self._lock:
            return self._vote.handle(event)

    def _elect(
        self,
        connections: tuple[Any, Any],
        copies: Mapping[str, bytes],
        seconds: float,
        judge: Callable[[CollectedReports], bytes],
    ) -> DecisionElected | NobodyElected:
        election = self.election
        for step in election.settle(connections, copies, seconds, self._shutdown_requested):
            if isinstance(step, ElectedVerdict):
                return DecisionElected(step.document, is_own=False)
            # If this leader was slow, another agent has taken over: then it doesn't publish, and
            # the next step has the other one's decision. If both publish, the store keeps the
            # first, and `publish` returns that.
            own = judge(step)
            if own and election.announce_publishing():
                document = election.publish(own, durable=True).document
                return DecisionElected(document, is_own=own == document)
        return NobodyElected()
