"""Training loops in which one rank meets a fault at one step; ``firstfault run`` starts them."""

import datetime as dt
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from flytekitplugins.firstfault import Elastic

STEPS = 4
_NOTICE_S = 60.0
_POLL_S = 0.01


class LostShardError(FlyteRecoverableException):
    """A fault that another attempt may not meet."""


def _documents() -> Path:
    return Path(os.environ["FIRSTFAULT_OUTPUT_PREFIX"]) / "firstfault" / "errors"


def _die(kind: str) -> None:
    if kind == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(3)
    if kind == "recoverable":
        raise LostShardError("shard 7 is gone")
    raise ValueError(f"bad batch on rank {dist.get_rank()}")


def _until_noticed() -> None:
    """Compute on until the death of a peer is on record: how fast the agent is, is not what these jobs are about."""
    deadline = time.monotonic() + _NOTICE_S
    while not any(_documents().glob("*.pb")) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _train(rank: int, step: int, kind: str) -> float:
    """Return STEPS times the world size, if no fault comes between."""
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=30))
    total = torch.zeros(1)
    for index in range(STEPS):
        if kind and index == step:
            if dist.get_rank() == rank:
                _die(kind)
            if kind in {"SIGKILL", "exit"}:
                _until_noticed()
        part = torch.ones(1)
        dist.all_reduce(part)
        total += part
    dist.destroy_process_group()
    return float(total)


@task(task_config=Elastic(nnodes=2, nproc_per_node=2, increase_shared_mem=False))
def spawned(rank: int = 3, step: int = 2, kind: str = "") -> float:
    """Two nodes of two spawned workers."""
    return _train(rank, step, kind)


@task(task_config=Elastic(nnodes=2, nproc_per_node=2, start_method="fork", increase_shared_mem=False))
def forked(rank: int = 3, step: int = 2, kind: str = "") -> float:
    """Two nodes of two forked workers."""
    return _train(rank, step, kind)


@task(task_config=Elastic(nnodes=2, nproc_per_node=1, start_method="fork", max_restarts=1, increase_shared_mem=False))
def restarted(rank: int = 1, step: int = 2, kind: str = "", rounds: int = 1) -> float:
    """Two nodes of one worker; the fault comes in the first `rounds` rounds only."""
    again = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < rounds
    return _train(rank, step, kind if again else "")


@task(task_config=Elastic(nproc_per_node=2, start_method="fork", increase_shared_mem=False), retries=1)
def retried(rank: int = 1, step: int = 2, kind: str = "") -> float:
    """One node of two workers; the fault comes in the first attempt only."""
    return _train(rank, step, kind if os.environ["FLYTE_ATTEMPT_NUMBER"] == "0" else "")
