"""Agents that fork, restart and fork again while they upload to S3: no S3 client may be open during a fork."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from firstfault import MultiErrorFileOutputReader
from tests.plugin.running import running

if TYPE_CHECKING:
    from tests.s3_server import S3

_LOST_S = 60.0
RESTARTING = Path(__file__).parent / "jobs" / "restarting.py"


@pytest.mark.jobs
def test_restarts_used_up(s3_environ: S3, tmp_path: Path) -> None:
    """Of three failed rounds, the last is judged and the others are history; the HTML report is written locally."""
    store = ("--store", s3_environ.uri("restarts"))
    with running(RESTARTING, "train", tmp_path, {"faulty_rounds": 3}, *store, cwd=tmp_path) as run:
        ended = run.end()
    attempt = ended.attempt
    assert ended.status == 11
    assert ended.verdict["ranks"] == [1]
    assert "round 2 is bad" in ended.verdict["message"]
    job = MultiErrorFileOutputReader(attempt["errors"].removesuffix("/firstfault/errors")).job()
    assert job.round == 2
    assert {failure.place.round for failure in job.failures} == {2}
    assert {failure.place.round for failure in job.history} == {0, 1}
    assert any("round 0 is bad" in failure.message for failure in job.history)
    assert min(failure.timestamp_ns for failure in job.failures) > max(failure.timestamp_ns for failure in job.history)
    # a recoverable error uses its restarts, each of which has a record
    assert [(record.number, record.restart, record.rank) for record in job.restarts] == [(0, True, 1), (1, True, 1)]
    assert "raised as recoverable" in job.restarts[0].reason
    assert "round 0 is bad" in job.restarts[0].headline
    assert all(0 < (record.lost_seconds or 0) < _LOST_S for record in job.restarts)
    assert {(record.world_size_before, record.world_size_after) for record in job.restarts} == {(2, 2)}
    # outputs go to a bucket, the report to the folder of the pods' logs
    report = Path(ended.result["report"])
    assert report.parent.parent == tmp_path / ".firstfault" / "logs"
    assert (report.parent / "attempt-0").is_dir()
    assert "round 2 is bad" in report.read_text(encoding="utf-8")
