"""Ray Train with the callback that `RAY_TRAIN_CALLBACKS` names: a real cluster of Ray on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.train.v2", reason="needs Ray Train: `make ray`")

from firstfault_torch.ray_train import StopRepeatedFaults, TrainingStoppedError
from tests.ray_train.driver import RETRIES

ONLY_SHORT = pytest.mark.skipif("trained" in RETRIES, reason="`make ray` runs it")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What happened after each fault, and what Ray printed."""
    folder = tmp_path_factory.mktemp("ray")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "RAY_TRAIN_CALLBACKS": "firstfault_torch.ray_train.StopRepeatedFaults",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_TRAIN_V2_ENABLED": "1",
    }
    command = [sys.executable, "-m", "tests.ray_train.driver", str(folder)]
    printed = subprocess.run(command, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True, check=True)
    return {"printed": printed.stdout, "folder": folder} | {
        name: json.loads((folder / f"{name}.json").read_text()) for name in RETRIES
    }


@ONLY_SHORT
def test_a_bug_runs_once(ended: dict[str, Any]) -> None:
    """The training's error has the report, and Ray uses none of its retries."""
    found = ended["bug"]
    assert (found["attempts"], found["error"]) == (1, "ControllerError")
    assert "KeyError rank 1 " in found["text"]
    assert "raise KeyError" in found["text"]


@ONLY_SHORT
@pytest.mark.parametrize(("fault", "headline"), [("recoverable", "recoverable rank 1 "), ("killed", "SIGKILL rank 1 ")])
def test_the_same_fault_twice_without_progress_stops(ended: dict[str, Any], fault: str, headline: str) -> None:
    found = ended[fault]
    assert (found["attempts"], found["error"]) == (2, "ControllerError")
    assert headline in found["text"]
    assert "the previous attempt failed with the same fault" in found["text"]


@ONLY_SHORT
def test_an_attempt_is_judged_once(ended: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray polls again and again after a preemption, for which it has a budget of its own."""
    monkeypatch.setattr("firstfault_torch.ray_train.RAY_SETTLE_SECONDS", 0.0)
    [run] = ended["folder"].glob("bug/run/firstfault-runs/*")
    raised = []
    for preemption in (None, "a node is reclaimed"):
        callback = StopRepeatedFaults()
        callback._run = str(run)
        callback.before_worker_group_start(SimpleNamespace(num_workers=2))
        for _ in range(3):
            status = SimpleNamespace(errors={1: KeyError()}, get_preemption_info=lambda found=preemption: found)
            try:
                callback.after_worker_group_poll_status(status)
            except TrainingStoppedError:
                raised.append(preemption)
    assert raised == [None]


@pytest.mark.skipif("trained" not in RETRIES, reason="trains for 10 minutes: `make progress`")
@pytest.mark.timeout(1600)
def test_with_progress_it_continues(ended: dict[str, Any]) -> None:
    """The same fault as before doesn't stop a training of 10 minutes: Ray's own budget ends it."""
    assert (ended["trained"]["attempts"], ended["trained"]["error"]) == (2, "WorkerGroupError")


@ONLY_SHORT
def test_observed(ended: dict[str, Any]) -> None:
    """In the mode "observe" the error is Ray's, and its log has what would have happened."""
    found = ended["observed"]
    assert (found["attempts"], found["error"]) == (1, "WorkerGroupError")
    assert "firstfault: observed: would have stopped after attempt 0: " in ended["printed"]


@ONLY_SHORT
def test_success_leaves_no_document(ended: dict[str, Any]) -> None:
    assert (ended["none"]["attempts"], ended["none"]["error"], ended["none"]["documents"]) == (1, "", 0)
