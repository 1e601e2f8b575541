"""Faults under frameworks and usual ways to catch exceptions, in real trainings on two nodes:
``make frameworks``.
"""

import os
import re
from pathlib import Path

import pytest

from lab.frameworks.pods import run
from tests.plugin.running import running

_IS_FULL = os.environ.get("FIRSTFAULT_FRAMEWORKS") == "all"
pytestmark = [pytest.mark.jobs, pytest.mark.skipif(not _IS_FULL, reason="make frameworks runs it")]
TRAINING = Path(__file__).parents[2] / "lab" / "frameworks" / "training.py"
RANK = 1

FAULTS = {
    **dict.fromkeys(
        ("raise", "handled", "at-end", "callback", "slow-hook"), ("user_code", "KeyError, rank 1")
    ),
    **dict.fromkeys(("hang", "loader-hang", "checkpoint-hang"), ("hang", "hang, rank 1")),
    **dict.fromkeys(("exit", "leave"), ("exit", "SystemExit, rank 1")),
    "kill": ("signal", "SIGKILL, rank 1"),
    "interrupt": ("interrupted", "interrupted (KeyboardInterrupt), rank 1"),
    "terminate": ("signal", "SignalException, rank 1"),
    "loader": ("data", "KeyError, rank 1"),
    # torch raises RuntimeError, or ConnectionResetError if the loader had not yet handed over its
    # batch
    "loader-killed": ("signal", ""),
    "checkpoint": ("disk_full", "OSError, rank 1"),
}
"""The verdict's category, and how its headline begins."""
LOADER = "loader loader-killed loader-hang"
CASES = {
    "plain": f"hang exit leave handled interrupt terminate {LOADER} at-end",
    "exits": "raise hang",
    "exits_later": "raise hang",
    "wraps": "raise hang",
    "tidies_up": "raise hang",
    "hydra": "raise hang exit leave interrupt",
    "lightning": (
        f"raise hang exit leave kill interrupt terminate {LOADER} callback slow-hook checkpoint"
    ),
    "after_lightning": "raise hang terminate",
    "transformers": f"raise hang exit leave kill interrupt terminate {LOADER} callback",
    "accelerate": f"raise hang exit leave {LOADER}",
    "ddp": "raise hang kill",
    "fsdp": "raise hang exit leave kill",
    "tensor_parallel": "raise hang exit leave kill",
    "compiled": "raise hang",
    "checkpoint": "raise checkpoint checkpoint-hang",
}
"""The faults that each framework is tried with."""
EXPECTED = {
    framework: {fault: FAULTS[fault] for fault in faults.split()}
    for framework, faults in CASES.items()
}
# its handler of SIGTERM calls a collective that the others do not
EXPECTED["lightning"]["terminate"] = FAULTS["hang"]
ALL = [(framework, fault) for framework, faults in EXPECTED.items() for fault in faults]


@pytest.mark.parametrize(("framework", "fault"), ALL if _IS_FULL else ALL[:1])
def test_the_verdict_names_the_failed_rank(framework: str, fault: str, tmp_path: Path) -> None:
    """The verdict names the rank that failed, by what its code raised or where it stood."""
    inputs = {"framework": framework, "fault": fault, "rank": RANK}
    with running(TRAINING, "train", tmp_path, inputs, "--nodes", "2") as started:
        ended = started.end()
        assert started.find_leftovers() == []
    category, headline = EXPECTED[framework][fault]
    verdict = ended.verdict
    assert (verdict["ranks"], verdict["category"]) == ([RANK], category), verdict["headline"]
    assert verdict["headline"].startswith(headline)
    ended.flyte_saw_the_verdict()


@pytest.mark.parametrize("framework", [*EXPECTED] if _IS_FULL else ["plain"])
def test_a_healthy_training_ends_as_without_firstfault(framework: str, tmp_path: Path) -> None:
    """A training without a fault returns what it does under stock kfpytorch,
    and prints nothing more.
    """
    inputs = {"framework": framework, "fault": "none", "rank": RANK}
    ours, stock = (run(module, tmp_path / module, inputs) for module in ("training", "stock"))
    assert ours.exit_codes == stock.exit_codes == [0, 0], ours.logs
    assert ours.outputs == stock.outputs == {"o0": 0}
    # torch's agents may also complain that the first one to leave took the store with it; ours wait
    # for each other
    assert normalize_output(ours.logs) <= normalize_output(stock.logs)


def normalize_output(logs: str) -> set[str]:
    """Return what a run printed, in any order and without times, addresses and process ids."""
    return {re.sub(r"0x[0-9a-f]+|-?\d+(?:\.\d+)?", "N", line).strip() for line in logs.splitlines()}
