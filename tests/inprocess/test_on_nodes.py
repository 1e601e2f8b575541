"""Workers of a job on two nodes restart in their processes, under their agents."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from firstfault import MultiErrorFileOutputReader
from firstfault.model import RestartKind
from firstfault_torch import Options
from firstfault_torch.inprocess import InProcessRestart, initialize
from tests.inprocess.training import on_nodes
from tests.nodes import Ended, Job

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.jobs

RESTART = InProcessRestart(
    initialize=initialize.RetryController(max_iterations=4, min_world_size=3),
    soft_timeout=10.0,
    hard_timeout=20.0,
    monitor_process_interval=0.2,
)


def _end(folder: Path, faults: list[str]) -> Ended:
    options = Options(in_process_restart=RESTART)
    with Job(folder, on_nodes, (faults,), options=options, config={"nproc_per_node": 2}).start(2) as job:
        return job.end()


def test_the_job_goes_on(tmp_path: Path) -> None:
    """After an exception, a hang, and then a SIGKILL of rank 0, the others continue, and the job succeeds.

    The record of the hang names the rank that hung, not those that waited for it in a collective, and its line.
    """
    ended = _end(tmp_path, ["3 raise", "2 hang", "0 kill"])
    assert (ended.codes, ended.conclusion) == ([0, 0], None), ended.logs
    assert ended.results[0] == "rank 0 of 3, began as 1, iteration 3"
    reader = MultiErrorFileOutputReader(str(tmp_path / "0"))
    assert not reader.is_error()
    first, second, third = reader.restarts()
    assert (first.kind, first.number, first.rank) == (RestartKind.IN_PROCESS, 0, 3)
    assert first.headline == "rank 3: exception, ValueError: the fault of iteration 0"
    assert (first.world_size_before, first.world_size_after) == (4, 4)
    assert (second.number, second.rank, second.category) == (1, 2, "hang")
    hung = r"rank 2: soft timeout, no progress for \d+\.\d s, at training\.py:\d+ in fail"
    assert re.fullmatch(hung, second.headline)
    assert (third.number, third.rank, third.headline) == (2, 0, "rank 0: terminated, its process ended")
    assert (third.world_size_before, third.world_size_after) == (4, 3)
    assert 0 < (first.lost_seconds or 0) < 60


def test_the_last_fault_is_the_root_cause(tmp_path: Path) -> None:
    """When the ranks give up, the fault from which they did not recover is the root cause; the others are history."""
    ended = _end(tmp_path, ["3 kill", "1 raise", "1 raise", "1 raise"])
    assert ended.verdict.ranks == (1,), ended.verdict
    assert "the fault of iteration 3" in ended.verdict.headline
    assert [(record.number, record.rank) for record in ended.job.restarts] == [(0, 3), (1, 1), (2, 1)]


def test_too_few_ranks_are_left(tmp_path: Path) -> None:
    """When too few are left, the rank that was killed last is the root cause, also if its node has no others left."""
    ended = _end(tmp_path, ["3 kill", "2 kill"])
    assert (ended.verdict.ranks, ended.verdict.category) == ((2,), "signal"), ended.verdict
