"""A job that fails in many rounds: in each, rank 3 raises while its peers are in a collective."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from flytekit import task

from flytekitplugins.firstfault import Elastic

RANK = 3
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
METHOD = os.environ.get("BENCH_START_METHOD", "spawn")
CONFIG = Elastic(
    nnodes=1,
    nproc_per_node=4,
    max_restarts=ROUNDS - 1,
    restarts_follow_policy=False,
    start_method=METHOD,
    increase_shared_mem=False,
)


def _note(what: str) -> None:
    number, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    file = Path(os.environ["BENCH_FOLDER"]) / f"{number}-{rank}-{what}"
    if not file.exists():
        part = file.with_suffix(".part")
        part.write_text(str(time.time_ns()))
        part.replace(file)  # a worker that is killed meanwhile leaves nothing


def steps() -> float:
    """Reduce ones until rank 3 raises."""
    total = torch.ones(1)
    for step in range(1000):
        if step == 20 and dist.get_rank() == RANK:
            _note("raised")
            raise ValueError("loss is nan at step 20")
        try:
            dist.all_reduce(total)
        except Exception:
            _note("victim")
            raise
        total /= dist.get_world_size()
    return float(total)


@contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@task(task_config=CONFIG)
def plain() -> float:
    """The exception leaves the task function."""
    dist.init_process_group("gloo")
    return steps()


@task(task_config=CONFIG)
def in_finally() -> float:
    """A finally block destroys the process group while the exception passes."""
    dist.init_process_group("gloo")
    try:
        return steps()
    finally:
        dist.destroy_process_group()


@task(task_config=CONFIG)
def in_with() -> float:
    """A context manager destroys the process group while the exception passes."""
    with process_group():
        return steps()
