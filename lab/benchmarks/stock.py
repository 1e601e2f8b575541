"""Kfpytorch's tasks, with its default settings or, as "fast" and "good",
with torchrun's monitor interval.
"""

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
    """No rank fails."""
    return training.loop(fails=False)
