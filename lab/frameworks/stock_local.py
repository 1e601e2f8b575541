"""A task of stock kfpytorch on one node, which a local execution runs in this process:
``stock_local.py raise``.
"""

import sys

from flytekit import task
from flytekitplugins.kfpytorch import Elastic
from launched import train as training


@task(task_config=Elastic(nnodes=1, nproc_per_node=2, max_restarts=0))
def train(fault: str) -> int:
    return training(fault)


if __name__ == "__main__":
    print(f"returned {train(fault=sys.argv[1])}")
