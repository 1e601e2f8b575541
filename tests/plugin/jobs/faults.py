"""Tasks whose workers write a mark, and then fail as a test asks for."""

import datetime as dt
import os
import threading
import time

from flytekit import task
from marking import MARKS, mark

from flytekitplugins.firstfault import Elastic, PyTorch, Worker


@task(
    task_config=Elastic(
        nnodes=1,
        nproc_per_node=2,
        start_method="fork",
        increase_shared_mem=False,
        settle_seconds=2,
    )
)
def one_node() -> int:
    """Wait for ever on one node."""
    mark(os.environ["RANK"])
    threading.Event().wait()
    return 0


def fail_after(rank: int) -> None:
    """Fail as a peer of `rank` does, shortly after it."""
    marker = MARKS / f"{rank}.json"
    while not marker.exists():
        threading.Event().wait(0.02)
    threading.Event().wait(0.5)
    raise ConnectionError("lost my peer")


@task(task_config=PyTorch(worker=Worker(replicas=1), increase_shared_mem=False, settle_seconds=2))
def with_master(rank: int) -> int:
    """Run in a master and a worker pod; both fail, and one of them is the root cause."""
    if os.environ["RANK"] == str(rank):
        mark(str(rank))
        raise ValueError("the first fault")
    fail_after(rank)
    return 0


class Slow:
    """An output that is slow to write."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __getstate__(self) -> dict[str, float]:
        """Sleep, but only in the pod's main process, not in a worker that sends it to its agent."""
        if "RANK" not in os.environ:
            mark("pickling")
            time.sleep(self.seconds)
        return {"seconds": self.seconds}


@task(
    task_config=Elastic(nnodes=3, nproc_per_node=1, start_method="fork", increase_shared_mem=False)
)
def handled(seconds: float) -> Slow:
    """One rank handles an exception whose handler destroys the process group;
    rank 0's output is slow to write.
    """
    import torch.distributed as dist  # noqa: PLC0415 - only workers need it

    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))
    dist.barrier()
    mark(str(dist.get_rank()))
    try:
        if dist.get_rank() == 1:
            raise ValueError("handled")  # noqa: TRY301 - a failure that the program survives
    except ValueError:
        dist.destroy_process_group()
    else:
        dist.destroy_process_group()
    return Slow(seconds)
