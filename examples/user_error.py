"""A bug in the training code, on one rank only: firstfault names the rank, and does not retry.

Run it: ``firstfault run examples/user_error.py train --nodes 2``
"""

import torch
import torch.distributed as dist
from flytekit import task

from flytekitplugins.firstfault import Elastic

LAST_STEP = 5


def load_shard(rank: int) -> torch.Tensor:
    """Return the rank's samples; the last rank's shard has one column too many."""
    columns = 9 if rank == dist.get_world_size() - 1 else 8
    return torch.ones(16, columns)


@task(task_config=Elastic(nnodes=2, nproc_per_node=2), retries=2)
def train() -> float:
    """Sum the outputs of all ranks in each step; return the last sum."""
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 1)
    total = torch.zeros(1)
    for step in range(LAST_STEP):
        # the last rank fails here, while the other ranks wait for it in all_reduce
        samples = load_shard(dist.get_rank()) if step == LAST_STEP - 1 else torch.ones(16, 8)
        total = model(samples).mean().detach().reshape(1)
        dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)
