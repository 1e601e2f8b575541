"""Simulated jobs: what holds in thousands of schedules, and what the simulator can see."""

from __future__ import annotations

import pytest

from lab.simulated_jobs import campaign
from lab.simulated_jobs.faults import Fault
from lab.simulated_jobs.invariants import find_violations
from lab.simulated_jobs.job import FORMER, PLAIN_STORAGE, PRESENT, Rules, SimulatedJob

SEEDS = range(2000)
FEW_SEEDS = range(400)
"""Enough to see what a wrong rule does."""
ONE_VERDICT = "I1 at most one verdict is published"
ENDS = "I2 each live agent ends"
VERDICT_EXISTS = "I3 a verdict exists if an agent lives"
NOT_ACCUSED = "I9 no live agent counts as lost"


def test_present_rules_end_each_agent_with_one_verdict_and_accuse_no_live_one() -> None:
    found = campaign.play(SEEDS, PRESENT).seeds
    assert not found.keys() & {ONE_VERDICT, ENDS, VERDICT_EXISTS, NOT_ACCUSED}, found


def test_a_storage_that_cannot_create_once_can_have_two_verdicts() -> None:
    found = campaign.play(FEW_SEEDS, PLAIN_STORAGE).seeds
    assert not found.keys() & {ENDS, VERDICT_EXISTS, NOT_ACCUSED}, found
    assert found[ONE_VERDICT]


def test_the_simulator_sees_what_the_former_rules_did() -> None:
    former = campaign.play(FEW_SEEDS, FORMER).seeds
    assert former[NOT_ACCUSED]
    assert former[ONE_VERDICT]


@pytest.mark.parametrize("rules", [PRESENT, PLAIN_STORAGE], ids=["present", "plain storage"])
def test_a_job_of_1000_nodes_ends_with_one_verdict(rules: Rules) -> None:
    worker = [Fault(1.0, "worker", 700, 0.0)]
    job = SimulatedJob(7, rules, 1000, worker).play()
    assert not dict(find_violations(job))
    assert len({agent.verdict for agent in job.agents}) == 1


def test_a_schedule_is_played_again_in_the_same_way() -> None:
    traces = [SimulatedJob(47, PRESENT, trace=True).play().events.lines for _ in range(2)]
    assert traces[0]
    assert traces[0] == traces[1]


@pytest.mark.parametrize(
    ("seed", "nodes", "faults"),
    [
        # frozen at the notice, it acknowledged late
        (0, 3, [Fault(1.0, "worker", 0, 0.0), Fault(0.9, "freeze", 2, 12.0)]),
        # its machine's link is slow
        (1, 2, [Fault(1.0, "worker", 0, 0.0), Fault(0.9, "slow link", 1, 20.0)]),
    ],
    ids=["frozen", "slow"],
)
def test_a_live_agent_without_acknowledgment_is_not_lost(
    seed: int, nodes: int, faults: list[Fault]
) -> None:
    former, present = (
        dict(find_violations(SimulatedJob(seed, rules, nodes, faults).play()))
        for rules in (FORMER, PRESENT)
    )
    assert NOT_ACCUSED in former
    assert NOT_ACCUSED not in present


def test_shrinking_keeps_the_violation_with_fewer_faults() -> None:
    seed = campaign.play(range(300), FORMER).seeds[NOT_ACCUSED][0]
    whole = SimulatedJob(seed, FORMER)
    faults = campaign.shrink(seed, FORMER, NOT_ACCUSED)
    assert 0 < len(faults) <= len(whole.faults)
    assert NOT_ACCUSED in dict(find_violations(SimulatedJob(seed, FORMER, None, faults).play()))
