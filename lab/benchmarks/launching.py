"""What firstfault costs a job of torchrun that succeeds, beside plain torchrun:
2 nodes of 2 workers.

A node is its launcher and, with firstfault, the recorder; its workers do not count.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.utils.distributed import get_free_port

from tests.processes import read_processes

NODES = 2
TORCHS = ("-m", "torch.distributed.run")
WAYS = {"firstfault": "1", "torchrun": "0"}
"""The values of FIRSTFAULT."""
HEALTHY_S = 600.0
"""Length of a long training."""
_LONG_S = 60.0
"""From this length on, a training is looked at less often."""
_LOOK_S = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")
_RECORDER = "firstfault.recorder"
PROGRAM = """
import time
BEGAN = time.time()
import os, sys
import torch, torch.distributed as dist
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    print(BEGAN, file=file)
dist.init_process_group("gloo")
until = time.monotonic() + float(sys.argv[2])
go_on = torch.ones(1)
while go_on:
    time.sleep(0.01)
    go_on[0] = time.monotonic() < until
    dist.broadcast(go_on, 0)
# each line in one piece: torchrun's workers do not buffer, and share the pipe
sys.stdout.write(f"rank {dist.get_rank()} has finished\\n")
sys.stderr.write("and writes to stderr\\n")
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Usage:
    """What the processes of a node use, without its workers."""

    rss_mb: float
    pss_mb: float
    start_cpu_s: float
    """Until all workers have run their first line."""
    cpu_s: float
    """Since then."""
    threads: int
    processes: int


@dataclass(frozen=True)
class Sample:
    way: str
    wall: float
    first_line: float
    """Seconds from the launch until the last worker ran its first line."""
    output: tuple[tuple[str, str], ...]
    """What each node wrote to stdout and stderr, its lines in order."""
    used: tuple[Usage, ...]
    """By each node, when its workers have almost ended; empty if they were too quick."""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "output": None}


def run(way: str, seconds: float) -> Sample:
    """Train for so many seconds, and look at the nodes' processes until the training ends."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(PROGRAM)
        began = time.time()
        port = get_free_port()
        (Path(folder) / "began").mkdir()
        program = [f"{folder}/train.py", f"{folder}/began", str(seconds)]
        nodes = [
            started(Path(folder), node, port, program, FIRSTFAULT=WAYS[way])
            for node in range(NODES)
        ]
        used: list[Usage] = []
        start_cpu: list[float] = []
        while any(node.poll() is None for node in nodes):
            with contextlib.suppress(OSError):  # a process is about to end
                if not start_cpu and len(list((Path(folder) / "began").iterdir())) == 2 * NODES:
                    start_cpu = [_usage(node.pid, 0.0).cpu_s for node in nodes]
                elif start_cpu and time.time() - began > seconds:
                    found = [
                        _usage(node.pid, cpu) for node, cpu in zip(nodes, start_cpu, strict=True)
                    ]
                    if not used or found[0].threads >= used[0].threads:  # else they end already
                        used = found
            time.sleep(_LOOK_S if seconds < _LONG_S else 1.0)
        wall = time.time() - began
        assert [node.returncode for node in nodes] == [0] * NODES, (
            Path(folder) / "node-0" / "err"
        ).read_text()
        first = max(float(file.read_text()) for file in (Path(folder) / "began").iterdir()) - began
        return Sample(
            way,
            wall,
            first,
            tuple(_output(Path(folder), node) for node in range(NODES)),
            tuple(used),
        )


def started(
    folder: Path,
    node: int,
    port: int,
    program: list[str],
    launcher: Sequence[str] = TORCHS,
    **variables: str,
) -> subprocess.Popen[bytes]:
    """Start a node of two workers in a folder of its own,
    with what it writes in `out` and `err` there.
    """
    own = folder / f"node-{node}"
    own.mkdir()
    options = [
        f"--nnodes={NODES}",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
    ]
    options += ["--rdzv-id=job", f"--rdzv-conf=is_host={int(node == 0)}"]
    environment = {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "FIRSTFAULT_NODE": f"host-{node}",
    }
    with (own / "out").open("wb") as out, (own / "err").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, *launcher, *options, *program],
            cwd=own,
            env={**os.environ, **environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )


def _output(folder: Path, node: int) -> tuple[str, str]:
    """Return what a node wrote; its workers write in any order."""
    out, err = (
        "\n".join(sorted((folder / f"node-{node}" / name).read_text().splitlines()))
        for name in ("out", "err")
    )
    return out, err


def _usage(launcher: int, start_cpu: float) -> Usage:
    found = read_processes().items()
    pids = [
        launcher,
        *(pid for pid, one in found if one.parent == launcher and _RECORDER in one.command),
    ]
    rss = pss = cpu = threads = 0.0
    for pid in pids:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        rss += int(re.search(r"^Rss:\s+(\d+)", rollup, re.MULTILINE)[1])  # type: ignore[index]
        pss += int(re.search(r"^Pss:\s+(\d+)", rollup, re.MULTILINE)[1])  # type: ignore[index]
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu += (int(fields[11]) + int(fields[12])) / _TICKS
        threads += int(fields[17])
    return Usage(rss / 1024, pss / 1024, start_cpu, cpu - start_cpu, int(threads), len(pids))
