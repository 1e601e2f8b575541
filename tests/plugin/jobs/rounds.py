"""Jobs whose rounds end in different ways; every worker writes a mark for each round in which it runs."""

import datetime as dt
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from firstfault.retry import on_category
from flytekitplugins.firstfault import Elastic

_POLL_S = 0.01
_LATE_S = 5.0
_ALONE_S = 60.0
_MEET_S = 100
"""Longest wait of a process group for its ranks; on a busy machine they may come half a minute apart."""


def _marks() -> Path:
    return Path(os.environ["MARKS"])


def _mark(name: str) -> None:
    part = _marks() / f"{name}.part"
    part.write_text(json.dumps({"pid": os.getpid(), "agent": os.getppid(), "world": int(os.environ["WORLD_SIZE"])}))
    part.rename(_marks() / f"{name}.json")


def _runs() -> int:
    """Return the number of the round, counted by this rank's marks, and write a mark for it."""
    rank = os.environ["RANK"]
    number = len(list(_marks().glob(f"rank-{rank}-*.json")))
    _mark(f"rank-{rank}-{number}")
    return number


def _meet() -> Any:
    """Make the process group; return torch.distributed."""
    import torch.distributed as dist  # noqa: PLC0415 - only workers need it

    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=_MEET_S))
    return dist


def _summed() -> float:
    """Run a collective of all ranks; return the sum."""
    import torch  # noqa: PLC0415 - only workers need it

    part = torch.ones(1)
    torch.distributed.all_reduce(part)
    return float(part)


@task(
    task_config=Elastic(
        nproc_per_node=4,
        start_method="fork",
        max_restarts=3,
        retry_policy=on_category("user_code"),
        increase_shared_mem=False,
    )
)
def again() -> float:
    """One of four workers raises the same error in each round, after all have met."""
    _runs()
    dist = _meet()
    _mark(f"sum-{_summed():g}-{dist.get_rank()}")
    if dist.get_rank() == 1:
        raise ValueError("the same each time")
    return _summed()


@task(task_config=Elastic(nnodes=2, nproc_per_node=1, start_method="fork", max_restarts=2, increase_shared_mem=False))
def in_turn() -> float:
    """A worker of a different node raises a recoverable error in each of the first two rounds."""
    number = _runs()
    dist = _meet()
    _summed()
    if number < 2 and dist.get_rank() == number:
        raise FlyteRecoverableException(f"round {number} fails on rank {number}")
    total = _summed()
    dist.destroy_process_group()
    return total


@task(task_config=Elastic(nnodes=2, nproc_per_node=1, start_method="fork", max_restarts=3, increase_shared_mem=False))
def code_bug() -> float:
    """Rank 1 has a bug; rank 0 fails first, because it lost its peer, and calls that recoverable."""
    _runs()
    dist = _meet()
    _summed()
    if dist.get_rank() == 0:
        try:
            return _summed()
        except RuntimeError as error:
            raise FlyteRecoverableException("lost the connection to another rank") from error
    try:
        if dist.get_rank() == 1:
            raise ValueError("the bug")
        return 0.0
    finally:
        dist.destroy_process_group()
        time.sleep(1)


@task(
    task_config=Elastic(
        nnodes=2,
        nproc_per_node=1,
        start_method="fork",
        max_restarts=1,
        restarts_follow_policy=False,
        rdzv_configs={"join_timeout": 15},
        increase_shared_mem=False,
    )
)
def not_together_again() -> float:
    """One rank fails when the test writes its number into the file "go"."""
    _runs()
    go = _marks() / "go"
    while not go.exists():
        time.sleep(_POLL_S)
    if os.environ["RANK"] == go.read_text():
        raise ValueError("the fault before the rendezvous")
    time.sleep(_ALONE_S)
    return 0.0


if os.environ.get("HOSTNAME", "").endswith("-worker-1"):
    time.sleep(_LATE_S)


@task(
    task_config=Elastic(
        nnodes="1:2",
        nproc_per_node=1,
        start_method="fork",
        rdzv_configs={"last_call_timeout": 1},
        increase_shared_mem=False,
    )
)
def growing() -> float:
    """Wait alone until a second node comes; then reduce with it."""
    _runs()
    deadline = time.monotonic() + _ALONE_S
    while os.environ["WORLD_SIZE"] == "1" and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    dist = _meet()
    total = _summed()
    dist.destroy_process_group()
    return total


@task(task_config=Elastic(nproc_per_node=2, start_method="fork", increase_shared_mem=False))
def out_of_memory() -> float:
    """Rank 1 allocates memory until the kernel kills it."""
    _runs()
    taken = []
    while os.environ["RANK"] == "1":
        taken.append(b"x" * (1 << 26))
    time.sleep(_ALONE_S)
    return 0.0


def _work() -> None:
    raise LookupError("the prefetch thread found nothing")


@task(task_config=Elastic(nproc_per_node=2, start_method="fork", increase_shared_mem=False))
def loading() -> float:
    """Rank 1 waits after its thread has died; then a worker process of rank 0's data loader fails."""
    import torch  # noqa: PLC0415 - only workers need it

    class Shards(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            if index == 2:
                raise LookupError("shard 2 is gone")
            return index

    _runs()
    if os.environ["RANK"] == "1":
        thread = threading.Thread(target=_work, name="prefetch")
        thread.start()
        thread.join()
        _mark("dead")
        time.sleep(_ALONE_S)
        return 0.0
    while not (_marks() / "dead.json").exists():
        time.sleep(_POLL_S)
    return float(sum(int(batch) for batch in torch.utils.data.DataLoader(Shards(), num_workers=1)))
