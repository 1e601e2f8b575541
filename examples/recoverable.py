"""A recoverable error: rank 3 cannot read its data in the first attempt,
and the retry continues from the checkpoint.

``make demo`` runs this::

    firstfault run examples/recoverable.py train --nodes 2
"""

import io
import os

import torch
import torch.distributed as dist
from flytekit import current_context, task
from flytekit.exceptions.user import FlyteRecoverableException
from torch.nn.parallel import DistributedDataParallel

from flytekitplugins.firstfault import Elastic

FAULTY_RANK = 3
EPOCHS = 8
FAULT_AT = 4


class DataUnavailableError(FlyteRecoverableException):
    """The data server did not answer; a minute later it usually does."""


def read_batch(epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (inputs, targets) of y = 3x - 1; in the first attempt, rank 3 raises instead."""
    first_attempt = os.environ.get("FLYTE_ATTEMPT_NUMBER", "0") == "0"
    if first_attempt and dist.get_rank() == FAULTY_RANK and epoch == FAULT_AT:
        raise DataUnavailableError(
            f"no answer from the data server for shard {dist.get_rank()}, epoch {epoch}"
        )
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + epoch)
    inputs = torch.rand(256, 1, generator=generator)
    return inputs, 3 * inputs - 1


def save(model: torch.nn.Module, epoch: int) -> None:
    """Store a checkpoint of the model after `epoch`."""
    checkpoint = current_context().checkpoint
    if checkpoint is not None and dist.get_rank() == 0:
        content = io.BytesIO()
        torch.save({"model": model.state_dict(), "epoch": epoch}, content)
        checkpoint.write(content.getvalue())


def resume(model: torch.nn.Module) -> int:
    """Load the previous attempt's checkpoint, if there is one; return the first epoch to train."""
    checkpoint = current_context().checkpoint
    content = checkpoint.read() if checkpoint is not None else None
    if content is None:
        return 0  # the first attempt, or the one before failed before it saved anything
    state = torch.load(io.BytesIO(content), weights_only=True)
    model.load_state_dict(state["model"])
    return int(state["epoch"]) + 1


@task(task_config=Elastic(nnodes=2, nproc_per_node=2), retries=2)
def train(epochs: int = EPOCHS) -> dict[str, float]:
    """Learn a line; return its slope and intercept,
    the last loss and the first epoch of this attempt.
    """
    dist.init_process_group("gloo")
    try:
        torch.manual_seed(0)
        line = torch.nn.Linear(1, 1)
        first = resume(line)
        model = DistributedDataParallel(line)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss = torch.zeros(())
        for epoch in range(first, epochs):
            inputs, targets = read_batch(epoch)
            for _ in range(50):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
            save(line, epoch)
        return {
            "slope": float(line.weight),
            "intercept": float(line.bias),
            "loss": float(loss),
            "first_epoch": float(first),
        }
    finally:
        dist.destroy_process_group()
