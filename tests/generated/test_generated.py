"""Runs generated trainings, and tests that the generator composes what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.generated.faults import FAULTS
from tests.generated.program import plan_of, source_of

_CAMPAIGN = Path(__file__).parent / "campaign.py"
_SEEDS: dict[int, str] = {}
"""Each seed of CI, and what it showed when it first ran."""
_MANY = 2000


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the seeds of CI; return the folder with their outcomes."""
    folder = tmp_path_factory.mktemp("generated")
    command = [sys.executable, str(_CAMPAIGN), *map(str, _SEEDS), "--folder", str(folder)]
    subprocess.run(command, check=False, timeout=240, stdout=subprocess.DEVNULL)
    return folder


@pytest.mark.jobs
@pytest.mark.parametrize("seed", _SEEDS)
def test_a_training(seed: int, campaign: Path) -> None:
    """The verdict names the guilty ranks and tells what happened."""
    outcome = json.loads((campaign / str(seed) / "outcome.json").read_text())

    assert (outcome["result"], outcome["left"], outcome["agree"]) == ("right", [], True), outcome


def test_every_seed_is_a_program() -> None:
    """Each seed composes a program that compiles, with its fault in it."""
    for seed in range(_MANY):
        plan = plan_of(seed)
        source = source_of(plan)

        compile(source, str(seed), "exec")
        assert plan.what is None or plan.what.body.splitlines()[0] in source


def test_every_fault_is_drawn() -> None:
    """The seeds meet every fault, at one rank, at two and at all, and also meet none."""
    plans = [plan_of(seed) for seed in range(_MANY)]

    assert {plan.fault for plan in plans} == {*FAULTS, ""}
    assert {len(plan.guilty) for plan in plans} == {0, 1, 2, 4}


def test_a_seed_composes_the_same_program() -> None:
    """The same seed gives the same program, so a failing one can be run again alone."""
    assert source_of(plan_of(7)) == source_of(plan_of(7))
