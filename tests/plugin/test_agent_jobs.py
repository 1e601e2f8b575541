"""Jobs of several nodes, rounds and attempts through the command line: real pods, real workers, real faults."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from firstfault import MultiErrorFileOutputReader
from firstfault.model import Phase, Writer

if TYPE_CHECKING:
    from collections.abc import Callable

    from firstfault.model import JobErrors

pytestmark = pytest.mark.jobs

TRAINING = Path(__file__).parent / "jobs" / "training.py"
LONG_S = 120.0


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    code: int
    stderr: str
    result: dict[str, Any]

    @property
    def attempt(self) -> dict[str, Any]:
        """The last attempt."""
        last: dict[str, Any] = self.result["attempts"][-1]
        return last

    @property
    def verdict(self) -> dict[str, Any]:
        """The last attempt's verdict."""
        verdict: dict[str, Any] = self.attempt["verdict"]
        return verdict

    @property
    def prefix(self) -> Path:
        """The last attempt's output prefix."""
        return Path(self.attempt["errors"]).parents[1]

    @property
    def job(self) -> JobErrors:
        """What our reader makes of the last attempt."""
        return MultiErrorFileOutputReader(str(self.prefix)).job()

    @property
    def seen(self) -> dict[str, Any] | None:
        """What stock Flyte would have read at the moment the job ended; the same as the verdict, if there is one."""
        seen: dict[str, Any] | None = self.attempt["engine"]["error_seen"]
        assert self.attempt["engine"]["job"] == "Succeeded"
        if seen is not None and self.verdict is not None:
            decision = self.attempt["decision"]
            assert seen["code"] == self.verdict["code"]
            assert seen["worker"] == self.verdict["node"]
            assert seen["timestamp"] == self.verdict["timestamp"]
            assert (seen["kind"], seen["origin"]) == (decision["kind"], decision["origin"])
            assert decision["enforced"]
        return seen


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    """Run a task of the training module to its end."""

    def complete(task: str, *options: str, **inputs: Any) -> Run:
        command = [sys.executable, "-m", "firstfault", "run", str(TRAINING), task, "--json", "--store", str(tmp_path)]
        process = subprocess.Popen(
            [*command, "--inputs", json.dumps(inputs), *options],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=LONG_S)
        finally:
            if process.poll() is None:
                process.terminate()  # it ends its pods, which a kill would leave behind
                process.communicate()
        assert out, err
        return Run(process.returncode, err, json.loads(out.splitlines()[-1]))

    return complete


# --- deaths without a word ------------------------------------------------------------------------------------------


def test_a_worker_is_killed(run: Callable[..., Run]) -> None:
    """A worker that SIGKILL ends is named by its agent with rank, node, signal and exit code; the rest are victims."""
    ended = run("spawned", kind="SIGKILL")
    verdict = ended.verdict
    (root,) = [failure for failure in ended.job.failures if failure.rank == 3]
    assert ended.code == 10
    assert (verdict["scope"], verdict["ranks"]) == ("rank", [3])
    assert (verdict["category"], verdict["code"]) == ("signal", "USER:SIGKILL")
    assert verdict["victims"]["count"] == 3, ended.job.failures
    assert verdict["coverage"]["complete"]
    assert root.writer is Writer.AGENT
    assert (root.signal, root.exit_code, root.exception) == ("SIGKILL", -9, None)
    # which pod is which node is the rendezvous' to decide
    assert verdict["node"] == root.node == root.worker
    assert "-worker-" in root.node
    assert ended.seen is not None
    assert "signal: SIGKILL: killed from outside" in ended.seen["message"]


def test_a_worker_exits(run: Callable[..., Run]) -> None:
    """A worker that leaves by itself is named with its exit code, also where each pod has an error file of its own."""
    ended = run("forked", "--env", "_F_DES=Earliest", kind="exit")
    (root,) = [failure for failure in ended.job.failures if failure.rank == 3]
    assert ended.code == 10
    assert (ended.verdict["ranks"], ended.verdict["category"]) == ([3], "exit")
    assert (root.exit_code, root.signal, root.writer) == (3, "", Writer.AGENT)
    assert ended.seen is not None
    assert not (ended.prefix / "error.pb").exists()
    assert len(list(ended.prefix.glob("error-*.pb"))) == 2, "one of each pod"


# --- rounds and attempts --------------------------------------------------------------------------------------------

# torch 2.13 shares one store among all rounds, in which gloo finds the addresses of the round before (pytorch#135712)
A_STORE_EACH = ("--env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")


def test_a_round_that_is_recovered_from(run: Callable[..., Run]) -> None:
    """A fault that a restart of the workers gets over is history: the job succeeds, and its document is kept."""
    ended = run("restarted", *A_STORE_EACH, kind="plain", rounds=1)
    assert ended.code == 0
    assert ended.result["outputs"] == {"o0": 8.0}
    assert ended.verdict is None
    assert ended.attempt["decision"] is None
    assert ended.seen is None
    job = ended.job
    assert job.failures == ()
    assert job.round == 1
    assert {failure.place.round for failure in job.history} == {0}
    assert "bad batch on rank 1" in next(failure for failure in job.history if failure.rank == 1).message


def test_a_fault_that_comes_back(run: Callable[..., Run]) -> None:
    """When the restarts are used up, the last round is judged, by its own documents."""
    ended = run("restarted", *A_STORE_EACH, kind="plain", rounds=2)
    assert ended.code == 10
    assert ended.verdict["ranks"] == [1]
    assert "bad batch on rank 1" in ended.verdict["headline"]
    assert ended.seen is not None
    job = ended.job
    assert job.round == 1
    assert {failure.place.round for failure in job.failures} == {1}
    assert {failure.place.round for failure in job.history} == {0}
    assert min(failure.timestamp_ns for failure in job.failures) > max(failure.timestamp_ns for failure in job.history)


def test_an_attempt_that_is_retried(run: Callable[..., Run]) -> None:
    """A recoverable fault is retried on the task's own budget; the second attempt succeeds and is the run's result."""
    ended = run("retried", kind="recoverable")
    first, second = ended.result["attempts"]
    assert ended.code == 0
    assert (first["status"], second["status"]) == ("failed", "succeeded")
    assert first["verdict"]["category"] == "recoverable"
    assert first["verdict"]["headline"].startswith("LostShardError, rank 1 on ")
    assert first["decision"]["retry"]
    assert first["engine"]["error_seen"]["kind"] == "RECOVERABLE"
    assert first["engine"]["error_seen"]["origin"] == "USER"
    assert second["verdict"] is None
    assert ended.result["outputs"] == {"o0": 8.0}
    assert "retry 1 of 1 on the user's budget" in ended.stderr


def test_success(run: Callable[..., Run]) -> None:
    """A job that succeeds has rank 0's outputs, no error documents, and a roster that says that all nodes are done."""
    ended = run("forked")
    assert ended.code == 0
    assert ended.result["outputs"] == {"o0": 16.0}
    assert ended.seen is None
    assert not list(ended.prefix.glob("firstfault/errors/*"))
    assert not list(ended.prefix.glob("error*"))
    entries = ended.job.roster
    assert {entry.place.group_rank for entry in entries if entry.phase is Phase.JOINED} == {0, 1}
    assert {entry.place.group_rank for entry in entries if entry.phase is Phase.SUCCEEDED} == {0, 1}
    assert {rank for entry in entries for rank in entry.ranks} == {0, 1, 2, 3}
