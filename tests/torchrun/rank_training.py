"""Trains on gloo as a program of srun or mpirun, and fails at rank 3: ``rank_training.py FAULT [import]``."""

import os
import sys

if "import" in sys.argv:
    import firstfault_torch.record  # noqa: F401 - records what ends this process

import datetime as dt
import signal
import time

import torch
import torch.distributed as dist

FAULTY_RANK, FAULT_AT, STEPS = 3, 3, 6
LONG_S = 300


def fails(fault: str) -> None:
    """Fail in one of the ways that a job knows."""
    if fault == "raise":
        raise ValueError("batch 7 has no labels")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LONG_S)


def main(fault: str) -> None:
    """Tell torch the rank, as such programs do, and sum up what the ranks have, step by step."""
    launcher = (
        "SLURM_PROCID SLURM_NTASKS" if "SLURM_PROCID" in os.environ else "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE"
    )
    os.environ["RANK"], os.environ["WORLD_SIZE"] = (os.environ[name] for name in launcher.split())
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=5 if fault == "hang" else LONG_S))
    for step in range(STEPS):
        if dist.get_rank() == FAULTY_RANK and step == FAULT_AT:
            fails(fault)
        total = torch.ones(1)
        dist.all_reduce(total)


main(sys.argv[1])
