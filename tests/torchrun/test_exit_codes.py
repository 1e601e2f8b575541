"""Exit codes for schedulers, and what the program of the next attempt can read."""

import json
import os
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from firstfault_torch.torchrun.exit_codes import parse_exit_codes
from lab.cascades.cases import Way
from tests.torchrun.nodes import Job, run_job

pytestmark = pytest.mark.jobs

FAULTY = str(Path(__file__).parent / "faulty.py")
FLAKY = str(Path(__file__).parent / "flaky.py")
"""Needs no torch, whose import takes longer than the remaining job."""
WAY = Way("forked", "c10d", "common")


LONG_STEPS, LONG_S = 620, 800
"""Steps of a second each: more than the 10 minutes of training that are progress;
and a limit for the whole job.
"""


def _run(
    folder: Path, fault: str, attempt: int = 0, program: str = FAULTY, **variables: str
) -> Job:
    """Run an attempt of a job on two nodes with a rank each, in a common folder."""
    names = {
        "FIRSTFAULT_JOB": "job",
        "FIRSTFAULT_ATTEMPT": str(attempt),
        "FIRSTFAULT_EXIT_CODES": "default",
    }
    environments = dict.fromkeys((0, 1), names | variables)
    options = ("--nproc-per-node=1",)
    return run_job(
        folder,
        [program, fault],
        WAY,
        options=options,
        environments=environments,
        longest_s=LONG_S,
    )


def test_all_nodes_exit_with_the_code_that_stops_the_job_after_a_bug(tmp_path: Path) -> None:
    """All nodes leave with the code that stops the job, whichever of them failed."""
    job = _run(tmp_path, "bug", program=FLAKY)
    assert [node.code for node in job.nodes] == [93, 93]
    written = json.loads(
        (tmp_path / "common" / "job" / "0" / "firstfault" / "verdict.json").read_text()
    )
    assert (written["decision"]["action"], written["decision"]["failed_starts"]) == ("stop", 1)


def test_the_same_fault_twice_without_progress_stops_the_job(tmp_path: Path) -> None:
    """A recoverable exception runs again once; the program of the next attempt can read why
    the one before failed.
    """
    assert [node.code for node in _run(tmp_path, "recoverable").nodes] == [75, 75]
    again = _run(tmp_path, "recoverable", 1)
    assert [node.code for node in again.nodes] == [93, 93]
    assert "trained less than 10 minutes" in again.nodes[0].err
    told = _run(tmp_path, "previous", 2, FLAKY).nodes[0].headline
    assert '"attempt": 1' in told
    assert "the queue is full" in told


@pytest.mark.skipif(
    not os.environ.get("FIRSTFAULT_LONG"), reason="trains for 10 minutes: `make progress`"
)
@pytest.mark.timeout(LONG_S * 2)
def test_the_same_fault_after_progress_continues(tmp_path: Path) -> None:
    """The same fault as before doesn't stop a job that has trained for 10 minutes in between."""
    assert [node.code for node in _run(tmp_path, "recoverable").nodes] == [75, 75]
    assert [
        node.code for node in _run(tmp_path, "recoverable", 1, TRAIN_STEPS=str(LONG_STEPS)).nodes
    ] == [75, 75]


@pytest.mark.parametrize(
    ("mode", "lines", "warnings"), [("observe", 1, 0), ("obsrve", 1, 1), ("off", 0, 0)]
)
def test_observe_and_off_keep_torchruns_exit_code(
    tmp_path: Path, mode: str, lines: int, warnings: int
) -> None:
    """All nodes leave with torchrun's code; "observe" prints what would have happened,
    as does a misspelled value.
    """
    job = _run(tmp_path, "bug", program=FLAKY, FIRSTFAULT_DECISIONS=mode)
    assert [node.code for node in job.nodes] == [1, 1]
    observed = "  Observed: would have exited with 93 (stop) after attempt 0: "
    warning = f"firstfault: FIRSTFAULT_DECISIONS must be off, observe or act, not '{mode}'"
    assert [node.err.count(observed) for node in job.nodes] == [lines, lines]
    assert [node.err.count(warning) for node in job.nodes] == [warnings, warnings]


def test_an_unknown_cause_is_left_to_the_scheduler(tmp_path: Path) -> None:
    """A process that was killed by somebody unknown leaves with torchrun's own exit code."""
    assert [node.code for node in _run(tmp_path, "kill", program=FLAKY).nodes] == [1, 1]


@pytest.mark.parametrize(
    "text", ["", "retry", "retry:75,", "retry:75,stop:0", "stop:256", "often:3", "slurm"]
)
def test_a_bad_list_of_exit_codes_is_refused(text: str) -> None:
    """A list that names no code, an unknown action or a code that no
    process can have is refused.
    """
    with pytest.raises(
        ArgumentTypeError, match="must be default, pytorchjob, or codes from 1 to 255"
    ):
        parse_exit_codes(text)
