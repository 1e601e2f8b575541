"""Forked workers that fail in their first rounds, in step; no process group.

Gloo in forked workers does not always connect again after a restart, with plain torch elastic too (2 of 5 runs hung for
over a minute), so these workers keep in step without it.
"""

import os
import threading

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from flytekitplugins.firstfault import Elastic


@task(task_config=Elastic(nnodes=1, nproc_per_node=2, start_method="fork", max_restarts=2, increase_shared_mem=False))
def train(faulty_rounds: int) -> int:
    """Return the first round without a fault; in a faulty round rank 1 raises and rank 0 waits to be stopped."""
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if number < faulty_rounds:
        if os.environ["RANK"] == "1":
            raise FlyteRecoverableException(f"round {number} is bad")
        threading.Event().wait()
    return number
