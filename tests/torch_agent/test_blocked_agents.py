"""A signal to an agent whose main thread is blocked in C++ after a failure: another thread ends
the process, and the verdict stays what it is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from firstfault.layout import ERROR_FILE
from tests.nodes import DEADLINE_S, Job
from tests.torch_agent import trainings
from tests.torch_agent.blocked import WITH_VERDICT, WITHOUT_VERDICT, BlockingEngine

pytestmark = pytest.mark.jobs

ONE_NODE = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2}


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[partial[Job]]:
    """Return what makes a job of which a rank raises."""
    made: list[Job] = []

    def make(step: str, **config: int) -> Job:
        engine = partial(BlockingEngine, step=step)
        job = Job(tmp_path, trainings.one_fails, ("raise", "gloo"), config=config, engine=engine)
        made.append(job)
        return job

    yield partial(make)
    for job in made:
        job.__exit__()


def _await_blocked(job: Job) -> int:
    """Wait until an agent is blocked; return the index of its node."""
    pid = int(job.await_mark("blocked")["pid"])
    return [process.pid for process in job.processes].index(pid)


def _terminate(job: Job, node: int) -> None:
    os.kill(job.processes[node].pid or 0, signal.SIGTERM)


@pytest.mark.parametrize("step", ["publish", "announce"])
def test_after_publishing(step: str, jobs: partial[Job]) -> None:
    """The published verdict stays as it is, and decides on the exit code: the main thread may
    not have come to know that it is published.
    """
    job = jobs(step, **ONE_NODE).start()
    node = _await_blocked(job)
    published = job.folder / "0" / ERROR_FILE
    before = published.read_bytes()
    _terminate(job, node)
    ended = job.end()
    assert ended.codes == [WITH_VERDICT], ended.logs
    assert published.read_bytes() == before
    assert ended.verdict.ranks == (1,)


def test_after_all_nodes_have_the_verdict(jobs: partial[Job]) -> None:
    """The node that concluded is blocked while it prints, after the other one has left."""
    job = jobs("announce").start(2)
    node = _await_blocked(job)
    job.processes[1 - node].join(DEADLINE_S)
    published = job.folder / "0" / ERROR_FILE
    before = published.read_bytes()
    _terminate(job, node)
    ended = job.end()
    assert ended.codes[node] == WITH_VERDICT, ended.logs
    assert published.read_bytes() == before


def test_during_the_election(jobs: partial[Job]) -> None:
    """A leader that is blocked while it concludes leaves the verdict to the other node, or
    adopts that one's.
    """
    job = jobs("enforces").start(2)
    node = _await_blocked(job)
    _terminate(job, node)
    ended = job.end()
    assert ended.codes[node] in {WITHOUT_VERDICT, WITH_VERDICT}, ended.logs
    assert ended.codes[1 - node] in {1, WITHOUT_VERDICT}, ended.logs
    assert ended.verdict.ranks == (1,)
    assert (job.folder / "0" / ERROR_FILE).exists()


def test_after_the_other_nodes_took_over(jobs: partial[Job]) -> None:
    """A leader that is still blocked when the other node has concluded adopts its verdict."""
    job = jobs("enforces").start(2)
    node = _await_blocked(job)
    published = job.folder / "0" / ERROR_FILE
    job.await_files(f"0/{ERROR_FILE}")
    job.processes[1 - node].join(DEADLINE_S)
    before = published.read_bytes()
    _terminate(job, node)
    ended = job.end()
    assert ended.codes[node] == WITH_VERDICT, ended.logs
    assert published.read_bytes() == before
