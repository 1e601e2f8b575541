"""Trainings of the framework lab: tiny models under real frameworks; one rank fails as the case asks.

``firstfault run`` starts them; the task's inputs name the framework, the fault and the rank.
"""

import datetime as dt
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from flytekit import task

from flytekitplugins.firstfault import Elastic


def timeout_of(kind: str) -> dt.timedelta:
    """Return the timeout of collectives: a hang is noticed after it, an exit in the middle long before."""
    return dt.timedelta(seconds=80 if kind == "leave" else 8)


STEPS = 6
FAULT_AT = 3


def fail(kind: str, rank: int, step: int) -> None:
    """Fail on one rank, at one step."""
    if int(os.environ["RANK"]) != rank or step != FAULT_AT:
        return
    if kind == "raise":
        raise KeyError(f"label of sample {rank * 100 + step}")
    if kind == "hang":
        time.sleep(120)
    if kind == "exit":
        sys.exit(3)
    if kind == "leave":
        sys.exit(0)
    if kind == "handled":
        try:
            Path("/no/such/file").stat()
        except OSError:
            traceback.print_exc()


def loop(kind: str, rank: int) -> None:
    """Train without a framework."""
    dist.init_process_group("gloo", timeout=timeout_of(kind))
    weights = torch.zeros(4)
    for step in range(STEPS):
        fail(kind, rank, step)
        gradient = torch.ones(4)
        dist.all_reduce(gradient)
        weights += gradient
    if kind == "handled" and dist.get_rank() == rank:
        raise KeyError("the real one")
    dist.barrier()
    dist.destroy_process_group()


class StepError(Exception):
    """What a program raises in place of everything."""


def plain(kind: str, rank: int) -> None:
    """Train, as most scripts do."""
    loop(kind, rank)


def exits(kind: str, rank: int) -> None:
    """Catch everything, print it and exit."""
    try:
        loop(kind, rank)
    except Exception:  # noqa: BLE001 - the point
        traceback.print_exc()
        sys.exit(1)


def wraps(kind: str, rank: int) -> None:
    """Catch everything and raise another exception, without its context."""
    try:
        loop(kind, rank)
    except Exception:  # noqa: BLE001 - the point
        raise StepError("training failed") from None


def hydra(kind: str, rank: int) -> None:
    """Run below hydra.main, which catches exceptions and exits."""
    import hydra as hydra_  # noqa: PLC0415 - not installed everywhere

    sys.argv = ["train.py", "hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=disabled"]
    folder = str(Path(__file__).parent)
    hydra_.main(version_base=None, config_path=folder, config_name="hydra")(lambda _: loop(kind, rank))()


def lightning(kind: str, rank: int) -> None:
    """Train with Lightning's Trainer."""
    _fit(kind, rank)


def after_lightning(kind: str, rank: int) -> None:
    """Fail after Lightning's fit, which has reset the handlers of all signals."""
    _fit("none", rank)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timeout_of(kind))
    for step in range(STEPS):
        fail(kind, rank, step)
        dist.all_reduce(torch.ones(1))


def _fit(kind: str, rank: int) -> None:
    import lightning as light  # noqa: PLC0415 - not installed everywhere
    from lightning.pytorch.strategies import DDPStrategy  # noqa: PLC0415

    class Model(light.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            fail(kind, rank, batch_idx)
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4)), batch_size=2)
    trainer = light.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timeout_of(kind)),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), data)


FRAMEWORKS: dict[str, Callable[[str, int], None]] = {
    function.__name__: function for function in (plain, exits, wraps, hydra, lightning, after_lightning)
}


@task(task_config=Elastic(nnodes=2, nproc_per_node=2, start_method="fork", increase_shared_mem=False, settle_seconds=5))
def train(framework: str, fault: str, rank: int) -> int:
    """Train under a framework; fail as `fault` says on `rank`."""
    FRAMEWORKS[framework](fault, rank)
    return int(os.environ["RANK"])
