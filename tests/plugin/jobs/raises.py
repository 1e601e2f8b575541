"""A training loop that fails on one rank, in one of four ways."""

import os
import threading

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from flytekitplugins.firstfault import Elastic

FAULT_AT = 5


class ShardMissingError(FlyteRecoverableException):
    """A subclass that the user defines."""


class HostileError(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise SystemExit(7)


FAULTS = {
    "plain": lambda: ValueError("loss is nan at step 5"),
    "recoverable": lambda: FlyteRecoverableException("storage did not answer"),
    "subclass": lambda: ShardMissingError("shard 5 is not there yet"),
    "hostile": HostileError,
}


def raise_fault(kind: str) -> None:
    """Raise from a frame of its own, which the traceback names."""
    error = FAULTS[kind]()
    raise error


@task(
    task_config=Elastic(
        nnodes=2,
        nproc_per_node=2,
        start_method=os.environ.get("MATRIX_START_METHOD", "spawn"),
        monitor_interval=float(os.environ.get("MATRIX_MONITOR_INTERVAL", "0.1")),
        increase_shared_mem=False,
    )
)
def train(kind: str, rank: int) -> float:
    """Reduce ones until the fault comes."""
    import torch  # noqa: PLC0415 - only workers need it
    import torch.distributed as dist  # noqa: PLC0415 - only workers need it

    dist.init_process_group("gloo")
    total = torch.ones(1)
    for step in range(20):
        if step == FAULT_AT and dist.get_rank() == rank:
            raise_fault(kind)
        dist.all_reduce(total)
        total /= dist.get_world_size()
    dist.destroy_process_group()
    return float(total)


@task(
    task_config=Elastic(
        nnodes=1,
        nproc_per_node=2,
        start_method="fork",
        increase_shared_mem=False,
        stops_repeats=True,
    )
)
def repeated() -> float:
    """Ask for a retry on rank 1, in each attempt."""
    if os.environ["RANK"] == "0":
        threading.Event().wait()
    raise_fault("recoverable")
    return 0.0


@task(
    task_config=Elastic(nnodes=1, nproc_per_node=1, start_method="fork", increase_shared_mem=False),
    retries=2,
)
def retried() -> float:
    """Ask for a retry."""
    raise_fault("recoverable")
    return 0.0
