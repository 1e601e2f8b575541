"""A training loop whose workers restart with NVIDIA's wrapper, through firstfault's adapter."""

import datetime as dt
import os
import signal
import time
from typing import Optional

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException
from nvidia_resiliency_ext.inprocess import CallWrapper
from nvidia_resiliency_ext.inprocess.initialize import RetryController

from firstfault_inprocess.nvrx import Wrapper
from flytekitplugins.firstfault import Elastic

FAULT_STEP = 5
SECOND = dt.timedelta(seconds=1)


@Wrapper(
    initialize=RetryController(max_iterations=3),
    soft_timeout=10 * SECOND,
    hard_timeout=20 * SECOND,
    barrier_timeout=40 * SECOND,
    last_call_wait=0.2 * SECOND,
    monitor_thread_interval=0.1 * SECOND,
    monitor_process_interval=0.2 * SECOND,
)
# the form that NVIDIA's wrapper knows
def loop(faults: list, call: Optional[CallWrapper] = None) -> str:  # noqa: UP045
    """Train; return what rank 0 saw."""
    assert call is not None
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    who, _, kind = (faults[call.iteration] if call.iteration < len(faults) else "").partition(" ")
    for step in range(8 * FAULT_STEP):
        time.sleep(0.05)  # on gloo NVIDIA's wrapper cannot interrupt a collective
        if step == FAULT_STEP and kind and int(who) == rank:
            if kind == "raise":
                raise FlyteRecoverableException(f"the fault of iteration {call.iteration}")
            os.kill(os.getpid(), signal.SIGKILL)
    return f"rank {rank} of {world}, iteration {call.iteration}"


@task(task_config=Elastic(nnodes=1, nproc_per_node=3, start_method="fork"))
def train(faults: list[str]) -> str:
    return str(loop(faults))
