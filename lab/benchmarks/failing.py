"""Times from a raise to a durable error that names it and to the end of all pods;
time of a run that succeeds.

For firstfault and for stock kfpytorch, in turn: two nodes of two workers on this machine, gloo, the
same task; rank 3 raises while its peers wait in a collective. Pods and the operator's rules are
those of ``firstfault run`` for both plugins. "durable" is when the first error file can be listed
(firstfault: the error document; kfpytorch: error.pb), looked for every few milliseconds, from the
time that rank 3 noted before its raise; "verdict" is the same of error.pb; "right" is whether what
stock Flyte reads when the job ends is rank 3's own exception. Pods that run for LONGEST_S after the
raise are ended, and that is what is printed. The tasks named good succeed: wall clock and CPU
seconds of all their processes.
"""

import importlib
import os
import resource
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyteidl.core.literals_pb2 import LiteralMap

from firstfault.layout import ERRORS, is_stock_error_file
from firstfault.store import is_remote, open_store
from firstfault.utils.run_sync import run_sync
from flytekitplugins.firstfault.local.pods import JobState, error_seen, job_state
from tests.pods import start_pods

FAILING = ("ours_default", "stock_fast", "stock_default")
SUCCEEDING = ("ours_good", "stock_good")
LONGEST_S = 45.0
"""How long pods may run after the raise, seconds."""
SENTENCE = "loss is nan at step 5"
_LOOK_S = 0.005


@dataclass(frozen=True)
class Sample:
    """One run: seconds after the raise, or the duration and CPU time of a run that succeeds."""

    task: str
    durable: float
    verdict: float
    ended: float
    right: bool
    cpu: float = 0.0


async def _watch(prefix: str, seen: dict[str, int], stop: threading.Event) -> None:
    """Note when error files can first be listed below an output prefix,
    nanoseconds since the Unix epoch.
    """
    async with open_store(prefix) as store:
        while not stop.is_set():
            if "document" not in seen and await store.list(ERRORS):
                seen["document"] = time.time_ns()
            if "verdict" not in seen and any(
                is_stock_error_file(item.name) for item in await store.list()
            ):
                seen["verdict"] = time.time_ns()
            stop.wait(_LOOK_S)


def run(
    name: str,
    folder: Path,
    prefix: str,
    *,
    method: str = "spawn",
    settings: Mapping[str, str] = {},
) -> Sample:
    """Run one task once.

    `name` is a task in ours.py or stock.py: neither loads the other plugin. `settings` are more
    variables of the pods, and of this process while it looks.
    """
    os.environ.update({**settings, "BENCH_START_METHOD": method})
    task = getattr(_tasks(name), name)
    raised_at = folder / "raised-at"
    if not is_remote(prefix):
        Path(prefix).mkdir()
    own = {
        "PYTHONPATH": str(Path(__file__).parent),
        "PYTHONWARNINGS": "ignore",
        "RAISED_AT": str(raised_at),
        "FLYTE_INTERNAL_EXECUTION_ID": name.replace("_", "-"),
    }
    files: dict[str, int] = {}
    stop = threading.Event()
    watcher = threading.Thread(target=lambda: run_sync(_watch(prefix, files, stop)))
    succeeds = name in SUCCEEDING
    if not succeeds:
        watcher.start()
    began_ns = time.time_ns()
    cpu_before = _cpu_seconds()
    try:
        with start_pods(task, folder, LiteralMap(), own, prefix=prefix) as pods:
            while (state := job_state(pods)) is None and not _is_late(raised_at):
                time.sleep(0.01)
            seen = error_seen(prefix, state, multi_file=False) if state is not None else None
            while any(pod.exit_code is None for pod in pods) and not _is_late(raised_at):
                time.sleep(0.01)
            ended_ns = time.time_ns()
    finally:
        stop.set()
        if not succeeds:
            watcher.join()
    if succeeds:
        right = state is JobState.SUCCEEDED and seen is None
        return Sample(name, 0, 0, (ended_ns - began_ns) / 1e9, right, _cpu_seconds() - cpu_before)
    raised_ns = int(raised_at.read_text())

    verdict_ns = files.get("verdict", 0)
    durable, verdict, ended = (
        (moment_ns - raised_ns) / 1e9 if moment_ns else LONGEST_S
        for moment_ns in (files.get("document", verdict_ns), verdict_ns, ended_ns)
    )
    return Sample(name, durable, verdict, ended, seen is not None and SENTENCE in seen.message)


def _tasks(name: str) -> Any:
    """Reload the module of a task and the loop,
    which read the start method when they are loaded.
    """
    sys.path[:0] = [str(Path(__file__).parent)]
    try:
        importlib.reload(importlib.import_module("training"))
        return importlib.reload(importlib.import_module(name.partition("_")[0]))
    finally:
        sys.path.pop(0)


def _is_late(raised_at: Path) -> bool:
    return raised_at.exists() and time.time() - raised_at.stat().st_mtime > LONGEST_S


def _cpu_seconds() -> float:
    """Return the CPU time of all processes that have ended, with their children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
