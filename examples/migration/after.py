"""A training task written for flytekitplugins-kfpytorch."""

import torch
import torch.distributed as dist
from flytekit import task, workflow
from flytekitplugins.firstfault import CleanPodPolicy, Elastic, RunPolicy


@task(
    task_config=Elastic(
        nnodes=2,
        nproc_per_node=2,
        start_method="fork",
        monitor_interval=1,
        max_restarts=0,
        rdzv_configs={"timeout": 1200, "join_timeout": 900},
        run_policy=RunPolicy(
            clean_pod_policy=CleanPodPolicy.RUNNING, ttl_seconds_after_finished=600
        ),
    ),
    retries=2,
)
def sum_of_ranks() -> int:
    """Add up the ranks of all workers."""
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total)


@workflow
def pipeline() -> int:
    """Run the task."""
    return sum_of_ranks()
