"""One node concludes for all: real pods, of which the one that concludes is killed, frozen or slow."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.plugin.running import Running, running

pytestmark = pytest.mark.jobs

FILE = Path(__file__).parent / "jobs" / "concluding.py"
IS_FULL = int(os.environ.get("FIRSTFAULT_REPEAT", "1")) > 1


def _concluded(run: Running) -> list[int]:
    return [int(path.stem.partition("-")[2]) for path in run.marks.glob("concludes-*")]


@pytest.mark.parametrize(
    ("nodes", "disturbance", "concluded"),
    [(2, "slow", 2), (2, "killed", 2)] + [(4, "none", 1), (4, "killed", 2), (4, "slow", 2)] * IS_FULL,
)
def test_another_node_takes_over(nodes: int, disturbance: str, concluded: int, tmp_path: Path) -> None:
    """The job has one verdict, which is right, and few nodes have read for it. The first node hosts the store too."""
    options = ("--nodes", str(nodes), "--env", f"DISTURBANCE={disturbance}")
    with running(FILE, "train", tmp_path, {"rank": nodes - 1}, *options) as run:
        ended = run.end()
        assert len(_concluded(run)) == concluded
        assert run.left_over() == []
    assert ended.verdict["ranks"] == [nodes - 1]
    assert "the first fault" in ended.verdict["headline"]
    assert [path.name for path in ended.prefix.glob("error*")] == ["error.pb"]
    said = [line for line in ended.logs.splitlines() if line.startswith("root cause:")]
    assert len(set(said)) == 1
    assert len(said) == nodes - (disturbance == "killed")
    if disturbance == "killed":
        assert ended.attempt["engine"]["job"] == "Failed", "a pod was lost: Flyte reads no error file"
    else:
        ended.flyte_saw_the_verdict()


@pytest.mark.skipif(not IS_FULL, reason="make agent-faults runs it")
def test_a_frozen_node(tmp_path: Path) -> None:
    """The other node seals a verdict without it; when it runs again, it reaches the same one."""
    with running(FILE, "train", tmp_path, {"rank": 1}, "--nodes", "2", "--env", "DISTURBANCE=frozen") as run:
        while not list(tmp_path.glob("store/*/0/error.pb")):
            assert run.process.poll() is None
            time.sleep(0.05)
        (first, *_) = sorted(_concluded(run), key=lambda pid: not _is_stopped(pid))
        os.kill(first, signal.SIGCONT)
        ended = run.end()
        assert run.left_over() == []
    assert ended.verdict["ranks"] == [1]
    said = [line for line in ended.logs.splitlines() if line.startswith("root cause:")]
    assert len(said) == 2
    assert len(set(said)) == 1


def _is_stopped(pid: int) -> bool:
    return "State:\tT" in Path(f"/proc/{pid}/status").read_text()
