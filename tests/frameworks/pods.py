"""Runs a task of the framework lab in two pods, whichever plugin it belongs to, and keeps what a user sees of it."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyteidl.core.literals_pb2 import LiteralMap

from flytekitplugins.firstfault.local.loading import read_inputs, serialized_command, show_outputs
from flytekitplugins.firstfault.local.operator import elastic_environment, free_port
from flytekitplugins.firstfault.local.pods import end_all, start_pod

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Ended", "run"]

HERE = Path(__file__).parent
NODES = 2
LONGEST_S = 90.0


@dataclass(frozen=True)
class Ended:
    """What a run left."""

    exit_codes: list[int | None]
    outputs: dict[str, Any]
    logs: str


def run(module: str, folder: Path, inputs: Mapping[str, Any]) -> Ended:
    """Run a module's task `train` once.

    Args:
        module: "training" or "stock".
        folder: for inputs, outputs and logs.
        inputs: the task's, as JSON has them.
    """
    sys.path.insert(0, str(HERE))
    try:
        task = importlib.import_module(module).train
    finally:
        sys.path.pop(0)
    prefix, marks = folder / "outputs", folder / "marks"
    prefix.mkdir(parents=True)
    marks.mkdir()
    (folder / "inputs.pb").write_bytes(read_inputs(task, json.dumps(inputs)).SerializeToString())
    values = {
        "{{.input}}": str(folder / "inputs.pb"),
        "{{.outputPrefix}}": str(prefix),
        "{{.rawOutputDataPrefix}}": str(prefix / "raw"),
        "{{.checkpointOutputPrefix}}": str(prefix / "checkpoints"),
        "{{.prevCheckpointPrefix}}": '""',
    }
    command = serialized_command(task)
    operator = elastic_environment(nodes=str(NODES), processes=2, max_restarts=0, job=module, port=free_port())
    own = {
        "PYTHONPATH": str(HERE),
        "MARKS": str(marks),
        "FLYTE_INTERNAL_EXECUTION_ID": f"frameworks-{module}",
        "OMP_NUM_THREADS": "1",  # kfpytorch warns if it is not set
    }
    common = {**own, **operator, **command.environment}
    pods = []
    try:
        for index in range(NODES):
            environment = {**os.environ, **common, "_F_WN": f"worker-{index}"}
            arguments = [values.get(argument, argument) for argument in command.arguments]
            log = folder / f"{index}.log"
            pods.append(
                start_pod(f"worker-{index}", arguments=arguments, environment=environment, folder=folder, log=log)
            )
        deadline = time.monotonic() + LONGEST_S
        while any(pod.exit_code is None for pod in pods) and time.monotonic() < deadline:
            time.sleep(0.05)
        codes = [pod.exit_code for pod in pods]
    finally:
        end_all(pods)
    outputs = prefix / "outputs.pb"
    shown = show_outputs(task, LiteralMap.FromString(outputs.read_bytes())) if outputs.exists() else {}
    return Ended(codes, shown, "\n".join((folder / f"{index}.log").read_text() for index in range(NODES)))
