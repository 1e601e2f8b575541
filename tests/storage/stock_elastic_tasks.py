"""An elastic task of the stock plugin, in which one of two workers fails."""

import os

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException
from flytekitplugins.kfpytorch import Elastic

CONFIG = Elastic(nnodes=1, nproc_per_node=2, start_method="fork", monitor_interval=0.1)


@task(task_config=CONFIG)
def recoverable() -> None:
    """Ask on rank 1 to be run again."""
    if os.environ["RANK"] == "1":
        raise FlyteRecoverableException("rank 1 wants to try again")
