"""Faults under frameworks and usual ways to catch exceptions, in real trainings on two nodes.

Without ``FIRSTFAULT_FRAMEWORKS=all`` only cases run that need no framework; ``make frameworks`` runs all.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.frameworks.pods import run
from tests.plugin.running import running

pytestmark = pytest.mark.jobs

TRAINING = Path(__file__).parent / "training.py"
RANK = 1
_IS_FULL = os.environ.get("FIRSTFAULT_FRAMEWORKS") == "all"

RAISED = {"raise": ("user_code", "KeyError, rank 1")}
HUNG = {"hang": ("hang", "hang, rank 1")}
LEFT = {"exit": ("exit", "SystemExit, rank 1"), "leave": ("exit", "SystemExit, rank 1")}
HANDLED = {"handled": ("user_code", "KeyError, rank 1")}
KILLED = {"kill": ("signal", "SIGKILL, rank 1")}
INTERRUPTED = {"interrupt": ("signal", "KeyboardInterrupt, rank 1")}
TERMINATED = {"terminate": ("signal", "SignalException, rank 1")}
LOADER = {
    "loader": ("data", "KeyError, rank 1"),
    # torch raises RuntimeError, or ConnectionResetError if the loader had not yet handed over its batch
    "loader-killed": ("signal", ""),
    "loader-hang": ("hang", "hang, rank 1"),
}
ENDS = {"at-end": ("user_code", "KeyError, rank 1")}
CALLBACK = {"callback": ("user_code", "KeyError, rank 1")}
SLOW_HOOK = {"slow-hook": ("user_code", "KeyError, rank 1")}
CHECKPOINT = {"checkpoint": ("disk_full", "OSError, rank 1")}
SPREAD = CHECKPOINT | {"checkpoint-hang": ("hang", "hang, rank 1")}
EXPECTED = {
    "plain": HUNG | LEFT | HANDLED | INTERRUPTED | TERMINATED | LOADER | ENDS,
    "exits": RAISED | HUNG,
    "exits_later": RAISED | HUNG,
    "wraps": RAISED | HUNG,
    "tidies_up": RAISED | HUNG,
    "hydra": RAISED | HUNG | LEFT | INTERRUPTED,
    # its handler of SIGTERM calls a collective that the others do not
    "lightning": RAISED
    | HUNG
    | LEFT
    | KILLED
    | INTERRUPTED
    | {"terminate": ("hang", "hang, rank 1")}
    | LOADER
    | CALLBACK
    | SLOW_HOOK
    | CHECKPOINT,
    "after_lightning": RAISED | HUNG | TERMINATED,
    "transformers": RAISED | HUNG | LEFT | KILLED | INTERRUPTED | TERMINATED | LOADER | CALLBACK,
    "accelerate": RAISED | HUNG | LEFT | LOADER,
    "ddp": RAISED | HUNG | KILLED,
    "fsdp": RAISED | HUNG | LEFT | KILLED,
    "tensor_parallel": RAISED | HUNG | LEFT | KILLED,
    "compiled": RAISED | HUNG,
    "checkpoint": RAISED | SPREAD,
}
"""By framework and fault: the verdict's category, and how its headline begins."""
IN_CI = [("tensor_parallel", "leave")]
ALL = [(framework, fault) for framework, faults in EXPECTED.items() for fault in faults]


@pytest.mark.parametrize(("framework", "fault"), ALL if _IS_FULL else IN_CI)
def test_a_fault(framework: str, fault: str, tmp_path: Path) -> None:
    """The verdict names the rank that failed, by what its code raised or where it stood."""
    inputs = {"framework": framework, "fault": fault, "rank": RANK}
    with running(TRAINING, "train", tmp_path, inputs, "--nodes", "2") as started:
        ended = started.end()
        assert started.left_over() == []
    category, headline = EXPECTED[framework][fault]
    verdict = ended.verdict
    assert (verdict["ranks"], verdict["category"]) == ([RANK], category), verdict["headline"]
    assert verdict["headline"].startswith(headline)
    ended.flyte_saw_the_verdict()


@pytest.mark.skipif(not _IS_FULL, reason="make frameworks runs it")
@pytest.mark.parametrize("framework", list(EXPECTED) if _IS_FULL else ["plain"])
def test_no_fault(framework: str, tmp_path: Path) -> None:
    """A training without a fault returns what it does under stock kfpytorch, and prints nothing more."""
    inputs = {"framework": framework, "fault": "none", "rank": RANK}
    ours, stock = (run(module, tmp_path / module, inputs) for module in ("training", "stock"))
    assert ours.exit_codes == stock.exit_codes == [0, 0], ours.logs
    assert ours.outputs == stock.outputs == {"o0": 0}
    # torch's agents may also complain that the first one to leave took the store with it; ours wait for each other
    assert _said(ours.logs) <= _said(stock.logs)


def _said(logs: str) -> set[str]:
    """Return what a run printed, in any order and without times, addresses and process ids."""
    return {re.sub(r"0x[0-9a-f]+|-?\d+(?:\.\d+)?", "N", line).strip() for line in logs.splitlines()}
