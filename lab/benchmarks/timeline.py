"""Prints what happens after one exception, step by step: ``python lab/benchmarks/timeline.py``.

Two nodes with two ranks each, and a folder that all share. Rank 3 raises. The remaining ranks are
in a collective of gloo, and lose their peer, or with ``--asleep`` they wait as in a collective of
NCCL.
``--runs 9`` repeats the job, and prints medians and the slowest.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # started as a script

import torch  # noqa: E402 - only now all is found
import torch.distributed as dist  # noqa: E402
from torch.distributed.elastic.utils.distributed import get_free_port  # noqa: E402

from firstfault.layout import ERROR_FILE, ERRORS  # noqa: E402
from lab.benchmarks.launching import started  # noqa: E402

OURS = ("-m", "firstfault", "torchrun")
FAILED_RANK = 3
SIBLING = 2
RANKS = 4
WAITS_S = 60
STEPS = (
    "own document durable",
    "peers' documents durable",
    "sibling has ended",
    "last worker has ended",
    "verdict durable",
    "first agent has ended",
    "all agents have ended",
)


def train(marks: Path, waiting: str) -> None:
    """Be a rank: join the process group, then fail or wait for the failing rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (marks / f"{rank}.part").write_text(str(os.getpid()), encoding="ascii")
    (marks / f"{rank}.part").rename(marks / f"rank-{rank}")
    dist.barrier()
    while not (marks / "go").exists():
        time.sleep(0.01)
    if rank == FAILED_RANK:
        time.sleep(1)  # the remaining ranks wait by then
        (marks / "raised").write_text(repr(time.time()), encoding="ascii")
        raise ValueError("batch 7 has no labels")
    if waiting == "asleep":
        time.sleep(WAITS_S)
    dist.all_reduce(torch.ones(1))


def measure(folder: Path, waiting: str) -> dict[str, float]:
    """Run a job; return the seconds from the exception to each step."""
    marks, documents, port = folder / "marks", folder / "documents", get_free_port()
    marks.mkdir()
    program = [__file__, str(marks), waiting]
    variables = {"FIRSTFAULT_FOLDER": str(documents)}
    nodes = [started(folder, node, port, program, OURS, **variables) for node in range(2)]
    while len(workers := sorted(marks.glob("rank-*"))) < RANKS:
        assert all(node.poll() is None for node in nodes), "a node has failed at its start"
        time.sleep(0.05)
    processes = {file.name: int(file.read_text(encoding="ascii")) for file in workers}
    processes |= {f"node-{number}": node.pid for number, node in enumerate(nodes)}
    ends = _await_ends(processes, marks / "go")
    for node in nodes:
        node.wait()
    raised = float((marks / "raised").read_text(encoding="ascii"))
    own, *peers = sorted(_find_times(documents, f"{ERRORS}/*"))
    (verdict,) = _find_times(documents, ERROR_FILE)
    agents = [when for name, when in ends.items() if name.startswith("node-")]
    siblings = [when for name, when in ends.items() if name.startswith("rank-")]
    times = (
        own,
        max(peers),
        ends[f"rank-{SIBLING}"],
        max(siblings),
        verdict,
        min(agents),
        max(agents),
    )
    return {step: when - raised for step, when in zip(STEPS, times, strict=True)}


def _await_ends(processes: dict[str, int], go: Path) -> dict[str, float]:
    """Let the job fail; return when each process has ended."""
    poll = select.poll()
    names: dict[int, str] = {}
    for name, pid in processes.items():
        descriptor = os.pidfd_open(pid)
        names[descriptor] = name
        poll.register(descriptor, select.POLLIN)
    go.touch()
    ends: dict[str, float] = {}
    while names:
        for descriptor, _ in poll.poll():
            ends[names.pop(descriptor)] = time.time()
            poll.unregister(descriptor)
            os.close(descriptor)
    return ends


def _find_times(documents: Path, pattern: str) -> Iterator[float]:
    for file in documents.rglob(pattern):
        yield file.stat().st_mtime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--asleep", action="store_true")
    parser.add_argument("--runs", type=int, default=1)
    arguments = parser.parse_args()
    waiting = "asleep" if arguments.asleep else "in a collective"
    runs = []
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(measure(Path(folder).resolve(), waiting))
    print(f"the remaining ranks are {waiting}; seconds after the exception: median, slowest")
    for step in STEPS:
        seconds = [run[step] for run in runs]
        print(f"{statistics.median(seconds):8.3f} {max(seconds):8.3f}  {step}")


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2]) if "RANK" in os.environ else main()
