"""A rank that hangs inside of a deadline, on two nodes, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugin.running import running

pytestmark = pytest.mark.jobs

FILE = Path(__file__).parent / "jobs" / "deadlines.py"
HUNG = 2


def test_a_rank_that_hangs_in_a_step(tmp_path: Path) -> None:
    """The verdict names the rank that hung, not those that waited for it; all pods end, and Flyte reads the verdict."""
    with running(FILE, "trained", tmp_path, {"rank": HUNG}) as run:
        ended = run.end()
    assert ended.status == 10, ended.stderr
    verdict = ended.verdict
    assert (verdict["ranks"], verdict["category"]) == ([HUNG], "hang")
    assert "deadlines.py:" in verdict["headline"]
    assert not ended.attempt["decision"]["retry"]
    ended.flyte_saw_the_verdict()
    root = ended.of_rank(HUNG)
    assert "in trained" in root.stack_dumps[0].text
    assert "the loader reads shard 7" in root.log_tail, "stderr is teed, and its end is in the document"
    assert f"rank {HUNG}] the loader reads shard 7" in ended.logs
    expired = [failure for failure in ended.job.failures if failure.expired is not None]
    assert expired, "at least one deadline ended"
    assert all(failure.expired is not None and failure.expired.scope == "train step" for failure in expired)
    assert all(failure.signal == "SIGKILL" and failure.category == "hang" for failure in expired)
    assert run.left_over() == []
