"""Jobs that fail in every attempt, in the same way or each time in another."""

import os

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from firstfault.retry import explicit, same_fault_again
from flytekitplugins.firstfault import Elastic


def _fail(kind: str) -> None:
    attempt = int(os.environ["FLYTE_ATTEMPT_NUMBER"])
    if kind == "other":
        # as many words as attempts: a fingerprint does not look at numbers
        raise FlyteRecoverableException("shard not ready" + " yet" * attempt)
    raise FlyteRecoverableException(f"shard {attempt} is not there yet")


@task(task_config=Elastic(nnodes=1, nproc_per_node=1, start_method="fork", increase_shared_mem=False), retries=1)
def patient(kind: str) -> None:
    """Retried as often as the task allows."""
    _fail(kind)


@task(
    task_config=Elastic(
        nnodes=1,
        nproc_per_node=1,
        start_method="fork",
        increase_shared_mem=False,
        retry_policy=explicit() & ~same_fault_again(),
    ),
    retries=3,
)
def impatient(kind: str) -> None:
    """Retried as long as it fails in another way each time."""
    _fail(kind)
