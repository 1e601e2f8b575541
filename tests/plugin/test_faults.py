"""Killed agents, timeouts and a store that fails, with real pods started through the command line."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.plugin.running import running

FAULTS = Path(__file__).parent / "jobs" / "faults.py"
pytestmark = pytest.mark.jobs


def test_a_store_that_fails_does_not_hide_the_exception(tmp_path: Path) -> None:
    """The verdict names the user's exception, and says that its document was lost."""
    with running(FAULTS, "one_node", tmp_path, {"kind": "store", "rank": 1}) as run:
        ended = run.end()
    attempt = ended.attempt
    seen = attempt["engine"]["error_seen"]
    assert ended.status == 10
    assert "ValueError: asked for: store" in seen["message"]
    assert "rank 1" in seen["message"].splitlines()[0]
    assert "could not be read" in seen["message"] or "was not uploaded" in seen["message"]
    assert attempt["verdict"]["ranks"] == [1]
    assert not attempt["verdict"]["coverage"]["complete"]


def test_a_recorder_that_does_not_answer(tmp_path: Path) -> None:
    """Frozen, it loses nothing: worker and agent upload by themselves, and Flyte reads the verdict."""
    with running(FAULTS, "one_node", tmp_path, {"kind": "recorder SIGSTOP", "rank": 1}) as run:
        ended = run.end()
    assert ended.status == 10, ended.logs
    assert ended.verdict["ranks"] == [1]
    assert "asked for: recorder SIGSTOP" in ended.verdict["headline"]
    ended.flyte_saw_the_verdict()
    assert not ended.attempt["decision"]["retry"]
    assert run.left_over() == []


def test_an_agent_that_is_killed(tmp_path: Path) -> None:
    """The workers report that their agent died; the job fails, Flyte reads no file and the decision is not enforced."""
    with running(FAULTS, "one_node", tmp_path, {"kind": "none", "rank": 9}) as run:
        run.mark("0")
        os.kill(run.mark("1")["agent"], signal.SIGKILL)
        ended = run.end()
    attempt = ended.attempt
    assert ended.status == 11
    assert attempt["engine"] == {"job": "Failed", "error_seen": None}
    assert attempt["verdict"]["why"][-1] == f"the pod {attempt['verdict']['node']} was killed by SIGKILL"
    assert (attempt["verdict"]["scope"], attempt["verdict"]["category"]) == ("node", "node_lost")
    assert (attempt["decision"]["retry"], attempt["decision"]["enforced"]) == (True, False)
    assert run.left_over() == []


def test_a_timeout_ends_every_process(tmp_path: Path) -> None:
    """After the timeout the command exits with 4, the verdict tells the limit, and no process remains."""
    # long enough for workers to begin on a busy machine
    with running(FAULTS, "one_node", tmp_path, {"kind": "none", "rank": 9}, "--timeout", "20") as run:
        run.mark("0")
        run.mark("1")
        ended = run.end()
    assert ended.status == 4
    assert (ended.result["status"], ended.attempt["engine"]["job"]) == ("timeout", None)
    assert "time limit of 20 s" in ended.verdict["headline"]
    assert run.left_over() == []


def test_a_job_with_a_master(tmp_path: Path) -> None:
    """Without an agent each pod writes its own document; the verdict names the worker's pod, which failed first."""
    with running(FAULTS, "with_master", tmp_path, {"rank": 1}) as run:
        ended = run.end()
    attempt = ended.attempt
    assert ended.status == 10
    assert attempt["verdict"]["ranks"] == [1]
    assert attempt["verdict"]["node"].endswith("-worker-0")
    assert attempt["verdict"]["victims"]["count"] == 1
    ended.flyte_saw_the_verdict()
