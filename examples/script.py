"""A script for torchrun: ``firstfault torchrun --nproc-per-node 4 script.py``. Rank 3 meets
a batch without labels.
"""

from __future__ import annotations

import os

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples and labels of one step on this rank."""
    samples = torch.randn(8, 4)
    labels = torch.randn(0 if (os.environ["RANK"], step) == ("3", 7) else 8)
    if len(labels) != len(samples):
        raise ValueError(f"batch {step} has {len(samples)} samples and {len(labels)} labels")
    return samples, labels


def main() -> None:
    """Train ten steps."""
    distributed.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(10):
        samples, labels = batch_of(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(samples).squeeze(1), labels).backward()
        optimizer.step()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
