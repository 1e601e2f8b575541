"""Trains on gloo in two ranks under any launcher: ``launched.py raise`` fails at rank 1."""

import os
import sys

import torch
import torch.distributed as dist
from lightning.fabric import Fabric

FAULTY_RANK, FAULT_AT, STEPS = 1, 3, 6


def train(fault: str) -> int:
    """Sum up what the ranks have, step by step; return the last sum."""
    if "LT_CLI_USED" in os.environ:  # Fabric's command line
        Fabric(accelerator="cpu", devices=2, strategy="ddp")
    else:
        dist.init_process_group("gloo")
    total = torch.zeros(1)
    for step in range(STEPS):
        if dist.get_rank() == FAULTY_RANK and step == FAULT_AT and fault == "raise":
            raise ValueError("batch 7 has no labels")
        total = torch.ones(1)
        dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return int(total)


if __name__ == "__main__":
    sum_of_ranks = train(sys.argv[1])
    print(f"rank {os.environ['RANK']}: {sum_of_ranks}", flush=True)
