"""Trainings of the framework lab: tiny models under real frameworks;
one rank fails as the case asks.

``firstfault run`` starts them; the task's inputs name the framework, the fault and the rank.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from failing import BATCH, FAULT_AT, FEATURES, STEPS, Data, fail, is_faulty, loader, timeout_of
from flytekit import task

from flytekitplugins.firstfault import Elastic

FULL = "[Errno 28] No space left on device"
SLOW_S = 14.0
"""Longer than the other ranks wait."""


def loop(kind: str, rank: int) -> None:
    """Train without a framework."""
    dist.init_process_group("gloo", timeout=timeout_of(kind))
    weights = torch.zeros(FEATURES)
    data = iter(loader(kind, rank))
    for step in range(STEPS):
        gradient = next(data).mean(0)
        fail(kind, rank, step)
        dist.all_reduce(gradient)
        weights += gradient
    if kind == "handled" and dist.get_rank() == rank:
        raise KeyError("the real one")
    dist.barrier()
    dist.destroy_process_group()
    if kind == "at-end" and is_faulty(rank):
        raise KeyError("the last metric")


class StepError(Exception):
    """What a program raises in place of everything."""


# --- ways to end a program ------------------------------------------------------------------------


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


def exits_later(kind: str, rank: int) -> None:
    """Catch everything, print it, and exit when the exception is no longer handled."""
    failed = False
    try:
        loop(kind, rank)
    except Exception:  # noqa: BLE001 - the point
        traceback.print_exc()
        failed = True
    if failed:
        sys.exit(1)


def wraps(kind: str, rank: int) -> None:
    """Catch everything and raise another exception, without its context."""
    try:
        loop(kind, rank)
    except Exception:  # noqa: BLE001 - the point
        raise StepError("training failed") from None


def tidies_up(kind: str, rank: int) -> None:
    """Leave with success when the process is asked to end,
    as some programs do to save a checkpoint.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    loop(kind, rank)


def hydra(kind: str, rank: int) -> None:
    """Run below hydra.main, which catches exceptions and exits."""
    import hydra as hydra_  # noqa: PLC0415 - not installed everywhere

    sys.argv = [
        "train.py",
        "hydra.run.dir=.",
        "hydra.output_subdir=null",
        "hydra/job_logging=disabled",
    ]
    folder = str(Path(__file__).parent)
    hydra_.main(version_base=None, config_path=folder, config_name="hydra")(
        lambda _: loop(kind, rank)
    )()


# --- frameworks -----------------------------------------------------------------------------------


def lightning(kind: str, rank: int) -> None:
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
            self.layer = torch.nn.Linear(FEATURES, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            fail(kind, rank, batch_idx)
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = light.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timeout_of(kind)),
        max_steps=STEPS,
        logger=False,
        callbacks=[_lightning_hooks(kind, rank)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), loader(kind, rank))
    if kind == "checkpoint":
        trainer.save_checkpoint(_folder() / "last.ckpt")


def _lightning_hooks(kind: str, rank: int) -> Any:
    import lightning as light  # noqa: PLC0415 - not installed everywhere

    class Hooks(light.Callback):
        def on_train_batch_end(
            self,
            _trainer: Any,
            _module: Any,
            _outputs: Any,
            _batch: Any,
            batch_idx: int,
        ) -> None:
            if kind == "callback" and batch_idx == STEPS - 2 and is_faulty(rank):
                raise KeyError("val_loss")

        def on_exception(self, _trainer: Any, _module: Any, _exception: BaseException) -> None:
            if kind == "slow-hook" and is_faulty(rank):
                time.sleep(SLOW_S)

        def on_save_checkpoint(self, _trainer: Any, _module: Any, _checkpoint: Any) -> None:
            if kind == "checkpoint" and is_faulty(rank):
                raise OSError(FULL)

    return Hooks()


