"""A training loop on two nodes whose workers restart in their processes."""

import datetime as dt
import os
import signal

import torch
import torch.distributed as dist
from flytekit import task

from firstfault_torch.inprocess import InProcessRestart, current_call, initialize
from flytekitplugins.firstfault import Elastic

FAULT_STEP = 5
RESTART = InProcessRestart(
    initialize=initialize.RetryController(max_iterations=4, min_world_size=3),
    soft_timeout=10.0,
    hard_timeout=20.0,
    monitor_process_interval=0.2,
)


@task(task_config=Elastic(nnodes=2, nproc_per_node=2, start_method="fork", in_process_restart=RESTART))
def train(faults: list[str]) -> str:
    """Train; in each iteration the rank that began as 3 fails as `faults` says. Return what rank 0 saw."""
    call = current_call()
    assert call is not None
    began_as = call.state.initial_rank
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))
    fault = faults[call.iteration] if call.iteration < len(faults) else ""
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(2 * FAULT_STEP):
        call.ping()
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == world
        who, _, kind = fault.partition(" ")
        if step == FAULT_STEP and kind and int(who) == began_as:
            if kind == "raise":
                raise ValueError(f"the fault of iteration {call.iteration}")
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()
    return f"rank {rank} of {world}, began as {began_as}, iteration {call.iteration}"
