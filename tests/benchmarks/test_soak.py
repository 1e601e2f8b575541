"""What the soak makes of samples and verdicts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import soak
from tests.benchmarks.soak import Execution, Fault, Held, Outcome
from tests.waiting import until

NODES = {0: "node-0", 1: "node-1"}


def test_a_plan_has_every_attempt_and_is_repeatable() -> None:
    """All attempts are planned; equal seeds give equal plans, and only the last attempt of a series may succeed."""
    plan = soak.planned(200, 5)
    assert plan == soak.planned(200, 5) != soak.planned(200, 6)
    assert sum(item.attempts for item in plan if not item.has_rounds) == 200
    assert [len(item.faults) for item in plan if item.has_rounds] == [soak.ROUNDS + 1] * 2
    series = [item for item in plan if len(item.faults) > 1]
    assert sum(item.attempts for item in series if not item.has_rounds) == 100
    assert all(fault.kind != "none" for item in series for fault in item.faults[:-1])


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([Held(100_000 + 200 * number, 9 + number % 2, 3) for number in range(20)], ""),
        ([Held(90_000 if number < 2 else 110_000, 9, 3) for number in range(20)], ""),
        ([Held(100_000 + 7_000 * (number > 9), 9, 3) for number in range(20)], ""),
        ([Held(100_000, 9 + number, 3) for number in range(20)], "more files"),
        ([Held(100_000, 9, 3 + number) for number in range(20)], "more threads"),
        ([Held(100_000 + 500 * number, 9, 3) for number in range(20)], "500 KiB more each time"),
        ([Held(100_000 + 10_000 * (number // 3), 9, 3) for number in range(20)], "MiB more in all"),
        ([Held(100_000, 9, 3), Held(200_000, 99, 3)], ""),
    ],
)
def test_growth(samples: list[Held], said: str) -> None:
    """A process that holds more each time is named; warming up, single steps and too few samples are not."""
    found = soak.grown(samples)
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"ranks": [0]}, "ranks [0] instead of [1]"),
        ({"node": "node-0"}, "node node-0 instead of node-1"),
        ({"message": "KeyError: another one"}, "does not say"),
        ({"category": "hang"}, "category hang instead of user_code"),
    ],
)
def test_a_verdict_is_compared(changed: dict[str, Any], said: str) -> None:
    """Rank, node, text and category must be those of the fault."""
    verdict = {"ranks": [1], "node": "node-1", "category": "user_code", "headline": "ValueError, rank 1"}
    verdict |= {"message": "ValueError: asked for: exception", **changed}
    found = soak.wrong_verdict(Fault("exception", 1), {"status": "failed", "verdict": verdict}, NODES)
    assert said in found
    assert bool(found) == bool(said)


def test_a_process_that_remains_is_found(tmp_path: Path) -> None:
    """A process with the run's variables is found with its attempt's number, until it has ended."""
    environment = {**os.environ, "MARKS": str(tmp_path), "FLYTE_ATTEMPT_NUMBER": "7"}
    with subprocess.Popen(["sleep", "1000"], env=environment) as process:
        try:
            # its variables appear in /proc a moment after its start
            until(lambda: list(soak.of_run(tmp_path)) == [process.pid])
            found = soak.processes()[process.pid]
            assert (found.parent, found.command) == (os.getpid(), "sleep 1000")
            assert found.environment["FLYTE_ATTEMPT_NUMBER"] == "7"
            seen = soak.held(process.pid)
            assert seen is not None
            assert seen.threads == 1
        finally:
            process.kill()
    assert soak.of_run(tmp_path) == {}
    assert soak.held(process.pid) is None


def test_the_table() -> None:
    """The table counts right verdicts and leftovers, and shows what a long-lived process held first and last."""
    fault = Fault("exit", 1)
    samples = {"engine": [Held(2048, 9, 3), Held(4096, 8, 2)]}
    good = Outcome(Execution("forked", (fault, Fault("none", 0))), samples=samples)
    left = {"folder firstfault-x": "after the end"}
    bad = Outcome(Execution("forked", (fault,)), wrong=[(fault, "no verdict")], left=left)
    lines = "\n".join(soak.report([good, bad], {"torchelastic_*": 3}))
    rows = {line.split()[0]: line.split()[1:] for line in lines.splitlines() if line}
    assert (rows["exit"], rows["none"], rows["all"]) == (["2", "1"], ["1", "1"], ["3", "2"])
    assert rows["engine"] == ["2", "2.0", "4.0", "9", "8", "3", "2"]
    assert "process 0, zombie 0, socket 0, folder 1" in lines
    assert "torchelastic_* 3" in lines
    assert bad.problems() == ["exit@1: no verdict", "folder firstfault-x after the end"]
