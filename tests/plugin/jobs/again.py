"""A job whose attempts fail in one way, then in another, and in that way again."""

import os

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from firstfault.retry import explicit, same_fault_again
from flytekitplugins.firstfault import Elastic


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
def impatient() -> None:
    """Fail; retried as long as each attempt fails differently from the one before."""
    attempt = int(os.environ["FLYTE_ATTEMPT_NUMBER"])
    if attempt == 0:
        raise FlyteRecoverableException("the disk is full")
    # a fingerprint ignores numbers
    raise FlyteRecoverableException(f"shard {attempt} is not there yet")
