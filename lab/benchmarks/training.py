"""The training loop that both plugins run: rank 3 records the time and raises."""

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANK = 3
FAULT_AT = 5
SAME: dict[str, Any] = {"nnodes": 2, "nproc_per_node": 2, "increase_shared_mem": False}
SAME["start_method"] = os.environ.get("BENCH_START_METHOD", "spawn")


def loop(*, fails: bool = True) -> float:
    """Reduce ones in every step; rank 3 raises if it `fails`."""
    dist.init_process_group("gloo")
    total = torch.ones(1)
    for step in range(20):
        if fails and step == FAULT_AT and dist.get_rank() == RANK:
            Path(os.environ["RAISED_AT"]).write_text(str(time.time_ns()))
            raise ValueError("loss is nan at step 5")
        dist.all_reduce(total)
        total /= dist.get_world_size()
    dist.destroy_process_group()
    return float(total)
