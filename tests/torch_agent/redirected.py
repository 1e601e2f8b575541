"""Four workers without Flyte whose output goes to different places: ``python redirected.py FOLDER``.

Rank 0's streams are redirected, rank 1's are teed, rank 2's are shown, rank 3's are filtered out.
"""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig

from firstfault_torch import NodeFailedError, PlainEngine, launch

PREFIX = "[${node} ${group_rank} $$ ${role_name}${rank}] "


def leave() -> None:
    """Print to both streams, then exit."""
    rank = os.environ["RANK"]
    print(f"stdout of rank {rank}", flush=True)
    print(f"stderr of rank {rank}\nits reason", file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    logs = DefaultLogsSpecs(f"{sys.argv[1]}/logs", {0: Std.ALL}, {1: Std.ALL}, local_ranks_filter={0, 1, 2})
    config = LaunchConfig(1, 1, 4, start_method="fork", max_restarts=0, rdzv_backend="c10d", run_id="job")
    config.rdzv_endpoint, config.logs_specs, config.role = "127.0.0.1:0", logs, "trainer"
    config.log_line_prefix_template = PREFIX
    try:
        launch(config, leave, engine=PlainEngine(sys.argv[1], node="worker-0"))
    except NodeFailedError:
        sys.exit(1)
