"""Jobs of programs that fail in their teardown: after all ranks had come to their end,
and before.
"""

import json
from pathlib import Path

import pytest

from lab.cascades.cases import Way
from tests.torchrun.nodes import Job, run_job

pytestmark = pytest.mark.jobs

PROGRAM = str(Path(__file__).parent / "teardown.py")
WAY = Way("forked", "c10d", "common")
ONE_EACH = ("--nproc-per-node=1",)


def _run(folder: Path, how: str, *options: str, **variables: str) -> Job:
    """Run a job on two nodes with a rank each, in a common folder."""
    names = {"FIRSTFAULT_JOB": "job", "FIRSTFAULT_EXIT_CODES": "default"}
    environments = dict.fromkeys((0, 1), names | variables)
    return run_job(
        folder,
        [PROGRAM, how],
        WAY,
        options=(*ONE_EACH, *options),
        environments=environments,
    )


@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("atexit", "SIGABRT"),
        ("group", "SIGABRT"),
        ("last", "SIGABRT"),
        ("destructor", "SIGABRT"),
        ("code", "exit code 7"),
    ],
)
def test_a_failure_after_all_programs_ended_stops_the_job(
    tmp_path: Path, how: str, end: str
) -> None:
    """Both nodes print that the job had finished, leave with the code that stops it,
    and restart no worker.
    """
    job = _run(tmp_path, how, "--max-restarts=2")
    assert [node.headline for node in job.nodes] == [
        f"finished, then {end} in the teardown of rank 1"
    ] * 2
    assert [node.code for node in job.nodes] == [93, 93]
    assert "  Retry: no: the job had finished, so its results are there" in job.nodes[0].lines[2]
    written = json.loads(
        (tmp_path / "common" / "job" / "0" / "firstfault" / "verdict.json").read_text()
    )
    assert (written["verdict"]["category"], written["decision"]["action"]) == ("teardown", "stop")
    assert job.left == []


@pytest.mark.parametrize(("mode", "lines"), [("observe", 1), ("off", 0)])
def test_observe_and_off_keep_the_exit_code_of_a_finished_job(
    tmp_path: Path, mode: str, lines: int
) -> None:
    """The exit code stays torchrun's, and the lines still say what happened."""
    job = _run(tmp_path, "atexit", FIRSTFAULT_DECISIONS=mode)
    assert [node.code for node in job.nodes] == [1, 1]
    observed = "  Observed: would have exited with 93 (stop) after attempt 0: the job had finished"
    assert [node.err.count(observed) for node in job.nodes] == [lines, lines]
    assert job.nodes[0].headline.startswith("finished, then SIGABRT")


@pytest.mark.parametrize("how", ["early", "thread", "child", "then"])
def test_a_failure_before_a_programs_end_is_an_ordinary_one(tmp_path: Path, how: str) -> None:
    """Another rank still trains, a part of the program works, or it has more to do:
    an ordinary failure.
    """
    job = _run(tmp_path, how)
    assert [node.code for node in job.nodes] == [1, 1]
    # which of the two is blamed, the rank that aborted or the one that had left before, isn't what
    # this is about
    assert not [
        node.headline
        for node in job.nodes
        if "finished" in node.headline or "teardown" in node.headline
    ]
