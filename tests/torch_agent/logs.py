"""A node of workers without Flyte that print lines to stderr, and then fail: ``python logs.py FOLDER``."""

from __future__ import annotations

import os
import sys
import threading
import traceback

from torch.distributed.launcher.api import LaunchConfig

from firstfault_torch import NodeFailedError, PlainEngine, launch


def train() -> None:
    """Rank 1 prints 400 lines and fails while rank 0 waits, after it printed its exception's traceback too."""
    if os.environ["RANK"] == "0":
        threading.Event().wait()
    for step in range(400):
        print(f"step {step} of shard-{step:03}", file=sys.stderr)
    print("password=hunter22", file=sys.stderr)
    try:
        raise ValueError("bad sample")  # noqa: TRY301 - printed before it leaves
    except ValueError:
        traceback.print_exc()
        raise


if __name__ == "__main__":
    config = LaunchConfig(1, 1, 2, start_method="spawn", max_restarts=0, monitor_interval=0.1, rdzv_backend="c10d")
    config.rdzv_endpoint, config.run_id = "127.0.0.1:0", "logs"
    try:
        launch(config, train, engine=PlainEngine(sys.argv[1], node="worker-0"))
    except NodeFailedError:
        sys.exit(1)
