"""Trains on gloo, and fails at rank 3 as it is told: ``training.py FAULT``."""

import datetime as dt
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from firstfault_torch import RecoverableError

FAULTY_RANK, FAULT_AT, STEPS = 3, 3, 6
LONG_S = 300


def fails(fault: str) -> None:
    """Fail in one of the ways that a job knows."""
    if fault == "raise":
        raise ValueError("batch 7 has no labels")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        sys.exit(7)
    if fault == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RecoverableError("shard 7 is not there yet")
    if fault == "hang":
        time.sleep(LONG_S)
    if fault == "agent-killed":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(LONG_S)


def main() -> None:
    """Sum up what the ranks have, step by step."""
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=5 if sys.argv[1] == "hang" else LONG_S))
    for step in range(STEPS):
        if dist.get_rank() == FAULTY_RANK and step == FAULT_AT:
            fails(sys.argv[1])
        total = torch.ones(1)
        dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {os.environ['RANK']}: {int(total)}", flush=True)


main()
