"""The vote on a restart as pure code: phase by phase, rule by rule; then in simulated jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
    VotePhase,
)
from lab.simulated_jobs import ends, vote_job
from lab.simulated_jobs.faults import Fault
from lab.simulated_jobs.vote_agent import VoterState
from lab.simulated_jobs.vote_job import VoteJob

SEEDS = range(300)
DECISION = b"restart"
OPEN = VoteOpened(can_vote=True)
EVENTS: tuple[VoteEvent, ...] = (
    OPEN,
    VoteOpened(can_vote=False),
    DecisionElected(DECISION, is_own=True),
    DecisionElected(b"", is_own=False),
    NobodyElected(),
    VoteCanceled(DECISION),
    VoteCanceled(b""),
    FatalFailureAsked(has_failed=False),
    FatalFailureAsked(has_failed=True),
    NodeFailedForGood(),
    DecisionRecorded(),
    ProcessEnds(is_vote_open=True, has_reported=False),
)


def take(vote: RestartVote, *events: VoteEvent) -> list[VoteInstruction]:
    """Pass on events; return what the last one leads to."""
    found: list[VoteInstruction] = []
    for event in events:
        found = vote.handle(event)
    return found


def test_an_agent_that_may_vote_holds_an_election() -> None:
    """The store answers, and no node has failed for good."""
    assert take(RestartVote(), OPEN) == [HoldElection()]


def test_an_agent_that_can_not_vote_restarts_as_torch() -> None:
    """The store is lost, or doesn't answer: the others may decide otherwise, and end it."""
    assert take(RestartVote(), VoteOpened(can_vote=False)) == [RestartUnagreed()]


def test_after_a_fatal_failure_there_is_no_vote() -> None:
    """The attempt is over."""
    assert take(RestartVote(), NodeFailedForGood(), VoteOpened(can_vote=False)) == [EndRound()]
    assert take(RestartVote(), NodeFailedForGood(), OPEN) == [EndRound()]


@pytest.mark.parametrize("is_own", [True, False])
def test_the_elected_decision_is_followed(is_own: bool) -> None:
    """Its agent records it, and announces a refusal."""
    elected = DecisionElected(DECISION, is_own)
    assert take(RestartVote(), OPEN, elected) == [FollowDecision(DECISION, is_own)]


@pytest.mark.parametrize("event", [NobodyElected(), DecisionElected(b"", is_own=False)])
def test_an_agent_without_a_decision_ends_the_vote_for_all(event: VoteEvent) -> None:
    """No agent waits for it, and a leader that decides later has decided nothing."""
    assert take(RestartVote(), OPEN, event) == [CancelVote()]


def test_a_decision_that_was_faster_than_the_cancellation_counts() -> None:
    """The store keeps the first of them."""
    found = take(RestartVote(), OPEN, NobodyElected(), VoteCanceled(DECISION))
    assert found == [FollowDecision(DECISION, is_own=False)]


@pytest.mark.parametrize(
    ("has_failed", "end"), [(False, RestartUnagreed()), (True, EndRound())], ids=["none", "fatal"]
)
def test_without_a_decision_it_asks_who_failed(has_failed: bool, end: VoteInstruction) -> None:
    """An agent that knew of a fatal failure may have ended the vote."""
    vote = RestartVote()
    assert take(vote, OPEN, NobodyElected(), VoteCanceled(b"")) == [AskWhoFailed()]
    assert take(vote, FatalFailureAsked(has_failed)) == [end]


def test_a_fatal_failure_interrupts_the_election() -> None:
    """Its decision doesn't matter any more, also if it comes at this moment."""
    vote = RestartVote()
    assert take(vote, OPEN, NodeFailedForGood()) == [InterruptElection()]
    assert take(vote, DecisionElected(DECISION, is_own=False)) == [EndRound()]


