"""Trains on gloo, and fails at rank 3, or "first-" at rank 0, as it is told: ``faulty.py FAULT``."""

import datetime as dt
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

FAULTY_RANK, FAULT_AT, STEPS = 0 if sys.argv[1].startswith("first-") else 3, 3, 6
LONG_S = 300


def fails(fault: str) -> None:
    """Leave the others, kill this process, or kill its agent, after which it ignores SIGTERM."""
    if fault == "leave":
        dist.destroy_process_group()
        sys.exit()
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.endswith("agent-killed"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(LONG_S)


def main() -> None:
    """Sum up what the ranks have, step by step."""
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=LONG_S))
    for step in range(STEPS):
        if dist.get_rank() == FAULTY_RANK and step == FAULT_AT:
            fails(sys.argv[1])
        total = torch.ones(1)
        dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"rank {os.environ['RANK']}: {int(total)}\n")  # in one piece: the ranks of a node share the pipe


main()
