"""Ray Train with the callback that `RAY_TRAIN_CALLBACKS` names:
a real cluster of Ray on this machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.train.v2", reason="needs Ray Train: `make ray`")

from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus
from ray.train.v2.api.preemption import PreemptionInfo

from firstfault.attempt import read
from firstfault.conclude import find_judgment
from firstfault.model import Action
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
    printed = subprocess.run(
        command,
        env=environment,
        stdout=-1,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return {"printed": printed.stdout, "folder": folder} | {
        name: json.loads((folder / f"{name}.json").read_text()) for name in RETRIES
    }


@ONLY_SHORT
def test_a_bug_uses_none_of_rays_retries(ended: dict[str, Any]) -> None:
    """The training's error has the report, and Ray uses none of its retries."""
    found = ended["bug"]
    assert (found["attempts"], found["error"]) == (1, "ControllerError")
    assert "TypeError rank 1 " in found["text"]
    assert "raise TypeError" in found["text"]


@ONLY_SHORT
def test_the_same_fault_twice_without_progress_ends_the_retries(ended: dict[str, Any]) -> None:
    """A fault at the same place again ends the retries, and readers find this decision, too."""
    found = ended["recoverable"]
    assert (found["attempts"], found["error"]) == (2, "ControllerError")
    assert "recoverable rank 1 " in found["text"]
    assert "the previous attempt failed with the same fault" in found["text"]
    [prefix] = ended["folder"].glob("recoverable/run/firstfault-runs/*/1")
    conclusion = read(str(prefix)).conclusion
    assert conclusion is not None
    assert find_judgment(conclusion).decision.action is Action.STOP


@ONLY_SHORT
@pytest.mark.parametrize(("fault", "error"), [("killed", "WorkerGroupError"), ("once", "")])
def test_without_proof_ray_retries(ended: dict[str, Any], fault: str, error: str) -> None:
    """After a failure that may be temporary, Ray uses its retries,
    and a lasting one ends with Ray's own error.
    """
    found = ended[fault]
    assert (found["attempts"], found["error"]) == (2, error)


def _build_status(**flags: Any) -> WorkerGroupPollStatus:
    """Return what Ray's controller polls after a worker has failed; with one that was preempted,
    if told so.
    """
    death: Exception = TypeError()
    if flags.get("died_with_node"):
        death = WorkerHealthCheckFailedError("", failure=RayActorError(preempted=True))
    info = PreemptionInfo(None, {"node": [1]}) if flags.get("is_announced") else None
    return WorkerGroupPollStatus(
        {1: WorkerStatus(running=False, error=death, preemption_info=info)}
    )


@ONLY_SHORT
@pytest.mark.parametrize(
    ("flags", "stops"), [({}, 1), ({"is_announced": True}, 0), ({"died_with_node": True}, 0)]
)
def test_preemptions_are_left_to_rays_own_budget(
    ended: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, bool],
    stops: int,
) -> None:
    """Ray has a budget of its own for preemptions, which it shows in two ways;
    other failures are judged once.
    """
    monkeypatch.setattr("firstfault_torch.torchrun.integration.CONTROLLER_SETTLE_SECONDS", 0.0)
    [run] = ended["folder"].glob("bug/run/firstfault-runs/*")
    callback = StopRepeatedFaults()
    raised = 0
    callback.run = str(run)
    callback.before_worker_group_start(SimpleNamespace(num_workers=2))
    for _ in range(3):
        try:
            callback.after_worker_group_poll_status(_build_status(**flags))
        except TrainingStoppedError:
            raised += 1
    assert raised == stops


@ONLY_SHORT
def test_switched_off_the_callback_leaves_the_worker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With FIRSTFAULT=0 the callback reads nothing of Ray's, and leaves the worker as it is."""
    monkeypatch.setenv("FIRSTFAULT", "0")
    callback = StopRepeatedFaults()
    before = dict(os.environ)
    callback.after_controller_start(None)  # type: ignore[arg-type]
    callback.after_init_train_context()
    callback.after_worker_group_poll_status(_build_status())
    assert os.environ == before


@pytest.mark.skipif("trained" not in RETRIES, reason="trains for 10 minutes: `make progress`")
@pytest.mark.timeout(1600)
def test_the_same_fault_after_progress_continues(ended: dict[str, Any]) -> None:
    """The same fault as before doesn't stop a training of 10 minutes: Ray's own budget ends it."""
    assert (ended["trained"]["attempts"], ended["trained"]["error"]) == (2, "WorkerGroupError")


@ONLY_SHORT
def test_observe_keeps_rays_retries_and_logs_the_decision(ended: dict[str, Any]) -> None:
    """In the mode "observe" retries and error are Ray's,
    and its log has what would have happened.
    """
    found = ended["observed"]
    assert (found["attempts"], found["error"]) == (2, "WorkerGroupError")
    assert "firstfault: observed: would have stopped after attempt 0: " in ended["printed"]


@ONLY_SHORT
def test_success_leaves_no_document(ended: dict[str, Any]) -> None:
    assert (ended["none"]["attempts"], ended["none"]["error"], ended["none"]["documents"]) == (
        1,
        "",
        0,
    )
