"""Runs a task of the framework lab in two pods, whichever plugin it belongs to,
and keeps what a user sees of it.
"""

import importlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyteidl.core.literals_pb2 import LiteralMap

from flytekitplugins.firstfault.local.loading import read_inputs, show_outputs
from tests.pods import NODES, start_pods

HERE = Path(__file__).parent
LONGEST_S = 90.0


@dataclass(frozen=True)
class Ended:
    exit_codes: list[int | None]
    outputs: dict[str, Any]
    logs: str


def run(module: str, folder: Path, inputs: Mapping[str, Any]) -> Ended:
    sys.path.insert(0, str(HERE))
    try:
        task = importlib.import_module(module).train
    finally:
        sys.path.pop(0)
    prefix, marks = folder / "outputs", folder / "marks"
    prefix.mkdir(parents=True)
    marks.mkdir()
    own = {
        "PYTHONPATH": str(HERE),
        "MARKS": str(marks),
        "FLYTE_INTERNAL_EXECUTION_ID": f"frameworks-{module}",
        "OMP_NUM_THREADS": "1",  # kfpytorch warns if it is not set
    }
    with start_pods(task, folder, read_inputs(task, json.dumps(inputs)), own) as pods:
        deadline = time.monotonic() + LONGEST_S
        while any(pod.exit_code is None for pod in pods) and time.monotonic() < deadline:
            time.sleep(0.05)
        codes = [pod.exit_code for pod in pods]
    outputs = prefix / "outputs.pb"
    shown = (
        show_outputs(task, LiteralMap.FromString(outputs.read_bytes())) if outputs.exists() else {}
    )
    return Ended(
        codes, shown, "\n".join((folder / f"{index}.log").read_text() for index in range(NODES))
    )
