"""How long from a raise until an error that names it is durable, for firstfault and for stock kfpytorch.

Two nodes of two workers on this machine, gloo, a folder as the store, the same task, rank 3 raises. Pods and the
operator's rules are those of ``firstfault run`` for both plugins. "durable" is the modification time of the first error
file (firstfault: the error document; kfpytorch: error.pb), counted from the time that rank 3 noted before it raised;
"right" is whether what stock Flyte reads when the job ends is rank 3's own exception.

    python tests/benchmarks/raise_to_durable.py [ROUNDS]
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import stock_training
from flyteidl.core.literals_pb2 import LiteralMap

from flytekitplugins.firstfault.local.loading import serialized_command
from flytekitplugins.firstfault.local.operator import elastic_environment, error_seen, free_port, job_state
from flytekitplugins.firstfault.local.pods import end_all, start_pod

TASKS = ("ours_default", "ours_slow", "stock_fast", "stock_default")
SENTENCE = "loss is nan at step 5"
NODES = 2


@dataclass(frozen=True)
class Sample:
    """One run, seconds after the raise."""

    durable: float
    verdict: float
    ended: float
    right: bool


def run(name: str, folder: Path) -> Sample:
    """Run one task once."""
    task = getattr(stock_training, name)
    command = serialized_command(task)
    (folder / "inputs.pb").write_bytes(LiteralMap().SerializeToString())
    prefix, raised_at = folder / "out", folder / "raised-at"
    prefix.mkdir()
    values = {
        "{{.input}}": str(folder / "inputs.pb"),
        "{{.outputPrefix}}": str(prefix),
        "{{.rawOutputDataPrefix}}": str(folder / "raw"),
        "{{.checkpointOutputPrefix}}": str(folder / "checkpoints"),
        "{{.prevCheckpointPrefix}}": '""',
    }
    config = task.task_config
    operator = elastic_environment(
        nodes=str(NODES), processes=config.nproc_per_node, max_restarts=0, job=name, port=free_port()
    )
    pods = []
    try:
        for index in range(NODES):
            environment = {
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parent),
                "PYTHONWARNINGS": "ignore",
                "RAISED_AT": str(raised_at),
                "FLYTE_INTERNAL_EXECUTION_ID": name.replace("_", "-"),
                "_F_WN": f"worker-{index}",
                **operator,
                **command.environment,
            }
            pods.append(
                start_pod(
                    f"worker-{index}",
                    arguments=[values.get(argument, argument) for argument in command.arguments],
                    environment=environment,
                    folder=Path(__file__).parent,
                    log=folder / f"{index}.log",
                )
            )
        while (state := job_state(pods)) is None:
            time.sleep(0.01)
        seen = error_seen(str(prefix), state, multi_file=False)
        ended_ns = time.time_ns()
        while any(pod.exit_code is None for pod in pods):
            time.sleep(0.01)
    finally:
        end_all(pods)
    raised_ns = int(raised_at.read_text())
    documents = list(prefix.glob("firstfault/errors/*.pb")) or list(prefix.glob("error*.pb"))
    verdicts = list(prefix.glob("error*.pb"))
    return Sample(
        durable=(min(path.stat().st_mtime_ns for path in documents) - raised_ns) / 1e9,
        verdict=(min(path.stat().st_mtime_ns for path in verdicts) - raised_ns) / 1e9,
        ended=(ended_ns - raised_ns) / 1e9,
        right=seen is not None and SENTENCE in seen.message,
    )


def main() -> None:
    """Run every task in turn, several rounds, and print medians."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    samples: dict[str, list[Sample]] = {name: [] for name in TASKS}
    for number in range(rounds):
        for name in TASKS:
            with tempfile.TemporaryDirectory() as folder:
                samples[name].append(run(name, Path(folder)))
            print(f"round {number} {name}: {samples[name][-1]}", file=sys.stderr)
    cores = os.cpu_count()
    machine = f"{platform.machine()}, {cores} cores, Python {platform.python_version()}"
    print(f"{machine}; medians of {rounds}, seconds after the raise")
    print(f"{'task':16} {'durable':>8} {'error.pb':>9} {'job ended':>10}  right")
    for name, taken in samples.items():
        durable = statistics.median(sample.durable for sample in taken)
        verdict = statistics.median(sample.verdict for sample in taken)
        ended = statistics.median(sample.ended for sample in taken)
        right = sum(sample.right for sample in taken)
        print(f"{name:16} {durable:8.3f} {verdict:9.2f} {ended:10.2f}  {right} of {len(taken)}")


if __name__ == "__main__":
    main()
