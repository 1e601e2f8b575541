"""Restarts of a torchrun job: torch's, unless a proof speaks against one."""

from pathlib import Path

import pytest

from lab.cascades.cases import Way
from tests.torchrun.nodes import Node, run_job

pytestmark = pytest.mark.jobs

FLAKY = str(Path(__file__).parent / "flaky.py")


def _run(folder: Path, *faults: str, mode: str = "act") -> Node:
    """Run a job of two ranks whose rank 1 fails in each round as its argument asks."""
    variables = {
        "FIRSTFAULT_JOB": "job",
        "FIRSTFAULT_DECISIONS": mode,
        "FIRSTFAULT_EXIT_CODES": "default",
    }
    job = run_job(
        folder,
        [FLAKY, *faults],
        Way("forked", "c10d", "common"),
        nodes=1,
        options=[f"--max-restarts={len(faults)}", "--monitor-interval=0.1"],
        environments={0: variables},
    )
    assert job.left == []
    return job.nodes[0]


def test_a_program_that_works_in_a_later_round_succeeds(tmp_path: Path) -> None:
    """After a kill, an exit and exceptions that may be temporary,
    torch restarts while max_restarts are left.
    """
    ended = _run(tmp_path, "runtime", "kill", "kill", "exit")
    assert (ended.code, ended.out.count("worked in round 4")) == (0, 2), ended.err


@pytest.mark.parametrize(
    ("mode", "code", "lines"),
    [("act", 93, 0), ("observe", 0, 1), ("off", 0, 0)],
    ids=["act", "observe", "off"],
)
def test_a_certain_bug_gets_no_restart(mode: str, code: int, lines: int, tmp_path: Path) -> None:
    """A certain bug gets no restart in the mode "act"; "observe" only prints that,
    and "off" doesn't.
    """
    ended = _run(tmp_path, "bug", mode=mode)
    assert ended.code == code, ended.err
    assert (
        ended.err.count("observed: would not have restarted the workers: a TypeError is a bug")
        == lines
    )
    assert ended.out.count("worked in round 1") == (0 if code else 2)


def test_a_repeated_fault_without_progress_gets_no_restart(tmp_path: Path) -> None:
    """The same exception at the same place in the next round is a proof:
    the last restart isn't used.
    """
    ended = _run(tmp_path, "value", "value")
    assert ended.code == 1, "a scheduler may still run the job again"
    assert (
        "the previous round failed with the same fault, and this one trained less than 10 minutes"
        in ended.err
    )
    assert "\n  Before: 1 restart of the workers in this attempt\n" in ended.err
