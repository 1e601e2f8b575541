"""A worker that waits for the test to break the storage, and then fails."""

import time

from flytekit import task
from marking import MARKS, mark

from flytekitplugins.firstfault import Elastic


@task(
    task_config=Elastic(
        nnodes=1,
        nproc_per_node=1,
        start_method="fork",
        increase_shared_mem=False,
        settle_seconds=2,
        upload_deadline_seconds=1,
    )
)
def train() -> None:
    """Fail when the test says so."""
    mark("runs")
    while not (MARKS / "go").exists():
        time.sleep(0.02)
    raise ValueError("the user's own error")
