"""Workers of a job on two nodes restart in their processes, under their agents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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
