"""Faults under frameworks and usual ways to catch exceptions, in real trainings on two nodes.

Without ``FIRSTFAULT_FRAMEWORKS=all`` only cases run that need no framework; ``make frameworks`` runs all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.plugin.running import running

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.jobs

TRAINING = Path(__file__).parent / "training.py"
RANK = 1
RAISED = {"raise": ("user_code", "KeyError, rank 1")}
HUNG = {"hang": ("hang", "hang, rank 1")}
LEFT = {"exit": ("exit", "SystemExit, rank 1"), "leave": ("exit", "SystemExit, rank 1")}
HANDLED = {"handled": ("user_code", "KeyError, rank 1")}
WRAPPED = {"raise": ("user_code", "StepError, rank 1")}
EXPECTED = {
    "plain": HUNG | LEFT | HANDLED,
    "exits": RAISED | HUNG,
    "wraps": WRAPPED | HUNG,
    "hydra": RAISED | HUNG | LEFT,
    "lightning": RAISED | HUNG | LEFT,
    "after_lightning": RAISED | HUNG,
}
"""By framework and fault: the verdict's category, and how its headline begins."""
IN_CI = {("exits", "raise"), ("wraps", "hang"), ("plain", "leave")}
ALL = [(framework, fault) for framework, faults in EXPECTED.items() for fault in faults]


def _chosen() -> Iterable[tuple[str, str]]:
    return ALL if os.environ.get("FIRSTFAULT_FRAMEWORKS") == "all" else [case for case in ALL if case in IN_CI]


@pytest.mark.parametrize(("framework", "fault"), _chosen())
def test_a_fault(framework: str, fault: str, tmp_path: Path) -> None:
    """The verdict names the rank that failed, by what its code raised or where it stood."""
    inputs = {"framework": framework, "fault": fault, "rank": RANK}
    with running(TRAINING, "train", tmp_path, inputs, "--nodes", "2") as run:
        ended = run.end()
        assert run.left_over() == []
    category, headline = EXPECTED[framework][fault]
    verdict = ended.verdict
    assert (verdict["ranks"], verdict["category"]) == ([RANK], category)
    assert verdict["headline"].startswith(headline)
    ended.flyte_saw_the_verdict()


@pytest.mark.parametrize("framework", EXPECTED if os.environ.get("FIRSTFAULT_FRAMEWORKS") == "all" else ["exits"])
def test_no_fault(framework: str, tmp_path: Path) -> None:
    """A training without a fault returns rank 0's result, and firstfault logs nothing."""
    inputs = {"framework": framework, "fault": "none", "rank": RANK}
    with running(TRAINING, "train", tmp_path, inputs, "--nodes", "2") as run:
        ended = run.end()
    assert ended.status == 0
    assert ended.result["outputs"] == {"o0": 0}
    assert "firstfault" not in ended.logs
