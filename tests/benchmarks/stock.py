"""Kfpytorch's tasks; "fast" has torchrun's monitor interval, and so have those of which nothing is said."""

import training
from flytekit import task
from flytekitplugins.kfpytorch import Elastic


@task(task_config=Elastic(**training.SAME))
def stock_default() -> float:
    """Rank 3 raises while the others are in a collective."""
    return training.loop()


@task(task_config=Elastic(**training.SAME, monitor_interval=0.1))
def stock_fast() -> float:
    """Rank 3 raises while the others are in a collective."""
    return training.loop()


@task(task_config=Elastic(**training.SAME, monitor_interval=0.1))
def stock_good() -> float:
    """Nobody fails."""
    return training.good()
