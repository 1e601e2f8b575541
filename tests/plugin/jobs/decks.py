"""A training step in which one rank fails after rank 0 has made a deck; ``firstfault run`` starts it."""

import datetime as dt
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from flytekit import Deck, task

from flytekitplugins.firstfault import Elastic

TEXT = "<p>loss 0.25 at step 7</p>"
_KEPT_S = 60.0
_POLL_S = 0.01


def _until_kept() -> None:
    """Wait until the decks have been written to a file."""
    folder = Path(os.environ["FIRSTFAULT_NODE_FOLDER"])
    deadline = time.monotonic() + _KEPT_S
    while not any(TEXT in path.read_text() for path in folder.glob("decks-*.json")):
        if time.monotonic() > deadline:
            raise TimeoutError("the decks were not written to a file")
        time.sleep(_POLL_S)


def _train(kind: str) -> float:
    """Make a deck on every rank; then rank 3 raises, or rank 0 is killed."""
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=30))
    rank = dist.get_rank()
    Deck(f"progress of rank {rank}", TEXT)
    dist.all_reduce(torch.ones(1))
    if kind == "raise" and rank == 3:
        raise ValueError("bad batch 17 <script>")
    if kind == "SIGKILL" and rank == 0:
        _until_kept()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return 1.0


@task(task_config=Elastic(nnodes=2, nproc_per_node=2, increase_shared_mem=False), enable_deck=True)
def spawned(kind: str = "raise") -> float:
    """Two nodes of two spawned workers."""
    return _train(kind)


@task(task_config=Elastic(nnodes=2, nproc_per_node=2, start_method="fork", increase_shared_mem=False), enable_deck=True)
def forked(kind: str = "raise") -> float:
    """Two nodes of two forked workers."""
    return _train(kind)
