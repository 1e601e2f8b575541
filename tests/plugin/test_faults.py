"""Deaths without a word, signals from outside, a store that fails: real pods, through the command line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

FAULTS = Path(__file__).parent / "matrix" / "faults.py"
DEADLINE_S = 90

pytestmark = pytest.mark.jobs


@dataclass(frozen=True)
class Running:
    """A `firstfault run` that goes on, and the folder in which its workers leave their marks."""

    process: subprocess.Popen[str]
    marks: Path

    def worker(self, rank: int) -> dict[str, int]:
        """Wait until the worker of this rank runs; return its own process id and its agent's."""
        path = self.marks / f"{rank}.json"
        deadline = time.monotonic() + DEADLINE_S
        while not path.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"rank {rank} never came up"
            time.sleep(0.02)
        found: dict[str, int] = json.loads(path.read_text())
        return found

    def end(self) -> tuple[int, dict[str, Any], str]:
        """Wait for the end; return the exit code, the JSON object and stderr."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, json.loads(out.splitlines()[-1]) if out else {}, err

    def left_over(self) -> list[str]:
        """Return the command lines of processes of this run that still run, by a variable in their environment."""
        found = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"MARKS={self.marks}\0" in environment.read_text(errors="replace") + "\0":
                    found.append((environment.parent / "cmdline").read_text().replace("\0", " "))
        return [line for line in found if line]


@contextlib.contextmanager
def running(folder: Path, task: str, inputs: dict[str, Any], *options: str) -> Iterator[Running]:
    """Start a run without retries; end it if the test does not."""
    marks = folder / "marks"
    marks.mkdir()
    arguments = [sys.executable, "-m", "firstfault", "run", str(FAULTS), task, "--store", str(folder / "store")]
    arguments += ["--inputs", json.dumps(inputs), "--json", "--retries", "0", "--system-retries", "0"]
    process = subprocess.Popen(
        [*arguments, "--env", f"MARKS={marks}", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield Running(process, marks)
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate()


def _same_as_flyte(attempt: dict[str, Any]) -> None:
    """What stock Flyte read when the job ended is the verdict."""
    seen, verdict, decision = attempt["engine"]["error_seen"], attempt["verdict"], attempt["decision"]
    assert attempt["engine"]["job"] == "Succeeded"
    assert (seen["code"], seen["worker"], seen["timestamp"]) == (verdict["code"], verdict["node"], verdict["timestamp"])
    assert (seen["kind"], seen["origin"]) == (decision["kind"], decision["origin"])


@pytest.mark.parametrize(
    ("kind", "code", "category", "exit_code"),
    [("kill", "USER:SIGKILL", "signal", "exit code: -9 (SIGKILL)"), ("exit", "USER:ExitCode", "exit", "exit code: 3")],
)
def test_a_death_without_a_word(tmp_path: Path, kind: str, code: str, category: str, exit_code: str) -> None:
    """The agent's document names signal or exit code, rank and node; the sibling that it stopped is a victim."""
    with running(tmp_path, "one_node", {"kind": kind, "rank": 1}) as run:
        status, result, _ = run.end()
    (attempt,) = result["attempts"]
    verdict = attempt["verdict"]
    assert status == 10
    assert (verdict["ranks"], verdict["code"], verdict["category"]) == ([1], code, category)
    assert verdict["node"].endswith("-n0-0")
    assert "stopped by its agent (SIGTERM)" in verdict["victims"]["ranks"]["0"]
    assert exit_code in attempt["engine"]["error_seen"]["message"]
    assert attempt["seconds"]["fault_to_durable"] > 0
    _same_as_flyte(attempt)
    assert run.left_over() == []


def test_an_exit_with_a_code_is_named(tmp_path: Path) -> None:
    """sys.exit(5) in the training is a failure of that rank."""
    with running(tmp_path, "one_node", {"kind": "sys.exit", "rank": 0}) as run:
        _, result, _ = run.end()
    verdict = result["attempts"][0]["verdict"]
    assert verdict["ranks"] == [0]
    assert verdict["headline"].startswith("SystemExit, rank 0")


