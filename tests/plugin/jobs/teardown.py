"""A task that returns on all ranks, then the last rank aborts in its teardown."""

import atexit
import os
import sys
import time

from flytekit import task
from marking import MARKS, mark

from flytekitplugins.firstfault import Elastic

LONG_S = 300


class Handle:
    """Aborts when the interpreter destroys it, as C++ does for a resource that it can't release."""

    def __del__(self, abort=os.abort) -> None:  # noqa: ANN001 - a default outlives the module
        abort()


def end_group() -> None:
    """End the process group, whose backend fails to shut down."""
    import torch.distributed as dist  # noqa: PLC0415 - only workers need it

    backend = type(dist.distributed_c10d._get_default_group())
    backend.shutdown = lambda _group: os.abort()
    dist.destroy_process_group()


def await_mark(name: str) -> None:
    """Wait until another rank has written a mark."""
    while not (MARKS / f"{name}.json").exists():
        time.sleep(0.02)


def trained(how: str) -> float:
    """Return the loss; rank 1 aborts at its interpreter's exit,
    or in "early" while rank 0 still trains.
    """
    import torch  # noqa: PLC0415 - only workers need it
    import torch.distributed as dist  # noqa: PLC0415

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank == 0:
        atexit.register(mark, "returned")
        if how == "early":
            mark("returned")
            time.sleep(LONG_S)
    elif how == "destructor":
        sys.stuck = Handle()  # type: ignore[attr-defined]
    else:
        atexit.register(end_group if how == "group" else os.abort)
    if rank == 1:
        atexit.register(await_mark, "returned")
    return float(total)


@task(task_config=Elastic(nnodes=2, nproc_per_node=1, increase_shared_mem=False, max_restarts=2))
def train(how: str) -> float:
    """Train, with restarts."""
    return trained(how)


@task(task_config=Elastic(nnodes=2, nproc_per_node=1, increase_shared_mem=False))
def once(how: str) -> float:
    """Train without restarts."""
    return trained(how)


@task(
    task_config=Elastic(nnodes=2, nproc_per_node=1, start_method="fork", increase_shared_mem=False)
)
def unconverted(how: str) -> float:
    """Return what Flyte can't convert to the output's type."""
    return how  # type: ignore[return-value]
