"""Workers of a job on two nodes restart in their processes: real pods through the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from firstfault import MultiErrorFileOutputReader
from firstfault.model import RestartKind
from tests.plugin.running import Ended, running

pytestmark = pytest.mark.jobs

FILE = Path(__file__).parent / "jobs" / "in_process.py"


def _end(folder: Path, faults: list[str]) -> Ended:
    with running(FILE, "train", folder, {"faults": faults}) as run:
        ended = run.end()
    assert run.left_over() == []
    return ended


def test_the_job_goes_on(tmp_path: Path) -> None:
    """After an exception, a hang, and then a SIGKILL of rank 0, the others continue, and the job succeeds.

    The record of the hang names the rank that hung, not those that waited for it in a collective, and its line.
    """
    ended = _end(tmp_path, ["3 raise", "2 hang", "0 kill"])
    assert ended.status == 0, ended.stderr
    assert ended.verdict is None
    assert ended.result["outputs"]["o0"] == "rank 0 of 3, began as 1, iteration 3"
    reader = MultiErrorFileOutputReader(str(ended.prefix))
    assert not reader.is_error()
    first, second, third = reader.restarts()
    assert (first.kind, first.number, first.rank) == (RestartKind.IN_PROCESS, 0, 3)
    assert first.headline == "rank 3: exception, ValueError: the fault of iteration 0"
    assert (first.world_size_before, first.world_size_after) == (4, 4)
    assert (second.number, second.rank, second.category) == (1, 2, "hang")
    hung = r"rank 2: soft timeout, no progress for \d+\.\d s, at in_process\.py:\d+ in train"
    assert re.fullmatch(hung, second.headline)
    assert (third.number, third.rank, third.headline) == (2, 0, "rank 0: terminated, its process ended")
    assert (third.world_size_before, third.world_size_after) == (4, 3)
    assert 0 < (first.lost_seconds or 0) < 60