def test_a_store_that_fails_does_not_hide_the_exception(tmp_path: Path) -> None:
    """The attempt ends with the user's own exception, and that its document was lost is said."""
    with running(tmp_path, "one_node", {"kind": "store", "rank": 1}) as run:
        status, result, _ = run.end()
    (attempt,) = result["attempts"]
    seen = attempt["engine"]["error_seen"]
    assert status == 10
    assert "ValueError: asked for: store" in seen["message"]
    assert "rank 1" in seen["message"].splitlines()[0]
    assert "could not be looked at" in seen["message"] or "was not uploaded" in seen["message"]
    assert attempt["verdict"]["ranks"] == [1]
    assert not attempt["verdict"]["coverage"]["complete"]


def test_a_node_that_is_told_to_go(tmp_path: Path) -> None:
    """SIGTERM to the agent leaves a verdict, not an exit without a word: preempted, on the system's budget."""
    with running(tmp_path, "one_node", {"kind": "none", "rank": 9}) as run:
        os.kill(run.worker(1)["agent"], signal.SIGTERM)
        status, result, _ = run.end()
    (attempt,) = result["attempts"]
    assert status == 11
    assert (attempt["verdict"]["scope"], attempt["verdict"]["category"]) == ("external", "preemption")
    assert (attempt["decision"]["retry"], attempt["decision"]["origin"]) == (True, "SYSTEM")
    _same_as_flyte(attempt)
    assert run.left_over() == []


def test_an_agent_that_is_killed(tmp_path: Path) -> None:
    """Its workers say that the agent died; the job fails, Flyte reads nothing, so the decision is advice."""
    with running(tmp_path, "one_node", {"kind": "none", "rank": 9}) as run:
        run.worker(0)
        os.kill(run.worker(1)["agent"], signal.SIGKILL)
        status, result, _ = run.end()
    (attempt,) = result["attempts"]
    assert status == 11
    assert attempt["engine"] == {"job": "Failed", "error_seen": None}
    assert (attempt["verdict"]["scope"], attempt["verdict"]["category"]) == ("node", "node_lost")
    assert (attempt["decision"]["retry"], attempt["decision"]["enforced"]) == (True, False)
    assert run.left_over() == []


def test_switched_off(tmp_path: Path) -> None:
    """An empty variable leaves plain torch elastic: stock files, none of ours."""
    options = ("--env", "FLYTE_INTERNAL_ERROR_PROPAGATION=")
    with running(tmp_path, "one_node", {"kind": "raise", "rank": 1}, *options) as run:
        status, result, _ = run.end()
    (attempt,) = result["attempts"]
    assert status == 10
    assert "asked for: raise" in attempt["engine"]["error_seen"]["message"]
    assert attempt["engine"]["error_seen"]["message"].startswith("Trace:")
    assert list((tmp_path / "store").glob("*/0/firstfault")) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_an_interrupt_ends_every_process(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, or a terminal that closes: exit code 130, and nothing that was started is left."""
    with running(tmp_path, "two_nodes", {"kind": "none", "rank": 9}) as run:
        run.worker(0)
        run.worker(1)
        run.process.send_signal(number)
        status, _, err = run.end()
    assert status == 130, err
    assert err.splitlines()[-1] == "firstfault: interrupted"
    assert run.left_over() == []


def test_a_timeout_ends_every_process(tmp_path: Path) -> None:
    """An attempt that takes too long: exit code 4, and nothing that was started is left."""
    with running(tmp_path, "one_node", {"kind": "none", "rank": 9}, "--timeout", "8") as run:
        status, result, _ = run.end()
    assert status == 4
    assert (result["status"], result["attempts"][0]["engine"]["job"]) == ("timeout", None)
    assert run.left_over() == []


@pytest.mark.parametrize(("rank", "pod"), [(0, "-master-0"), (1, "-worker-0")])
def test_a_job_with_a_master(tmp_path: Path, rank: int, pod: str) -> None:
    """Without an agent each pod reports for itself; the one that failed first is named, master or worker."""
    with running(tmp_path, "with_master", {"rank": rank}) as run:
        status, result, _ = run.end()
    (attempt,) = result["attempts"]
    assert status == 10
    assert attempt["verdict"]["ranks"] == [rank]
    assert attempt["verdict"]["node"].endswith(pod)
    assert attempt["verdict"]["victims"]["count"] == 1
    _same_as_flyte(attempt)
