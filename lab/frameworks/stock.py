"""The framework lab's trainings as tasks of stock kfpytorch, to compare runs without a fault."""

from flytekit import task
from flytekitplugins.kfpytorch import Elastic
from training import JOB, run


@task(task_config=Elastic(**JOB))
def train(framework: str, fault: str, rank: int) -> int:
    return run(framework, fault, rank)
