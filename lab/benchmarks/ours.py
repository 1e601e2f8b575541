"""Firstfault's tasks, with its default settings."""

import training
from flytekit import task

from flytekitplugins.firstfault import Elastic


@task(task_config=Elastic(**training.SAME))
def ours_default() -> float:
    """Rank 3 raises while the others are in a collective."""
    return training.loop()


@task(task_config=Elastic(**training.SAME))
def ours_good() -> float:
    """No rank fails."""
    return training.loop(fails=False)
