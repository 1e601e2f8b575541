"""Tasks whose workers write a mark, and then fail as a test asks for."""

import contextlib
import json
import os
import shutil
import signal
import threading
from pathlib import Path

from flytekit import task

from flytekitplugins.firstfault import Elastic, PyTorch, Worker


def mark(rank: str) -> None:
    """Tell the test that this worker runs, and the ids of its process and its agent."""
    part = Path(os.environ["MARKS"]) / f"{rank}.part"
    part.write_text(json.dumps({"pid": os.getpid(), "agent": os.getppid()}))
    part.rename(part.with_suffix(".json"))


def fail(kind: str) -> None:
    """Fail in one of several ways."""
    if kind == "store":
        # the folder of error documents becomes a file: nothing can be uploaded any more
        errors = Path(os.environ["FIRSTFAULT_OUTPUT_PREFIX"]) / "firstfault" / "errors"
        shutil.rmtree(errors, ignore_errors=True)
        errors.parent.mkdir(parents=True, exist_ok=True)
        errors.write_text("in the way")
    if kind.startswith("recorder"):
        os.kill(_recorder(), signal.Signals[kind.split()[1]])
    raise ValueError(f"asked for: {kind}")


def _recorder() -> int:
    """Return the process of this node's recorder, a child of the agent."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            parent = (file.parent / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(os.getppid()) and "firstfault.recorder" in file.read_text():
                return int(file.parent.name)
    raise LookupError("no recorder runs")


def work(kind: str, rank: int) -> None:
    """Fail on one rank; wait for ever on the others."""
    own = os.environ.get("RANK", "0")
    mark(own)
    if own == str(rank):
        fail(kind)
    threading.Event().wait()


@task(task_config=Elastic(nnodes=1, nproc_per_node=2, start_method="fork", increase_shared_mem=False, settle_seconds=2))
def one_node(kind: str, rank: int) -> int:
    """Run on one node."""
    work(kind, rank)
    return 0


def fail_after(rank: int) -> None:
    """Fail as a peer of `rank` does, shortly after it."""
    marker = Path(os.environ["MARKS"]) / f"{rank}.json"
    while not marker.exists():
        threading.Event().wait(0.02)
    threading.Event().wait(0.5)
    raise ConnectionError("lost my peer")


@task(task_config=PyTorch(worker=Worker(replicas=1), increase_shared_mem=False, settle_seconds=2))
def with_master(rank: int) -> int:
    """Run in a master and a worker pod; both fail, and one of them is the root cause."""
    if os.environ["RANK"] == str(rank):
        mark(str(rank))
        fail("raise")
    fail_after(rank)
    return 0
