"""Trains with Ray Train for each fault: ``driver.py FOLDER``;
writes what happened to FOLDER/FAULT.json.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

RANKS = 2
RETRIES = {"bug": 1, "recoverable": 2, "killed": 1, "once": 1, "observed": 1, "none": 0}
"""`max_failures` for each fault."""
if os.environ.get("FIRSTFAULT_LONG"):
    RETRIES = {"trained": 1}
LONG_STEPS = 620
"""Steps of a second each: more than the 10 minutes of training that are progress."""
HANGING = ("bug", "killed")
"""Faults for which rank 0 waits in a collective; Ray then takes some seconds longer to end it."""
SETTLED_S = 3
"""A worker that dies earlier ends Ray's own start of the workers."""


def train(config: dict[str, Any]) -> None:
    """Train a step, and fail before it at the last rank."""
    import torch  # noqa: PLC0415 - runs in a worker
    import torch.distributed as dist  # noqa: PLC0415 - as above

    from firstfault_torch.engine import RecoverableError  # noqa: PLC0415 - as above

    rank = dist.get_rank()
    if config["fault"] == "trained" and os.environ["FIRSTFAULT_ATTEMPT"] == "1":
        for _ in range(LONG_STEPS):
            dist.all_reduce(torch.ones(1))
            time.sleep(1)
    Path(config["folder"], f"began-{time.time_ns()}-{rank}").touch()
    if rank == RANKS - 1:
        if config["fault"] in {"bug", "observed"}:
            raise TypeError("learning_rate is None")
        if config["fault"] == "once" and os.environ["FIRSTFAULT_ATTEMPT"] == "0":
            raise ConnectionError("the data server closed the connection")
        if config["fault"] in {"recoverable", "trained"}:
            raise RecoverableError("the queue is full")
        if config["fault"] == "killed":
            time.sleep(SETTLED_S)
            os.kill(os.getpid(), signal.SIGKILL)
    if config["fault"] in {*HANGING, "none"}:
        dist.all_reduce(torch.ones(1))


def run(folder: Path, fault: str) -> dict[str, Any]:
    """Run a training to its end."""
    folder.mkdir()
    os.environ["FIRSTFAULT_DECISIONS"] = "observe" if fault == "observed" else "act"
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "fault": fault},
        scaling_config=ScalingConfig(num_workers=RANKS),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=RETRIES[fault]),
        ),
    )
    kind, text = "", ""
    try:
        trainer.fit()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        kind = type(error).__name__
        text = str(error)
    attempts = len(list(folder.glob("began-*"))) // RANKS
    return {
        "attempts": attempts,
        "error": kind,
        "text": text,
        "documents": len(list(folder.rglob("e1-*.pb"))),
    }


if __name__ == "__main__":
    ray.init(num_cpus=RANKS * 2, include_dashboard=False)
    for name in RETRIES:
        ended = run(Path(sys.argv[1], name), name)
        Path(sys.argv[1], f"{name}.json").write_text(json.dumps(ended))