def transformers(kind: str, rank: int) -> None:
    import transformers as hub  # noqa: PLC0415 - not installed everywhere

    # on the CPU its `ddp_timeout` has no effect
    dist.init_process_group("gloo", timeout=timeout_of(kind))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(FEATURES, 1)
            self.calls = -1

        def forward(self, x: Any) -> Any:
            self.calls += 1
            fail(kind, rank, self.calls)
            return {"loss": self.layer(x).mean()}

    class Hooks(hub.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _arguments: Any, state: Any, _control: Any, **_more: Any) -> None:
            if kind == "callback" and state.global_step == FAULT_AT and is_faulty(rank):
                raise KeyError("val_loss")

    arguments = hub.TrainingArguments(
        output_dir=str(_folder()),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        dataloader_num_workers=1 if kind.startswith("loader") else 0,
        use_cpu=True,
        ddp_backend="gloo",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    hub.Trainer(
        Model(),
        arguments,
        train_dataset=Data(kind, rank, named=True),
        callbacks=[Hooks()],
    ).train()


def accelerate(kind: str, rank: int) -> None:
    import accelerate as fast  # noqa: PLC0415 - not installed everywhere

    patience = fast.InitProcessGroupKwargs(backend="gloo", timeout=timeout_of(kind))
    accelerator = fast.Accelerator(cpu=True, kwargs_handlers=[patience])
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(kind, rank))
    for step, batch in enumerate(data):
        fail(kind, rank, step)
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == STEPS:
            break
    accelerator.wait_for_everyone()
    accelerator.end_training()


# --- torch's own ----------------------------------------------------------------------------------


def _train_model(
    kind: str,
    rank: int,
    prepare: Callable[[torch.nn.Module], torch.nn.Module],
    save: Callable[[torch.nn.Module], object] = lambda _: None,
) -> None:
    dist.init_process_group("gloo", timeout=timeout_of(kind))
    layers = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 16), torch.nn.ReLU(), torch.nn.Linear(16, FEATURES)
    )
    model = prepare(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = iter(loader(kind, rank))
    for step in range(STEPS):
        batch = next(data)
        fail(kind, rank, step)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    save(model)
    dist.barrier()
    # DDP's reducer must not be the last to hold the group: it would wait, with Python's lock, for a
    # thread that may wait for this lock (torch 2.13)
    del model
    dist.destroy_process_group()


def fsdp(kind: str, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - one use
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    def shard(model: torch.nn.Module) -> torch.nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:  # type: ignore[attr-defined]
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    _train_model(kind, rank, shard)


def tensor_parallel(kind: str, rank: int) -> None:
    """Train with tensors that are split between the ranks of a node,
    and gradients that all nodes share.
    """
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - one use
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def split(model: torch.nn.Module) -> torch.nn.Module:
        mesh = init_device_mesh(
            "cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor")
        )
        return parallelize_module(
            model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )

    _train_model(kind, rank, split)


def ddp(kind: str, rank: int) -> None:
    _train_model(kind, rank, torch.nn.parallel.DistributedDataParallel)


def compiled(kind: str, rank: int) -> None:
    _train_model(
        kind,
        rank,
        lambda model: torch.compile(
            torch.nn.parallel.DistributedDataParallel(model), backend="aot_eager"
        ),
    )


def checkpoint(kind: str, rank: int) -> None:
    """Write a distributed checkpoint after DDP; one rank's part cannot be written."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - slow to import

    class Writer(dcp.FileSystemWriter):  # type: ignore[misc]
        def write_data(self, plan: Any, planner: Any) -> Any:
            if kind == "checkpoint" and is_faulty(rank):
                raise OSError(FULL)
            if kind == "checkpoint-hang" and is_faulty(rank):
                time.sleep(120)
            return super().write_data(plan, planner)

    def save(model: torch.nn.Module) -> None:
        dcp.save({"model": model.state_dict()}, storage_writer=Writer(_folder() / "checkpoint"))

    _train_model(kind, rank, torch.nn.parallel.DistributedDataParallel, save)


def _folder() -> Path:
    """Return a folder that all ranks share."""
    folder = Path(os.environ["MARKS"]) / "out"
    folder.mkdir(exist_ok=True)
    return folder


JOB: dict[str, Any] = {
    "nnodes": 2,
    "nproc_per_node": 2,
    "start_method": "fork",
    "increase_shared_mem": False,
}


def run(framework: str, fault: str, rank: int) -> int:
    """Train with the function of a framework; fail as `fault` says on `rank`;
    return this process's rank.
    """
    getattr(sys.modules[__name__], framework)(fault, rank)
    return int(os.environ["RANK"])


@task(task_config=Elastic(**JOB, settle_seconds=5))
def train(framework: str, fault: str, rank: int) -> int:
    return run(framework, fault, rank)
