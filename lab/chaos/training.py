"""A job of two workers, on one node or two: one rank raises a long exception,
the other one waits.
"""

import json
import os
import threading
from pathlib import Path

from flytekit import task

from flytekitplugins.firstfault import Elastic

FAULTY = "1"
_WORKERS = 2
TEXT = "the user's own error, " + "with many words " * 1000 + "to its end"


def mark(name: str) -> None:
    """Write a mark atomically."""
    part = Path(os.environ["MARKS"]) / f"{name}.part"
    part.write_text(json.dumps({"pid": os.getpid(), "agent": os.getppid()}))
    part.rename(part.with_suffix(".json"))


def work() -> None:
    """Raise on one rank when both run; wait for ever on the other one."""
    mark(f"rank-{os.environ['RANK']}")
    while len(list(Path(os.environ["MARKS"]).glob("rank-*.json"))) < _WORKERS:
        threading.Event().wait(0.01)
    if os.environ["RANK"] == FAULTY:
        raise ValueError(TEXT)
    threading.Event().wait()


_COMMON = {"start_method": "fork", "increase_shared_mem": False, "settle_seconds": 5}


@task(task_config=Elastic(nnodes=1, nproc_per_node=2, **_COMMON))
def one_node() -> int:
    work()
    return 0


@task(task_config=Elastic(nnodes=2, nproc_per_node=1, **_COMMON))
def two_nodes() -> int:
    work()
    return 0
