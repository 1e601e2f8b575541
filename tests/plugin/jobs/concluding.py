"""A job of which one rank raises, and of which the node that concludes first is disturbed in that.

The task's retry policy is code of the user that runs in the node that concludes.
"""

import os
import signal
import time
from pathlib import Path

from flytekit import task

from firstfault.model import Verdict
from firstfault.retry import RetryContext
from flytekitplugins.firstfault import Elastic

SLOW_S = 6.0


def disturbed(verdict: Verdict, context: RetryContext) -> bool:
    """Disturb the first node that asks, in the way that the variable DISTURBANCE says."""
    if "MARKS" not in os.environ:
        return False  # the command that runs the pods asks too
    mark = Path(os.environ["MARKS"]) / f"concludes-{os.getpid()}.json"
    is_first = not list(mark.parent.glob("concludes-*"))
    mark.write_text("{}")
    if is_first and os.environ["DISTURBANCE"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if is_first and os.environ["DISTURBANCE"] == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if is_first and os.environ["DISTURBANCE"] == "slow":
        time.sleep(SLOW_S)
    return False


@task(
    task_config=Elastic(
        nnodes=2, nproc_per_node=1, start_method="fork", increase_shared_mem=False, retry_policy=disturbed
    )
)
def train(rank: int = 1) -> float:
    """One rank raises when all run, the others sleep."""
    own, marks = int(os.environ["RANK"]), Path(os.environ["MARKS"])
    (marks / f"rank-{own}.json").write_text("{}")
    while len(list(marks.glob("rank-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if own == rank:
        raise ValueError("the first fault")
    time.sleep(1000)
    return 0.0
