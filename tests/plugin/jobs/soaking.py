"""A task in which each attempt, or each round, fails in the way that its inputs ask for;
no process group.

`lab/benchmarks/soak.py` runs it: each worker writes a mark and waits until the soak has looked at
the processes.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from firstfault.model import Origin, Verdict
from firstfault.retry import RetryContext, Vote, default_policy
from flytekitplugins.firstfault import Elastic

FILES = 200
BIG = 4 << 20
LONG_S = 1000


def fail(kind: str) -> None:
    if kind.startswith("worker"):
        os.kill(os.getpid(), signal.Signals[kind.split()[1]])
    if kind.startswith("agent"):  # the soak signals it
        threading.Event().wait(LONG_S)
    if kind == "exit":
        sys.exit(3)
    if kind == "bad pointer":
        ctypes.string_at(0)
    if kind == "memory":
        raise MemoryError("asked for: memory")
    if kind == "recoverable":
        raise FlyteRecoverableException("asked for: recoverable")
    if kind == "child":
        subprocess.Popen(["sleep", str(LONG_S)])
    if kind == "files":
        kept = [tempfile.TemporaryFile() for _ in range(FILES)]  # noqa: SIM115 - left open
        raise OSError(f"asked for: files, {len(kept)} of them")
    if kind == "stderr":
        sys.stderr.write("a line of stderr\n" * (BIG // 17))
    raise ValueError(f"asked for: {kind}" + (" big" * (BIG // 4) if kind == "message" else ""))


def work(faults: list[str]) -> int:
    """Fail as this attempt's or round's fault says ("kind@rank"),
    or return the number of the round.
    """
    attempt, restart = (
        int(os.environ[name]) for name in ("FLYTE_ATTEMPT_NUMBER", "TORCHELASTIC_RESTART_COUNT")
    )
    kind, _, rank = faults[attempt + restart].partition("@")
    marks = Path(os.environ["MARKS"])
    own = os.environ["RANK"]
    part = marks / f"{attempt}-{restart}-{own}.part"
    part.write_text(json.dumps({"agent": os.getppid(), "node": os.environ["HOSTNAME"]}))
    part.rename(part.with_suffix(".json"))
    deadline = time.monotonic() + LONG_S
    while not (marks / f"{attempt}-{restart}.go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    if kind != "none":
        if own == rank:
            fail(kind)
        threading.Event().wait(LONG_S)
    return restart


def if_asked(verdict: Verdict, context: RetryContext) -> Vote:
    """Retry after any failure if the soak wants many attempts in one engine."""
    del verdict, context
    return Vote(retry="SOAK_RETRY" in os.environ, reason="the soak continues", origin=Origin.USER)


OPTIONS = {
    "increase_shared_mem": False,
    "settle_seconds": 5,
    "retry_policy": default_policy() | if_asked,
}


@task(task_config=Elastic(nproc_per_node=2, start_method="fork", **OPTIONS))
def forked(faults: list[str]) -> int:
    """Two forked workers on one node."""
    return work(faults)


@task(task_config=Elastic(nproc_per_node=2, **OPTIONS))
def spawned(faults: list[str]) -> int:
    """Two spawned workers on one node."""
    return work(faults)


@task(task_config=Elastic(nnodes=2, nproc_per_node=1, start_method="fork", **OPTIONS))
def two_nodes(faults: list[str]) -> int:
    """A forked worker on each of two nodes."""
    return work(faults)


@task(task_config=Elastic(nproc_per_node=2, start_method="fork", max_restarts=100, **OPTIONS))
def restarted(faults: list[str]) -> int:
    """Two forked workers on one node, in many rounds of one attempt."""
    return work(faults)
