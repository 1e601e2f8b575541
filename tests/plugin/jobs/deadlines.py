"""A training on two nodes in which one rank hangs inside a step that has a deadline."""

import os
import time

from flytekit import task

from firstfault_torch import watchdog
from flytekitplugins.firstfault import Elastic, Watchdog

LONG_S = 1000.0
DEADLINE_S = 12.0
_CONFIG = Elastic(
    nnodes=2,
    nproc_per_node=2,
    start_method="fork",
    increase_shared_mem=False,
    watchdog=Watchdog(heartbeat_timeout=120),
    tee="2",
    log_line_prefix_template="[${node} rank ${rank}] ",
)


@task(task_config=_CONFIG)
def trained(rank: int) -> float:
    """Train; one rank hangs in the fourth step while the others wait for it in a collective, each with a deadline."""
    import torch  # noqa: PLC0415 - only workers need it
    import torch.distributed as dist  # noqa: PLC0415 - only workers need it

    dist.init_process_group("gloo")
    total = torch.zeros(1)
    dist.all_reduce(total)
    for step in range(6):
        watchdog.ping()
        with watchdog.expires(after=DEADLINE_S, scope="train step"):
            if step == 3 and int(os.environ["RANK"]) == rank:
                os.write(2, b"the loader reads shard 7\n")
                time.sleep(LONG_S)
            dist.all_reduce(total)
    return float(total)