def test_a_fatal_failure_overrules_what_is_decided() -> None:
    """It comes while the decision is recorded."""
    vote = RestartVote()
    take(vote, OPEN, DecisionElected(DECISION, is_own=True))
    assert take(vote, NodeFailedForGood(), DecisionRecorded()) == [EndRound()]


def test_a_recorded_decision_goes_to_torch() -> None:
    """The vote is over."""
    vote = RestartVote()
    take(vote, OPEN, DecisionElected(DECISION, is_own=True))
    assert take(vote, DecisionRecorded()) == [ReturnToTorch()]
    assert vote.phase is VotePhase.ENDED


@pytest.mark.parametrize(
    ("is_open", "has_reported", "instructions"),
    [(True, False, [ReportLeaving()]), (True, True, []), (False, False, [])],
)
def test_an_agent_that_ends_hands_in_its_report(
    is_open: bool, has_reported: bool, instructions: list[VoteInstruction]
) -> None:
    """No agent waits for it."""
    assert take(RestartVote(), ProcessEnds(is_open, has_reported)) == instructions


_PATHS: dict[VotePhase, tuple[VoteEvent, ...]] = {
    VotePhase.OPENING: (),
    VotePhase.VOTING: (OPEN,),
    VotePhase.CANCELING: (OPEN, NobodyElected()),
    VotePhase.ASKING: (OPEN, NobodyElected(), VoteCanceled(b"")),
    VotePhase.DECIDED: (OPEN, DecisionElected(DECISION, is_own=True)),
    VotePhase.ENDED: (OPEN, DecisionElected(DECISION, is_own=True), DecisionRecorded()),
}


def _pairs() -> Iterator[tuple[VotePhase, VoteEvent]]:
    for phase in VotePhase:
        for event in EVENTS:
            yield phase, event


@pytest.mark.parametrize(("phase", "event"), list(_pairs()))
def test_each_phase_accepts_each_event(phase: VotePhase, event: VoteEvent) -> None:
    """Another phase begins only with an instruction that is answered, or is the last one."""
    vote = RestartVote()
    take(vote, *_PATHS[phase])
    assert vote.phase is phase
    found = take(vote, event)
    assert found or vote.phase in {phase, VotePhase.ENDED}


# --- simulated jobs -------------------------------------------------------------------------------


def test_agents_that_vote_act_alike() -> None:
    """They restart together, or end; no agent restarts after a fatal failure that it knew."""
    assert ends.play("vote", SEEDS).seeds == {}


def test_the_schedules_have_each_end() -> None:
    """Restarts with and without an agreement, and refusals are played."""
    jobs = [VoteJob(seed).play() for seed in range(100)]
    agents = [agent for job in jobs for agent in job.agents]
    assert any(agent.refused for agent in agents)
    restarted = [agent for agent in agents if agent.state is VoterState.RESTARTED]
    assert {bool(agent.followed) for agent in restarted} == {True, False}


@pytest.mark.parametrize(
    ("rules", "seed", "name"),
    [
        ("stubborn", 662, vote_job.OVERRULED),
        ("quiet", 3530, vote_job.ENDS),
        ("alone", 30, vote_job.SAME_DECISION),
    ],
)
def test_the_simulator_sees_what_wrong_rules_do(rules: str, seed: int, name: str) -> None:
    """A decision that no fatal failure overrules; a refusal that isn't announced; no vote."""
    faults = ends.shrink("vote", seed, rules, name)
    assert 0 < len(faults) <= 4
    assert name in ends.find_violations("vote", seed, rules, faults)
    assert ends.find_violations("vote", seed, "present", faults) == {}


def test_200_agents_vote() -> None:
    """All restart, or all end: some with the decision, and some with the failure it has become."""
    job = VoteJob(5, nodes=200, faults=[Fault(1.0, "worker", 170, 0.0)]).play()
    assert dict(job.find_violations()) == {}
    assert len({agent.state for agent in job.agents}) == 1
