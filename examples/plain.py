"""Two nodes of two workers without Flyte: ``python plain.py FOLDER`` kills rank 3
and reads the verdict.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys

from torch.distributed.launcher.api import LaunchConfig

from firstfault import MultiErrorFileOutputReader
from firstfault_torch import NodeFailedError, PlainEngine, launch


def train() -> None:
    """Rank 3 is killed while the others train."""
    if os.environ["RANK"] == "3":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def node(number: int, port: int, folder: str) -> None:
    """Run one node's agent and its workers."""
    endpoint = {"rdzv_backend": "c10d", "rdzv_endpoint": f"localhost:{port}", "run_id": "plain"}
    config = LaunchConfig(
        2,
        2,
        2,
        start_method="spawn",
        max_restarts=0,
        monitor_interval=0.1,
        **endpoint,
    )
    try:
        launch(config, train, engine=PlainEngine(folder, node=f"worker-{number}"))
    except NodeFailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    nodes = [
        multiprocessing.Process(target=node, args=(number, port, sys.argv[1]))
        for number in range(2)
    ]
    for process in nodes:
        process.start()
    for process in nodes:
        process.join()
    verdict = MultiErrorFileOutputReader(f"{sys.argv[1]}/0").verdict()
    print(verdict.headline if verdict is not None else "no verdict")
