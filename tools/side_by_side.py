"""Write an excerpt of one fault into docs/project/comparison.md: torchrun,
stock kfpytorch in Flyte, firstfault.

    python tools/side_by_side.py [--out docs/project/comparison.md]

Each runs the same training on two nodes of two workers on this machine. A record without a label
makes the data loader of rank 3 raise, while the other ranks wait in a collective.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
_NODES = 2
_LIMIT_S = 120
_WIDTH = 160
_LINES = 10
"""Lines of one output to show: its last ones."""
_ANSWERS = ("Cause:", "Where:", "Retry:")
"""Beginnings of the lines to show of firstfault's output instead."""
_BEGIN, _END = "<!-- side by side -->\n", "<!-- /side by side -->\n"
"""What's between these marks of the page is replaced."""

DATASET = """\
from torch.utils.data import Dataset


class Records(Dataset):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> float:
        record = {"x": 1.0} if self.rank == 3 and index == 20 else {"x": 1.0, "label": 0.5}
        return record["label"]
"""
TRAIN = """\
import os

import torch
import torch.distributed as dist
from dataset import Records
from torch.utils.data import DataLoader


def train() -> float:
    dist.init_process_group("gloo")
    total = torch.zeros(1)
    for label in DataLoader(Records(dist.get_rank()), num_workers=1):
        batch = label.float()
        dist.all_reduce(batch)
        total += batch
    return float(total)


if __name__ == "__main__":
    train()
"""
TASK = """\
from flytekit import task
from {package} import Elastic
from train import train


@task(task_config=Elastic(nnodes=2, nproc_per_node=2, increase_shared_mem=False))
def run_training() -> float:
    return train()
"""


def torchrun(folder: Path) -> str:
    """Return what two nodes of torchrun print, the second one's output after the first one's."""
    from flytekitplugins.firstfault.local.pods import free_port  # noqa: PLC0415 - as in `run_task`

    command = [
        *(
            str(BIN / "torchrun"),
            "--nnodes",
            str(_NODES),
            "--nproc-per-node",
            "2",
            "--rdzv-backend",
            "c10d",
        ),
        *("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "train.py"),
    ]
    nodes = [
        subprocess.Popen(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(_NODES)
    ]
    said = [node.communicate(timeout=_LIMIT_S)[0] for node in nodes]
    return "\n".join(part.strip("\n") for part in said)


def flyte(folder: Path, package: str) -> str:
    """Return the error that Flyte shows for the task with the `Elastic` of a package."""
    name = f"{package.rsplit('.', 1)[-1]}_task"
    (folder / f"{name}.py").write_text(TASK.format(package=package))
    command = [sys.executable, __file__, "--task", name]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_LIMIT_S,
        check=True,
    ).stdout


def run_task(name: str) -> str:
    """Run a task's pods in this folder, as Flyte and its operator do;
    return the error that Flyte reads.
    """
    from flyteidl.core.literals_pb2 import LiteralMap  # noqa: PLC0415 - in a process of its own

    from flytekitplugins.firstfault.local import pods as local  # noqa: PLC0415
    from flytekitplugins.firstfault.local.loading import serialized_command  # noqa: PLC0415

    folder = Path.cwd()
    prefix = folder / "runs" / name / "0"
    prefix.mkdir(parents=True)
    (folder / "inputs.pb").write_bytes(LiteralMap().SerializeToString())
    command = serialized_command(importlib.import_module(name).run_training)
    arguments = command.filled(
        inputs=str(folder / "inputs.pb"), prefix=str(prefix), raw=str(prefix / "raw")
    )
    job = "a7xk2m9qp4vd8wz3hj6t-n0-0"
    elastic = local.elastic_environment(
        nodes=str(_NODES),
        processes=2,
        max_restarts=0,
        job=job,
        port=local.free_port(),
    )
    pods = []
    try:
        for index in range(_NODES):
            pod = f"{job}-worker-{index}"
            identity = {
                "FLYTE_INTERNAL_EXECUTION_ID": "a7xk2m9qp4vd8wz3hj6t",
                "_F_WN": pod,
                "HOSTNAME": pod,
            }
            pods.append(
                local.start_pod(
                    pod,
                    arguments=arguments,
                    environment={**os.environ, **elastic, **identity, **command.environment},
                    folder=folder,
                    log=folder / f"{name}-{index}.log",
                )
            )
        deadline = time.monotonic() + _LIMIT_S
        while any(pod.exit_code is None for pod in pods) and time.monotonic() < deadline:
            time.sleep(0.05)
        state = local.job_state(pods)
    finally:
        local.end_all(pods)
    if state is None:
        raise SystemExit(f"{name} did not end within {_LIMIT_S} s")
    seen = local.error_seen(str(prefix), state, multi_file=False)
    return seen.message if seen is not None else ""


def _shown(text: str, folder: Path) -> tuple[str, int]:
    """Return an excerpt of an output with the paths of a container,
    and the output's number of lines.
    """
    text = text.replace(f"{folder}/runs", "s3://bucket/metadata").replace(str(folder), "/root")
    text = text.replace(str(BIN.parent), "/opt/venv").replace(str(ROOT), "/opt/firstfault")
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace(socket.gethostname(), "gpu-node-7")
    text = text.replace(os.path.realpath(sys.base_prefix), "/usr").replace("```", "'''")
    lines = [line.rstrip() for line in text.strip().split("\n")]
    count = len(lines)
    if answers := [line for line in lines if line.startswith(_ANSWERS)]:
        lines = answers
    elif count > _LINES:
        lines = [f"... {count - _LINES} lines left out here ...", *lines[-_LINES:]]
    return (
        "\n".join(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..." for line in lines),
        count,
    )


def page(current: str, outputs: dict[str, tuple[str, str, int]]) -> str:
    """Return the page with new excerpts: of each title the first line, the excerpt,
    and the number of lines.
    """
    parts = []
    for title, (first, text, count) in outputs.items():
        shown = (
            f"Flyte's lists show: `{first[:55].rstrip()}`" if "Flyte" in title else "in the logs."
        )
        parts.append(
            f"### {title}\n\n{count}"
            f" lines{'. ' if 'Flyte' in title else ', '}{shown}\n\n```\n{text}\n```\n"
        )
    before, _, rest = current.partition(_BEGIN)
    return before + _BEGIN + "\n".join(parts) + _END + rest.partition(_END)[2]


def main() -> None:
    """Run all three, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "project" / "comparison.md")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task:
        print(run_task(given.task))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "dataset.py").write_text(DATASET)
        (folder / "train.py").write_text(TRAIN)
        outputs = {
            "torchrun": torchrun(folder),
            "Stock kfpytorch in Flyte": flyte(folder, "flytekitplugins.kfpytorch"),
            "firstfault in Flyte": flyte(folder, "flytekitplugins.firstfault"),
        }
        shown = {
            title: (text.strip().partition("\n")[0], *_shown(text, folder))
            for title, text in outputs.items()
        }
        given.out.write_text(page(given.out.read_text(), shown))
    print(given.out)


if __name__ == "__main__":
    main()
