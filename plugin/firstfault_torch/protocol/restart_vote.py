"""The vote on a restart: what an agent does around the election on the topic "restart".

| phase | what the agent does | until |
|---|---|---|
| OPENING | waits for connections to the store and the round's outcome | it may vote, or can't |
| VOTING | takes part in the election | a decision, or none |
| CANCELING | ends the vote for all agents, so that no agent waits | the store answers |
| ASKING | without a decision: asks which node failed for good | the store answers |
| DECIDED | records the decision, and may still be overruled | it returns to torch |
| ENDED | nothing | |

Rules; `tests/protocol` has a test of each, and plays schedules in which they are needed:

1. The decision that the store keeps counts for all agents, also for one that made another.
2. A fatal failure of any node overrules a restart, also one that is decided already.
3. An agent that ends the vote without a decision ends it for all agents: they decide alike.
4. Without a decision and without a fatal failure the workers restart, as with torch elastic alone.
5. An agent whose process ends hands in its report, unless it has voted: no agent waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VoteOpened:
    """This node has stopped its workers after a failure that the agents vote on."""

    can_vote: bool
    """Whether the store answers, and no node has failed for good."""


@dataclass(frozen=True, slots=True)
class DecisionElected:
    """The election is over, with this decision."""

    decision: bytes
    """Empty: an agent has ended the vote for all agents."""
    is_own: bool
    """Whether this agent made it."""


@dataclass(frozen=True, slots=True)
class NobodyElected:
    """The election is over without a decision: the store is lost, no leader decided in time, or a
    fatal failure made it pointless.
    """


@dataclass(frozen=True, slots=True)
class VoteCanceled:
    """The answer to `CancelVote`: the decision that counts; empty without one, or no answer."""

    decision: bytes


@dataclass(frozen=True, slots=True)
class FatalFailureAsked:
    """The answer to `AskWhoFailed`."""

    has_failed: bool
    """Whether another node has failed for good."""


@dataclass(frozen=True, slots=True)
class NodeFailedForGood:
    """A notice has come, at any time: a node, perhaps this one, has failed and can't restart."""


@dataclass(frozen=True, slots=True)
class DecisionRecorded:
    """The decision is recorded; this node is about to return to torch."""


@dataclass(frozen=True, slots=True)
class ProcessEnds:
    """A signal ends this process."""

    is_vote_open: bool
    """Whether the agents vote or are about to, and the store answers."""
    has_reported: bool
    """Whether this agent has handed in its report for the vote."""


VoteEvent: TypeAlias = (
    VoteOpened
    | DecisionElected
    | NobodyElected
    | VoteCanceled
    | FatalFailureAsked
    | NodeFailedForGood
    | DecisionRecorded
    | ProcessEnds
)


# --- instructions -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HoldElection:
    """Take part in the election; answer with `DecisionElected` or `NobodyElected`."""


@dataclass(frozen=True, slots=True)
class InterruptElection:
    """End the election at once; it answers with `NobodyElected`."""


@dataclass(frozen=True, slots=True)
class CancelVote:
    """Store an empty decision unless there is one; answer with `VoteCanceled`."""


@dataclass(frozen=True, slots=True)
class AskWhoFailed:
    """Look for another node's fatal failure, and accept it; answer with `FatalFailureAsked`."""


@dataclass(frozen=True, slots=True)
class ReportLeaving:
    """Hand in this node's report, and announce that its process ends."""


@dataclass(frozen=True, slots=True)
class FollowDecision:
    """Record this decision if it is this agent's own, and answer with `DecisionRecorded`. A refusal
    is a fatal failure; its agent notifies those that missed the vote.
    """

    decision: bytes
    is_own: bool


@dataclass(frozen=True, slots=True)
class RestartUnagreed:
    """Restart without an agreement, as torch elastic does; the node that failed first records it.
    Answer with `DecisionRecorded`.
    """


@dataclass(frozen=True, slots=True)
class EndRound:
    """The vote is over: a node has failed for good, and this one ends, too."""


@dataclass(frozen=True, slots=True)
class ReturnToTorch:
    """The vote is over: torch does what the decision says."""


VoteInstruction: TypeAlias = (
    HoldElection
    | InterruptElection
    | CancelVote
    | AskWhoFailed
    | ReportLeaving
    | FollowDecision
    | RestartUnagreed
    | EndRound
    | ReturnToTorch
)


# --- the machine ------------------------------------------------------------------------------


class VotePhase(Enum):
    """What an agent does in a vote; the table above describes each."""

    OPENING = "opening"
    VOTING = "voting"
    CANCELING = "canceling"
    ASKING = "asking"
    DECIDED = "decided"
    ENDED = "ended"


class RestartVote:
    """One agent's part in the vote on a restart.

    `handle` takes an event and returns what the driver has to do. It has no deadline of its own:
    each of its instructions ends within a limit, and is answered.
    """

    def __init__(self) -> None:
        self.phase = VotePhase.OPENING
        self._has_node_failed = False

    def handle(  # noqa: C901 - one case for each event
        self, event: VoteEvent
    ) -> list[VoteInstruction]:
        """Return what an event leads to."""
        phase = self.phase
        match event:
            case NodeFailedForGood():
                self._has_node_failed = True
                return [InterruptElection()] if phase is VotePhase.VOTING else []
            case ProcessEnds(is_vote_open, has_reported):
                self.phase = VotePhase.ENDED
                return [ReportLeaving()] if is_vote_open and not has_reported else []
            case VoteOpened(can_vote) if phase is VotePhase.OPENING:
                if not can_vote or self._has_node_failed:
                    return self._decide_without_vote()
                return self._ask(VotePhase.VOTING, HoldElection())
            case DecisionElected(decision, is_own) if phase is VotePhase.VOTING and decision:
                return self._follow(decision, is_own=is_own)
            case DecisionElected() | NobodyElected() if phase is VotePhase.VOTING:
                return self._ask(VotePhase.CANCELING, CancelVote())
            case VoteCanceled(decision) if phase is VotePhase.CANCELING:
                if decision:
                    return self._follow(decision, is_own=False)
                # an agent that knew of a fatal failure has ended the vote for all agents
                return self._ask(VotePhase.ASKING, AskWhoFailed())
            case FatalFailureAsked(has_failed) if phase is VotePhase.ASKING:
                self._has_node_failed = self._has_node_failed or has_failed
                return self._decide_without_vote()
            case DecisionRecorded():
                # A third node may have failed while the decision was recorded. In another phase, an
                # internal error has ended the vote: then torch does as without one.
                is_over = self._has_node_failed
                return self._ask(VotePhase.ENDED, EndRound() if is_over else ReturnToTorch())
            case _:
                return []

    def _ask(self, phase: VotePhase, instruction: VoteInstruction) -> list[VoteInstruction]:
        self.phase = phase
        return [instruction]

    def _follow(self, decision: bytes, *, is_own: bool) -> list[VoteInstruction]:
        if self._has_node_failed:
            return self._ask(VotePhase.ENDED, EndRound())
        return self._ask(VotePhase.DECIDED, FollowDecision(decision, is_own))

    def _decide_without_vote(self) -> list[VoteInstruction]:
        if self._has_node_failed:
            return self._ask(VotePhase.ENDED, EndRound())
        return self._ask(VotePhase.DECIDED, RestartUnagreed())
