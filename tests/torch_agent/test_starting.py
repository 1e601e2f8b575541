"""Forked workers begin when all of a node's workers have been forked."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from firstfault_torch.node.channel import await_siblings, starting

LONG_S = 60.0
SOON_S = 30.0
"""The longest wait for what happens, on a busy machine; what does not happen is waited for `LONG_S`."""
PAUSE_S = 0.5
_fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker wait for its siblings for longer than a busy machine needs."""
    monkeypatch.setattr("firstfault_torch.node.channel.SIBLINGS_S", LONG_S)


def _begin(began: Any) -> None:
    await_siblings()
    began.put((os.getpid(), time.monotonic(), "FIRSTFAULT_START" in os.environ))


def _pipes() -> set[str]:
    """Return the pipes of this process; other tests' threads may close some meanwhile."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(file.readlink()))
    return {target for target in found if target.startswith("pipe:")}


def test_forked_workers_begin_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker waits for the last fork, whenever that is; the variable is gone then, and so are the files."""
    pipes = _pipes()
    began = _fork.SimpleQueue()
    workers = [_fork.Process(target=_begin, args=(began,)) for _ in range(3)]
    with starting("fork") as variables:
        monkeypatch.setenv("FIRSTFAULT_START", variables["FIRSTFAULT_START"])
        for worker in workers[:2]:
            worker.start()
        time.sleep(PAUSE_S)
        last = time.monotonic()
        workers[2].start()
    for worker in workers:
        worker.join(LONG_S)
        assert worker.exitcode == 0
    found = [began.get() for _ in workers]
    assert {pid for pid, *_ in found} == {worker.pid for worker in workers}
    assert all(moment > last for _, moment, _ in found)
    assert not any(left for *_, left in found)
    began.close()
    for worker in workers:
        worker.close()
    assert _pipes() <= pipes


def test_a_worker_that_dies_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others begin although one is killed before it begins."""
    began = _fork.SimpleQueue()
    workers = [_fork.Process(target=_begin, args=(began,)), _fork.Process(target=time.sleep, args=(LONG_S,))]
    with starting("fork") as variables:
        monkeypatch.setenv("FIRSTFAULT_START", variables["FIRSTFAULT_START"])
        for worker in workers:
            worker.start()
    workers[1].kill()
    workers[0].join(SOON_S)
    assert workers[0].exitcode == 0
    workers[1].join()


@pytest.mark.parametrize("value", [None, "", "1 5 6", f"{os.getppid()} 900 901", f"{os.getppid()} 0 1"])
def test_a_process_that_was_not_forked_so(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a pipe of its parent a process begins at once."""
    monkeypatch.setenv("FIRSTFAULT_START", value or "")
    began = time.monotonic()
    await_siblings()
    assert time.monotonic() - began < SOON_S
    with starting("spawn") as variables:
        assert variables == {}
