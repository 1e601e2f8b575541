"""Prints how long after a fault each node of a job ends, and which of its processes are left:
``python ends.py``.

Two nodes with two ranks each, in folders of their own. Each rank has data loaders, a pool and a
program; the ranks without the fault wait for 30 s, as in a collective of NCCL until its timeout.
``--torchrun`` runs torch's own agent.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # started as a script

import torch.distributed as dist  # noqa: E402 - only now all is found
from torch.distributed.elastic.utils.distributed import get_free_port  # noqa: E402

from lab.benchmarks.launching import TORCHS, started  # noqa: E402
from tests.processes import find_running_processes  # noqa: E402

WAITS_S = 30
FAULTS = ("raise", "kill", "exit", "agent-killed", "first-agent-killed")
OURS = ("-m", "firstfault", "torchrun")


def train(fault: str, raised: str) -> None:
    """Be a rank: start processes, meet the others, then fail or wait for them."""
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415 - not in the launcher

    from torch.utils.data import DataLoader  # noqa: PLC0415 - as above

    if fault.endswith("agent-killed"):
        # and so do the processes that are forked from this one
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    pool = ProcessPoolExecutor(1)
    pool.submit(abs, -1).result()
    batches = iter(DataLoader(list(range(1000)), num_workers=2))
    next(batches)
    program = subprocess.Popen(["sleep", "600"])
    dist.barrier()
    if dist.get_rank() == (0 if fault.startswith("first-") else 3):
        Path(raised).write_text(str(time.time()), encoding="ascii")
        if fault == "raise":
            raise ValueError("batch 7 has no labels")
        if fault == "exit":
            sys.exit(7)
        os.kill(os.getppid() if fault.endswith("agent-killed") else os.getpid(), signal.SIGKILL)
    time.sleep(WAITS_S)
    program.kill()


def ended(
    folder: Path, fault: str, launcher: tuple[str, ...]
) -> tuple[list[float], dict[int, str]]:
    """Run a job; return the seconds from the fault to each node's end,
    and what is left 3 s after the last.
    """
    port = get_free_port()
    raised = folder / "raised"
    program = [__file__, fault, str(raised)]
    variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2", "MARKS": str(folder)}
    nodes = [started(folder, node, port, program, launcher, **variables) for node in range(2)]
    ends: dict[int, float] = {}
    while len(ends) < len(nodes):
        for number, node in enumerate(nodes):
            if number not in ends and node.poll() is not None:
                ends[number] = time.time()
        time.sleep(0.02)
    time.sleep(3)
    began = float(raised.read_text(encoding="ascii"))
    return [ends[number] - began for number in sorted(ends)], find_running_processes(
        variable=f"MARKS={folder}"
    )


def main() -> None:
    arguments = sys.argv[1:]
    launcher = TORCHS if "--torchrun" in arguments else OURS
    for fault in [one for one in arguments if not one.startswith("-")] or FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            seconds, left = ended(Path(folder).resolve(), fault, launcher)
            ends = ", ".join(f"{one:.1f} s" for one in seconds)
            print(
                f"{fault}: the nodes ended {ends} after it; {len(left)} processes left", flush=True
            )
            for pid, command in left.items():
                print(f"  {command}")
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    train(*sys.argv[1:]) if "RANK" in os.environ else main()
