"""Deaths without a word, signals from outside, a store that fails: real pods, through the command line."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.plugin.running import running

FAULTS = Path(__file__).parent / "matrix" / "faults.py"
pytestmark = pytest.mark.jobs


def test_a_death_without_a_word(tmp_path: Path) -> None:
    """The agent's document names signal or exit code, rank and node; the sibling that it stopped is a victim."""
    with running(FAULTS, "one_node", tmp_path, {"kind": "kill", "rank": 1}) as run:
        ended = run.end()
    attempt = ended.attempt
    verdict = attempt["verdict"]
    assert ended.status == 10
    assert (verdict["ranks"], verdict["code"], verdict["category"]) == ([1], "USER:SIGKILL", "signal")
    assert verdict["node"].endswith("-n0-0")
    assert "stopped by its agent (SIGTERM)" in verdict["victims"]["ranks"]["0"]
    assert "signal: SIGKILL: killed from outside" in attempt["engine"]["error_seen"]["message"]
    assert attempt["seconds"]["fault_to_durable"] > 0
    ended.flyte_saw_the_verdict()
    assert run.left_over() == []


def test_an_exit_with_a_code_is_named(tmp_path: Path) -> None:
    """sys.exit(5) in the training is a failure of that rank."""
    with running(FAULTS, "one_node", tmp_path, {"kind": "sys.exit", "rank": 0}) as run:
        ended = run.end()
    verdict = ended.verdict
    assert verdict["ranks"] == [0]
    assert verdict["headline"].startswith("SystemExit, rank 0")


def test_a_store_that_fails_does_not_hide_the_exception(tmp_path: Path) -> None:
    """The attempt ends with the user's own exception, and that its document was lost is said."""
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


def test_a_node_that_is_told_to_go(tmp_path: Path) -> None:
    """SIGTERM to the agent leaves a verdict, not an exit without a word: preempted, on the system's budget."""
    with running(FAULTS, "one_node", tmp_path, {"kind": "none", "rank": 9}) as run:
        os.kill(run.mark("1")["agent"], signal.SIGTERM)
        ended = run.end()
    attempt = ended.attempt
    assert ended.status == 11
    assert (attempt["verdict"]["scope"], attempt["verdict"]["category"]) == ("external", "preemption")
    assert (attempt["decision"]["retry"], attempt["decision"]["origin"]) == (True, "SYSTEM")
    ended.flyte_saw_the_verdict()
    assert run.left_over() == []


def test_an_agent_that_is_killed(tmp_path: Path) -> None:
    """Its workers say that the agent died; the job fails, Flyte reads nothing, so the decision is advice."""
    with running(FAULTS, "one_node", tmp_path, {"kind": "none", "rank": 9}) as run:
        run.mark("0")
        os.kill(run.mark("1")["agent"], signal.SIGKILL)
        ended = run.end()
    attempt = ended.attempt
    assert ended.status == 11
    assert attempt["engine"] == {"job": "Failed", "error_seen": None}
    assert (attempt["verdict"]["scope"], attempt["verdict"]["category"]) == ("node", "node_lost")
    assert (attempt["decision"]["retry"], attempt["decision"]["enforced"]) == (True, False)
    assert run.left_over() == []


def test_switched_off(tmp_path: Path) -> None:
    """An empty variable leaves plain torch elastic: stock files, none of ours."""
    options = ("--env", "FLYTE_INTERNAL_ERROR_PROPAGATION=")
    with running(FAULTS, "one_node", tmp_path, {"kind": "raise", "rank": 1}, *options) as run:
        ended = run.end()
    attempt = ended.attempt
    assert ended.status == 10
    assert "asked for: raise" in attempt["engine"]["error_seen"]["message"]
    assert attempt["engine"]["error_seen"]["message"].startswith("Trace:")
    assert list((tmp_path / "store").glob("*/0/firstfault")) == []


def test_an_interrupt_ends_every_process(tmp_path: Path) -> None:
    """Ctrl-C: exit code 130, and nothing that was started is left."""
    with running(FAULTS, "two_nodes", tmp_path, {"kind": "none", "rank": 9}) as run:
        run.mark("0")
        run.mark("1")
        run.process.send_signal(signal.SIGINT)
        status, err = run.interrupted()
    assert status == 130, err
    assert err.splitlines()[-1] == "firstfault: interrupted"
    assert run.left_over() == []


def test_a_timeout_ends_every_process(tmp_path: Path) -> None:
    """An attempt that takes too long: exit code 4, and nothing that was started is left."""
    with running(FAULTS, "one_node", tmp_path, {"kind": "none", "rank": 9}, "--timeout", "8") as run:
        ended = run.end()
    assert ended.status == 4
    assert (ended.result["status"], ended.attempt["engine"]["job"]) == ("timeout", None)
    assert run.left_over() == []


@pytest.mark.parametrize(("rank", "pod"), [(0, "-master-0"), (1, "-worker-0")])
def test_a_job_with_a_master(tmp_path: Path, rank: int, pod: str) -> None:
    """Without an agent each pod reports for itself; the one that failed first is named, master or worker."""
    with running(FAULTS, "with_master", tmp_path, {"rank": rank}) as run:
        ended = run.end()
    attempt = ended.attempt
    assert ended.status == 10
    assert attempt["verdict"]["ranks"] == [rank]
    assert attempt["verdict"]["node"].endswith(pod)
    assert attempt["verdict"]["victims"]["count"] == 1
    ended.flyte_saw_the_verdict()
