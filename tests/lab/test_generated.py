"""Runs generated trainings, and tests that the generator composes what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.generated.faults import FAULTS
from lab.generated.program import AGAIN, HANDLED, plan_of, source_of
from lab.generated.shapes import HANDLED_STEPS

pytestmark = pytest.mark.slow

_CAMPAIGN = Path(__file__).parents[2] / "lab" / "generated" / "campaign.py"
_SEEDS = {
    7: "a crash during the agent's stop was told as the stop",
    83: "what a failing clean-up hides was not told",
    145: "a wrapper of a wrapper was told, not the cause",
    208: "an exit while the group is destroyed was undetermined",
    306: "the full disk of the victims' emergency saves was named",
    320: "a wrapper was told, not the failed assertion",
}
"""Seeds of CI, with what the first campaign showed; `test_printed_tracebacks` has the rest of that.

None hangs, so that a long timeout can outlast a busy machine.
"""
_TIMEOUT_S = 60
ORDINARY_PLANS, HANDLED_PLANS = 400, 40


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the seeds of CI; return the folder with their outcomes."""
    folder = tmp_path_factory.mktemp("generated")
    # three at a time: a training mostly waits
    options = ["--folder", str(folder), "--timeout", str(_TIMEOUT_S), "--jobs", "3"]
    command = [sys.executable, str(_CAMPAIGN), *map(str, _SEEDS), *options]
    subprocess.run(command, check=False, timeout=240, stdout=subprocess.DEVNULL)
    return folder


@pytest.mark.jobs
@pytest.mark.parametrize("seed", _SEEDS)
def test_the_verdict_names_the_injected_fault(seed: int, campaign: Path) -> None:
    """The verdict names the guilty ranks and tells what happened."""
    outcome = json.loads((campaign / str(seed) / "outcome.json").read_text())

    assert (outcome["result"], outcome["left"], outcome["agree"]) == ("right", [], True), outcome


def test_every_seed_composes_one_program_with_its_fault() -> None:
    """Each seed composes one program, so a failing one can be run again; it compiles,
    with its fault in it.
    """
    for seed in (
        *range(ORDINARY_PLANS),
        *range(AGAIN, AGAIN + ORDINARY_PLANS),
        *range(HANDLED, HANDLED + HANDLED_PLANS),
    ):
        plan = plan_of(seed)
        source = source_of(plan)

        assert source == source_of(plan_of(seed))
        compile(source, str(seed), "exec")
        assert plan.what is None or plan.what.body.splitlines()[0] in source


def test_seeds_meet_every_loop_that_handles_an_exception() -> None:
    """The seeds of programs that handle an exception meet every loop, and the fault comes once,
    on one rank.
    """
    plans = [plan_of(HANDLED + number) for number in range(HANDLED_PLANS)]

    assert {plan.loop for plan in plans} == set(HANDLED_STEPS)
    assert all(plan.once and len(plan.guilty) == 1 for plan in plans)


def test_seeds_meet_every_fault_on_one_two_all_and_no_ranks() -> None:
    """The seeds meet every fault, at one rank, at two and at all, and also meet none."""
    plans = [plan_of(seed) for seed in range(ORDINARY_PLANS)]

    assert {plan.fault for plan in plans} == {*FAULTS, ""}
    assert {len(plan.guilty) for plan in plans} == {0, 1, 2, 4}
