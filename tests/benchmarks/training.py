"""The same training loop for both plugins: rank 3 notes the time and raises."""

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from flytekit import task
from flytekitplugins.kfpytorch import Elastic as StockElastic

from flytekitplugins.firstfault import Elastic

RANK = 3
FAULT_AT = 5
SAME: dict[str, Any] = {"increase_shared_mem": False, "start_method": os.environ.get("BENCH_START_METHOD", "spawn")}


def loop() -> float:
    """Sum up ones until rank 3 raises."""
    dist.init_process_group("gloo")
    total = torch.ones(1)
    for step in range(20):
        if step == FAULT_AT and dist.get_rank() == RANK:
            Path(os.environ["RAISED_AT"]).write_text(str(time.time_ns()))
            raise ValueError("loss is nan at step 5")
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return float(total)


@task(task_config=StockElastic(nnodes=2, nproc_per_node=2, **SAME))
def stock_default() -> float:
    """Kfpytorch with its default settings."""
    return loop()


@task(task_config=StockElastic(nnodes=2, nproc_per_node=2, monitor_interval=0.1, **SAME))
def stock_fast() -> float:
    """Kfpytorch with torchrun's monitor interval."""
    return loop()


@task(task_config=Elastic(nnodes=2, nproc_per_node=2, **SAME))
def ours_default() -> float:
    """Firstfault with its default settings."""
    return loop()


@task(task_config=Elastic(nnodes=2, nproc_per_node=2, monitor_interval=5, **SAME))
def ours_slow() -> float:
    """Firstfault with kfpytorch's monitor interval."""
    return loop()


def asleep() -> float:
    """Rank 3 raises when all are there; the others sleep."""
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == RANK:
        Path(os.environ["RAISED_AT"]).write_text(str(time.time_ns()))
        raise ValueError("loss is nan at step 5")
    time.sleep(1000)
    return 0.0


def good() -> float:
    """Sum up ones, to the end."""
    dist.init_process_group("gloo")
    total = torch.ones(1)
    for _ in range(20):
        dist.all_reduce(total)
        total /= dist.get_world_size()
    dist.destroy_process_group()
    return float(total)


@task(task_config=Elastic(nnodes=2, nproc_per_node=2, **SAME))
def ours_asleep() -> float:
    """Firstfault with its default settings."""
    return asleep()


@task(task_config=StockElastic(nnodes=2, nproc_per_node=2, monitor_interval=0.1, **SAME))
def stock_asleep() -> float:
    """Kfpytorch with torchrun's monitor interval."""
    return asleep()


@task(task_config=Elastic(nnodes=2, nproc_per_node=2, **SAME))
def ours_good() -> float:
    """Firstfault with its default settings."""
    return good()


@task(task_config=StockElastic(nnodes=2, nproc_per_node=2, monitor_interval=0.1, **SAME))
def stock_good() -> float:
    """Kfpytorch with torchrun's monitor interval."""
    return good()
