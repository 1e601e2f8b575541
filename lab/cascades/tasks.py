"""The lab's trainings as tasks of Flyte's, by number of nodes and workers:
``firstfault run`` starts them in pods.
"""

import sys
from pathlib import Path

from flytekit import task

from flytekitplugins.firstfault import Elastic

sys.path.insert(0, str(Path(__file__).parents[2]))  # in a pod, only this folder is on the path

from lab.cascades import nccl_training, training


def _elastic(nodes: int, workers: int, **more: object) -> Elastic:
    return Elastic(
        nnodes=nodes,
        nproc_per_node=workers,
        start_method="fork",
        increase_shared_mem=False,
        **more,
    )


@task(task_config=_elastic(2, 2))
def two_by_two(
    kind: str = "",
    culprit: int = 3,
    slow: int = -1,
    early: bool = False,
    held: float = 0.0,
) -> float:
    return training.train(kind, culprit, slow=slow, early=early, held=held)


@task(task_config=_elastic(4, 2))
def four_by_two(
    kind: str = "",
    culprit: int = 3,
    slow: int = -1,
    early: bool = False,
    held: float = 0.0,
) -> float:
    return training.train(kind, culprit, slow=slow, early=early, held=held)


@task(task_config=_elastic(2, 2, max_restarts=1, restarts_follow_policy=False))
def restarted(kind: str = "", culprit: int = 3, rounds: int = 2) -> float:
    """Two nodes of two workers, with one restart; the fault comes in the first `rounds` rounds."""
    return training.train(kind, culprit, rounds=rounds)


@task(task_config=_elastic(2, 2))
def nccl_two_by_two(kind: str = "", culprit: int = 3, version: str = "2.7") -> int:
    return nccl_training.train(kind, culprit, version)


@task(task_config=_elastic(4, 2))
def nccl_four_by_two(kind: str = "", culprit: int = 3, version: str = "2.7") -> int:
    return nccl_training.train(kind, culprit, version)


@task(task_config=_elastic(2, 8))
def nccl_two_by_eight(kind: str = "", culprit: int = 3, version: str = "2.7") -> int:
    return nccl_training.train(kind, culprit, version)
