"""Faults under frameworks and usual ways to catch exceptions, in real trainings on two nodes.

Without ``FIRSTFAULT_FRAMEWORKS=all`` only cases run that need no framework; ``make frameworks`` runs all.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.plugin.running import running

pytestmark = pytest.mark.jobs

TRAINING = Path(__file__).parent / "training.py"
RANK = 1
RAISED = {"raise": ("user_code", "KeyError, rank 1")}
HUNG = {"hang": ("hang", "hang, rank 1")}
LEFT = {"exit": ("exit", "SystemExit, rank 1"), "leave": ("exit", "SystemExit, rank 1")}
HANDLED = {"handled": ("user_code", "KeyError, rank 1")}
WRAPPED = {"raise": ("user_code", "StepError, rank 1")}
CLEAN = {"none": ("", "")}
EXPECTED = {
    "plain": HUNG | LEFT | HANDLED | CLEAN,
    "exits": RAISED | HUNG | CLEAN,
    "wraps": WRAPPED | HUNG | CLEAN,
    "hydra": RAISED | HUNG | LEFT | CLEAN,
    "lightning": RAISED | HUNG | LEFT | CLEAN,
    "after_lightning": RAISED | HUNG | CLEAN,
}
"""By framework and fault: the verdict's category, and how its headline begins."""
IN_CI = [("wraps", "hang"), ("plain", "leave")]
ALL = [(framework, fault) for framework, faults in EXPECTED.items() for fault in faults]
CHOSEN = ALL if os.environ.get("FIRSTFAULT_FRAMEWORKS") == "all" else IN_CI


@pytest.mark.parametrize(("framework", "fault"), CHOSEN)
def test_a_training(framework: str, fault: str, tmp_path: Path) -> None:
    """The verdict names the rank that failed, by what its code raised or where it stood.

    A training without a fault returns rank 0's result, and firstfault logs nothing.
    """
    inputs = {"framework": framework, "fault": fault, "rank": RANK}
    with running(TRAINING, "train", tmp_path, inputs, "--nodes", "2") as run:
        ended = run.end()
        assert run.left_over() == []
    if fault == "none":
        assert ended.status == 0
        assert ended.result["outputs"] == {"o0": 0}
        assert "firstfault" not in ended.logs
        return
    category, headline = EXPECTED[framework][fault]
    verdict = ended.verdict
    assert (verdict["ranks"], verdict["category"]) == ([RANK], category)
    assert verdict["headline"].startswith(headline)
    ended.flyte_saw_the_verdict()
