"""A training step in which rank 0 is killed after it has made a deck;
``firstfault run`` starts it.
"""

import datetime as dt
import json
import os
import signal
import time
from pathlib import Path

from flytekit import Deck, task

from flytekitplugins.firstfault import Elastic

TEXT = "<p>loss 0.25 at step 7</p>"
_KEPT_S = 60.0
_POLL_S = 0.01


def _until_kept() -> None:
    """Wait until the decks have been written to a file."""
    folder = Path(json.loads(os.environ["FIRSTFAULT_RECORDING"])["node_folder"])
    deadline = time.monotonic() + _KEPT_S
    while not any(TEXT in path.read_text() for path in folder.glob("decks-*.json")):
        if time.monotonic() > deadline:
            raise TimeoutError("the decks were not written to a file")
        time.sleep(_POLL_S)


@task(
    task_config=Elastic(nnodes=2, nproc_per_node=1, start_method="fork", increase_shared_mem=False),
    enable_deck=True,
)
def train() -> float:
    """Make a deck on both ranks, which are on two nodes; then rank 0 is killed."""
    import torch  # noqa: PLC0415 - only workers need it
    import torch.distributed as dist  # noqa: PLC0415 - only workers need it

    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=100))
    rank = dist.get_rank()
    Deck(f"progress of rank {rank}", TEXT)
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        _until_kept()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    return 1.0
