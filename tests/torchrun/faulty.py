"""Trains on gloo, and fails at the last rank, as it is told: ``faulty.py FAULT [import]``.

torchrun, srun or mpirun starts it; with "import" it records itself.
"""

import os
import sys

if "import" in sys.argv:
    import firstfault_torch.record  # noqa: F401 - records what ends this process

import datetime as dt
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from firstfault_torch.engine import RecoverableError

FAULT = sys.argv[1]
FAULT_AT, STEPS = 3, 6
LONG_S, HANG_S = 300, 5
LAUNCHERS = (("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


def fails(fault: str) -> None:
    """Leave the others, raise, hang, or kill this process."""
    if fault == "leave":
        Path(os.environ["MARKS"], "leaves").write_text(str(os.getpid()))
        dist.destroy_process_group()
        sys.exit()
    if fault == "raise":
        raise ValueError("batch 7 has no labels")
    if fault == "bug":
        raise TypeError("batch 7 is no tensor")
    if fault == "recoverable":
        raise RecoverableError("the queue is full")
    if fault == "ecc":  # as torch raises it
        code = "raise RuntimeError('CUDA error: uncorrectable ECC error encountered')"
        exec(compile(code, "/v/lib/python3/site-packages/torch/cuda/__init__.py", "exec"))  # noqa: S102
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault != "none":
        time.sleep(LONG_S)


def reduced() -> int:
    """Return the sum of a one of each rank. If a rank has left the others,
    fail once its process has ended.
    """
    total = torch.ones(1)
    try:
        dist.all_reduce(total)
    except RuntimeError:
        if FAULT == "leave":
            pid = Path(os.environ["MARKS"], "leaves").read_text()
            while Path("/proc", pid).exists():
                time.sleep(0.01)
        raise
    return int(total)


def main() -> None:
    """Tell torch the rank, as programs of srun and mpirun do, and sum up what the ranks have,
    step by step.
    """
    for rank, size in LAUNCHERS:
        if rank in os.environ and "RANK" not in os.environ:
            os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ[rank], os.environ[size]
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=LONG_S))
    if FAULT == "hang":
        reduced()  # on a busy machine the ranks come further apart than a collective may take
        dist.distributed_c10d._set_pg_timeout(dt.timedelta(seconds=HANG_S))
    for _ in range(int(os.environ.get("TRAIN_STEPS", "0"))):
        reduced()
        time.sleep(1)
    for step in range(STEPS):
        if dist.get_rank() == dist.get_world_size() - 1 and step == FAULT_AT:
            fails(FAULT)
        total = reduced()
    dist.barrier()
    dist.destroy_process_group()
    # in one piece: the ranks of a node share the pipe
    sys.stdout.write(f"rank {os.environ['RANK']}: {total}\n")


main()
