"""A training loop on two nodes in which one rank fails while its peers sleep or wait in a collective.

Every worker writes a mark when it runs; the faulty one also writes the time of its fault.
"""

import ctypes
import datetime as dt
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from flytekitplugins.firstfault import Elastic

FAULT_STEP = 3
LONG_S = 1000.0
CLEAN_UP_S = 2.5


def marks() -> Path:
    """Return the folder of the marks."""
    return Path(os.environ["MARKS"])


def mark(name: str, **content: object) -> None:
    """Write a mark atomically."""
    part = marks() / f"{name}.part"
    part.write_text(json.dumps({"pid": os.getpid(), "agent": os.getppid(), "time_ns": time.time_ns(), **content}))
    part.rename(marks() / f"{name}.json")


def all_run() -> None:
    """Wait until every worker of the job runs."""
    world = int(os.environ["WORLD_SIZE"])
    while len(list(marks().glob("rank-*.json"))) < world:
        time.sleep(0.01)


def raise_in(clean_up: str) -> None:
    """Raise, then clean up slowly; with "destroy" the sockets close before that."""
    try:
        raise ValueError("the first fault")
    finally:
        if "destroy" in clean_up:
            import torch.distributed as dist  # noqa: PLC0415 - only workers need it

            dist.destroy_process_group()
        time.sleep(CLEAN_UP_S)


def swallow() -> None:
    """Handle an exception and destroy the process group in its handler."""
    import torch.distributed as dist  # noqa: PLC0415 - only workers need it

    try:
        raise ValueError("handled")  # noqa: TRY301 - as above
    except ValueError:
        dist.destroy_process_group()


def die_in_a_thread() -> None:
    """Wait for ever for a thread that has died."""

    def work() -> None:
        raise LookupError("the loader has no more shards")

    thread = threading.Thread(target=work, name="loader")
    thread.start()
    thread.join()
    mark("fault")
    time.sleep(LONG_S)


def fail(kind: str) -> None:  # noqa: C901 - one branch a fault
    """Fail in one of several ways."""
    mark("fault")
    if kind == "raise":
        raise ValueError("the first fault")
    if kind == "recoverable":
        raise FlyteRecoverableException("the first fault")
    if kind.startswith("finally"):
        raise_in(kind)
    if kind.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, kind))
    if kind == "terminate":
        ctypes.CDLL("libstdc++.so.6")["_ZSt9terminatev"]()
    if kind == "os._exit":
        os._exit(4)
    if kind == "os._exit(0)":
        os._exit(0)
    if kind == "sys.exit":
        sys.exit(5)
    if kind == "sys.exit(0)":
        sys.exit(0)
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "thread":
        die_in_a_thread()
    if kind == "hang":
        time.sleep(LONG_S)


def train(rank: int, kind: str, peers: str, *, wait: bool = False) -> float:
    """Train; one rank fails, the others sleep or continue with the collectives."""
    import torch  # noqa: PLC0415 - only workers need it
    import torch.distributed as dist  # noqa: PLC0415 - only workers need it

    own = int(os.environ["RANK"])
    if peers == "gloo":
        dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))
    mark(f"rank-{own}", local_rank=int(os.environ["LOCAL_RANK"]))
    all_run()
    while wait and not (marks() / "go").exists():
        time.sleep(0.01)
    total = torch.zeros(1)
    for step in range(2 * FAULT_STEP):
        if step == FAULT_STEP and own == rank and kind:
            fail(kind)
        if step == FAULT_STEP and peers == "sleep" and kind:
            time.sleep(LONG_S)
        if peers == "gloo":
            part = torch.ones(1)
            dist.all_reduce(part)
            total += part
    if dist.is_initialized():
        dist.destroy_process_group()
    return float(total)


@task(task_config=Elastic(nnodes=2, nproc_per_node=2, increase_shared_mem=False))
def spawned(rank: int = 3, kind: str = "", peers: str = "gloo") -> float:
    """Two nodes of two spawned workers."""
    return train(rank, kind, peers)


@task(task_config=Elastic(nnodes=2, nproc_per_node=1, start_method="fork", increase_shared_mem=False))
def forked(rank: int = 1, kind: str = "", peers: str = "gloo", wait: bool = False) -> float:
    """Two nodes of one forked worker; with `wait` the fault comes when the test writes the file "go"."""
    return train(rank, kind, peers, wait=wait)


@task(task_config=Elastic(nnodes=2, nproc_per_node=1, start_method="fork", increase_shared_mem=False))
def uneven(rank: int = 0, seconds: float = 0.0, kind: str = "") -> float:
    """One rank finishes or fails late, while the other has finished and waits."""
    own = int(os.environ["RANK"])
    mark(f"rank-{own}")
    if own == rank:
        time.sleep(seconds)
        if kind:
            fail(kind)
    return 1.0


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


@task(task_config=Elastic(nnodes=2, nproc_per_node=1, start_method="fork", increase_shared_mem=False))
def slow_output(seconds: float = 0.0) -> Slow:
    """Return an output that is slow to write."""
    mark(f"rank-{os.environ['RANK']}")
    return Slow(seconds)


@task(task_config=Elastic(nnodes=2, nproc_per_node=1, start_method="fork", increase_shared_mem=False))
def handled(seconds: float = 0.0) -> Slow:
    """One rank handles an exception whose handler destroys the process group; rank 0's output is slow to write."""
    import torch.distributed as dist  # noqa: PLC0415 - only workers need it

    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))
    dist.barrier()
    mark(f"rank-{dist.get_rank()}")
    if dist.get_rank() == 1:
        swallow()
    else:
        dist.destroy_process_group()
    return Slow(seconds)
