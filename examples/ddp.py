"""A real distributed training on CPUs: a small network learns to separate two spirals.

Run it on this machine, on two nodes of two workers each::

    firstfault run examples/ddp.py train --nodes 2 --inputs '{"epochs": 60}'
"""

import math

import torch
import torch.distributed as dist
from flytekit import task, workflow
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from flytekitplugins.firstfault import Elastic


def two_spirals(points: int, seed: int) -> TensorDataset:
    """Return `points` points on two interleaved spirals, with the spiral's number as the label."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.sqrt(torch.rand(points, generator=generator)) * 2.5 * math.pi
    spiral = torch.randint(0, 2, (points,), generator=generator)
    turned = angle + math.pi * spiral
    place = torch.stack([angle * torch.cos(turned), angle * torch.sin(turned)], dim=1) / (
        2.5 * math.pi
    )
    noise = 0.02 * torch.randn(points, 2, generator=generator)
    return TensorDataset(place + noise, spiral)


def build_model() -> torch.nn.Module:
    """Return the network."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(2, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 2),
    )


def accuracy_of(model: torch.nn.Module, data: TensorDataset) -> float:
    """Return the share of correct predictions, from 0 to 1."""
    points, labels = data.tensors
    with torch.no_grad():
        return float((model(points).argmax(dim=1) == labels).float().mean())


def train_ddp(epochs: int) -> float:
    """Train as one rank of the process group; return the accuracy on a test set."""
    dist.init_process_group("gloo")
    try:
        data = two_spirals(2048, seed=1)
        sampler = DistributedSampler(data, shuffle=True)
        loader = DataLoader(data, batch_size=64, sampler=sampler)
        model = DistributedDataParallel(build_model())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for points, labels in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(points), labels).backward()
                optimizer.step()
        return accuracy_of(model.module, two_spirals(512, seed=2))
    finally:
        dist.destroy_process_group()


@task(task_config=Elastic(nnodes=2, nproc_per_node=2))
def train(epochs: int = 60) -> float:
    """Train on two nodes; return the accuracy."""
    return train_ddp(epochs)


@workflow
def learn(epochs: int = 60) -> float:
    """Train; register this workflow on a cluster."""
    return train(epochs=epochs)
