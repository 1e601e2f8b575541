"""Runs a task in two pods, as ``firstfault run`` starts them,
whichever plugin the task belongs to.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flyteidl.core.literals_pb2 import LiteralMap

from firstfault.store import join
from flytekitplugins.firstfault.local.loading import serialized_command
from flytekitplugins.firstfault.local.pods import (
    Pod,
    elastic_environment,
    end_all,
    free_port,
    start_pod,
)

NODES = 2


@contextlib.contextmanager
def start_pods(
    task: Any,
    folder: Path,
    inputs: LiteralMap,
    environment: dict[str, str],
    *,
    prefix: str = "",
) -> Iterator[list[Pod]]:
    """Start a task's pods; end them after the block.

    The pods run in the folder, which gets inputs and logs ("0.log", "1.log"); an empty prefix is
    ``outputs`` in it.
    """
    (folder / "inputs.pb").write_bytes(inputs.SerializeToString())
    prefix = prefix or str(folder / "outputs")
    command = serialized_command(task)
    arguments = command.filled(
        inputs=str(folder / "inputs.pb"), prefix=prefix, raw=join(prefix, "raw")
    )
    operator = elastic_environment(
        str(NODES),
        task.task_config.nproc_per_node,
        0,
        folder.name,
        free_port(),
    )
    common = {**os.environ, **environment, **operator, **command.environment}
    pods: list[Pod] = []
    try:
        pods.extend(
            start_pod(
                f"worker-{index}",
                arguments=arguments,
                environment={**common, "_F_WN": f"worker-{index}"},
                folder=folder,
                log=folder / f"{index}.log",
            )
            for index in range(NODES)
        )
        yield pods
    finally:
        end_all(pods)
