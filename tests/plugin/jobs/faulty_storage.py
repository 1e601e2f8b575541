"""Workers that wait for the test to break the storage, and then fail or go on waiting."""

import os
import threading

from flytekit import task
from marking import MARKS, mark

from flytekitplugins.firstfault import Elastic


def work() -> int:
    """Fail when the test writes this rank into a file."""
    own = os.environ["RANK"]
    mark(f"rank-{own}", store=os.environ.get("PET_RDZV_ENDPOINT", ""))
    go = MARKS / "go"
    while not go.exists() or go.read_text() != own:
        threading.Event().wait(0.02)
    raise ValueError("the user's own error")


_FORKED = {"start_method": "fork", "increase_shared_mem": False}
_SHORT = {**_FORKED, "settle_seconds": 2, "upload_deadline_seconds": 1}


@task(task_config=Elastic(nnodes=1, nproc_per_node=1, **_SHORT))
def one_node() -> int:
    """Run on one node."""
    return work()


@task(task_config=Elastic(nnodes=2, nproc_per_node=1, **_SHORT))
def two_nodes() -> int:
    """Run on two nodes."""
    return work()


@task(task_config=Elastic(nnodes=2, nproc_per_node=1, **_FORKED))
def usual() -> int:
    """Run on two nodes with the usual limits of time."""
    return work()
