"""Trains on gloo, and fails at rank 3, or "first-" at rank 0, as it is told: ``faulty.py FAULT [import]``.

torchrun, srun or mpirun starts it; with "import" it records itself.
"""

import os
import sys

if "import" in sys.argv:
    import firstfault_torch.record  # noqa: F401 - records what ends this process

import datetime as dt
import signal
import time

import torch
import torch.distributed as dist

FAULT = sys.argv[1]
FAULTY_RANK, FAULT_AT, STEPS = 0 if FAULT.startswith("first-") else 3, 3, 6
LONG_S = 300
LAUNCHERS = (("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


def fails(fault: str) -> None:
    """Leave the others, raise, hang, kill this process, or kill its agent, after which it ignores SIGTERM."""
    if fault == "leave":
        dist.destroy_process_group()
        sys.exit()
    if fault == "raise":
        raise ValueError("batch 7 has no labels")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.endswith("agent-killed"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGKILL)
    if fault != "none":
        time.sleep(LONG_S)


def main() -> None:
    """Tell torch the rank, as programs of srun and mpirun do, and sum up what the ranks have, step by step."""
    for rank, size in LAUNCHERS:
        if rank in os.environ and "RANK" not in os.environ:
            os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ[rank], os.environ[size]
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=5 if FAULT == "hang" else LONG_S))
    for step in range(STEPS):
        if dist.get_rank() == FAULTY_RANK and step == FAULT_AT:
            fails(FAULT)
        total = torch.ones(1)
        dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"rank {os.environ['RANK']}: {int(total)}\n")  # in one piece: the ranks of a node share the pipe


main()
