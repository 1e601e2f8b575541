"""``firstfault requeue`` in jobs of a real Slurm with the nodes gpu-a and gpu-b
(tools/start_slurm.sh).
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.ports import get_free_port

ROOT = Path(__file__).parents[2]
FAULTY = ROOT / "tests" / "torchrun" / "faulty.py"
CONFIGURATION = Path(os.environ.get("SLURM_CONF") or ROOT / "build" / "slurm" / "slurm.conf")
CLOCK_TICK_S = 1
"""Credentials of Slurm are dated in whole seconds."""
LONGEST_S = 180
TORCHRUN = (
    "torchrun --nnodes $SLURM_NNODES --nproc-per-node 1 --rdzv-backend c10d --local-addr 127.0.0.1"
    " --rdzv-endpoint 127.0.0.1:{port} --rdzv-conf is_host=$((SLURM_NODEID == 0)) --rdzv-id"
    " $SLURM_JOB_ID {program} {fault}"
)
SCRIPT = """#!/bin/bash
export FIRSTFAULT_FOLDER={folder}/ff MARKS={folder} OMP_NUM_THREADS=1 FIRSTFAULT_EXIT_CODES=default
export XDG_STATE_HOME={folder}/state
srun --kill-on-bad-exit=1 bash -c {train}
code=$?
echo "srun returned $code" >>{folder}/log
trap '' TERM
{firstfault} requeue {options} 2>>{folder}/log
echo "requeue returned $?" >>{folder}/log
"""

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(not CONFIGURATION.exists(), reason="needs tools/start_slurm.sh, as root"),
]


def slurm(*command: str, check: bool = True) -> str:
    """Run a command of Slurm."""
    environment = {**os.environ, "SLURM_CONF": str(CONFIGURATION)}
    return subprocess.run(
        command,
        env=environment,
        check=check,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


class Job(NamedTuple):
    """A job that trains with a fault, and then asks for a requeue."""

    id: str
    log: Path  # what its script writes

    def fields(self, task: str = "") -> str:
        """Return what Slurm knows of the job, or of one task of an array."""
        return slurm("scontrol", "-o", "show", "job", f"{self.id}{task}")

    def wait(self, text: str, where: Callable[[], str] | None = None) -> str:
        """Return what `where` returns, by default what the job's script wrote,
        once it has a text.
        """
        where = where or (lambda: self.log.read_text() if self.log.exists() else "")
        deadline = time.monotonic() + LONGEST_S
        while text not in (found := where()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert text in found
        return found

    def start_now(self) -> None:
        """Start the requeued job at once. Slurm refuses that until the last
        start has been cleaned up.

        A machine refuses a job's credential if it was made in the second in which the last start
        ended, or before.
        """
        self.wait("Reason=BeginTime", self.fields)  # that start has ended
        time.sleep(2 * CLOCK_TICK_S)
        update = ("scontrol", "update", f"JobId={self.id}", "StartTime=now")
        self.wait("JobState=RUNNING", lambda: slurm(*update, check=False) + self.fields())


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return a function that submits a job with a fault; those that are left are cancelled."""
    made: list[str] = []
    firstfault = f"{shlex.quote(sys.executable)} -m firstfault"

    def start(fault: str, options: str = "", *sbatch: str) -> Job:
        train = shlex.quote(
            f"exec {firstfault}"
            f" {TORCHRUN.format(port=get_free_port(), program=FAULTY, fault=fault)}"
        )
        script = tmp_path / "job.sh"
        script.write_text(
            SCRIPT.format(folder=tmp_path, train=train, firstfault=firstfault, options=options)
        )
        given = [
            "-N2",
            "--ntasks-per-node=1",
            f"--output={tmp_path}/out",
            "--open-mode=append",
            "--requeue",
            *sbatch,
        ]
        made.append(slurm("sbatch", "--parsable", *given, str(script)).strip())
        return Job(made[-1], tmp_path / "log")

    yield start
    for job in made:
        slurm("scancel", job)


def test_a_bug_is_not_requeued(submit: Callable[..., Job]) -> None:
    """All nodes leave with the code of the decision, and the job isn't requeued."""
    job = submit("bug")
    first, second, last = job.wait("requeue returned").splitlines()
    assert second.startswith(f"firstfault: job {job.id} stops: ")
    assert (first, last) == ("srun returned 93", "requeue returned 1")


def test_a_recoverable_exception_is_requeued_once(
    submit: Callable[..., Job], tmp_path: Path
) -> None:
    """The second start fails with the same fault, on the same machine and without progress,
    so the job stops.
    """
    job = submit("recoverable", "--max 3", "-N1", "--nodelist=gpu-a")
    assert "Restarts=1" in job.wait("Comment=firstfault: RecoverableError, rank 0 on ", job.fields)
    job.start_now()
    lines = job.wait("requeue returned 1").splitlines()
    assert (lines[0], lines[-3]) == ("srun returned 75", "srun returned 93")
    assert "is requeued: RecoverableError was raised as recoverable" in lines[1]
    assert (
        "stops: the previous attempt failed with the same fault, and this one trained less than 10 minutes"
        in lines[-2]
    )
    assert json.loads((tmp_path / "ff" / job.id / f"requeues-{job.id}.json").read_text()) == {
        "starts": [0]
    }


def test_a_faulty_machine_is_excluded(submit: Callable[..., Job]) -> None:
    """A machine with a proven fault of its GPU is excluded from the job's next start,
    if another one is left.
    """
    job = submit("ecc", "--exclude-bad-node", "-N1", "--comment=mine")
    assert "Comment=mine" in job.wait("ExcNodeList=gpu-", job.fields)
    job.wait("Restarts=1", job.fields)


def test_only_the_failed_task_of_an_array_is_requeued(submit: Callable[..., Job]) -> None:
    """Only the task that failed is requeued."""
    job = submit("recoverable", "", "--array=1-2%1")
    assert f"firstfault: job {job.id}_1 is requeued" in job.wait("requeued")
    job.wait("Restarts=1", partial(job.fields, "_1"))
    assert "Restarts=0" in job.fields("_2")


def test_observe_requeues_nothing(submit: Callable[..., Job]) -> None:
    """In the mode "observe" nothing is requeued."""
    lines = submit("recoverable", "--decisions observe").wait("requeue returned").splitlines()
    assert lines[1].startswith("firstfault: observed: would have requeued job ")
    assert lines[2:] == ["requeue returned 3"]


def test_slurms_refusal_is_one_line_with_its_reason(submit: Callable[..., Job]) -> None:
    """A job that may not be requeued isn't, and one line gives Slurm's reason."""
    lines = submit("recoverable", "", "--no-requeue").wait("requeue returned").splitlines()
    assert "scontrol requeue: " in lines[-2]
    assert lines[-1] == "requeue returned 1"


FALLBACK = re.compile(r"^  if \[ \$\? = 3 \].*?^  fi$", re.MULTILINE | re.DOTALL)
PAGE = ROOT / "docs" / "guides" / "schedulers.md"


@pytest.mark.parametrize(
    ("fails", "line", "options"),
    [
        ("false", "no verdict on its start", ()),
        ("false", "no verdict on its start", ("--array=1",)),
        (
            f"{shlex.quote(sys.executable)} -m firstfault torchrun --local-addr 127.0.0.1 {FAULTY} recoverable",
            "observed: would ",
            (),
        ),
    ],
    ids=["job", "array", "observed"],
)
def test_the_documented_fallback_requeues_up_to_its_limit(
    tmp_path: Path, fails: str, line: str, options: tuple[str, ...]
) -> None:
    """The lines of the page requeue a job on which firstfault decides nothing,
    up to a limit: here once.
    """
    [fallback] = FALLBACK.findall(PAGE.read_text(encoding="utf-8"))
    assert "-lt 3 ]" in fallback
    lines = [
        "#!/bin/bash",
        f"export XDG_STATE_HOME={tmp_path}/state FIRSTFAULT_FOLDER={tmp_path}/ff",
        f"export MARKS={tmp_path} OMP_NUM_THREADS=1 FIRSTFAULT_DECISIONS=observe",
        f"srun --kill-on-bad-exit=1 {fails} || {{",
        "  trap '' TERM",
        f"  {shlex.quote(sys.executable)} -m firstfault requeue 2>>{tmp_path}/log",
        fallback.replace("-lt 3 ]", "-lt 1 ]"),
        f"  echo end $SLURM_RESTART_COUNT >>{tmp_path}/log",
        "}",
    ]
    script = tmp_path / "job.sh"
    script.write_text("\n".join(lines))
    given = (f"--output={tmp_path}/out", "--open-mode=append", "--requeue", "-N1", *options)
    job = Job(slurm("sbatch", "--parsable", *given, str(script)).strip(), tmp_path / "log")
    try:
        job.wait("Restarts=1", job.fields)
        job.start_now()
        assert job.wait("end 1").count(line) == 2
        assert "Restarts=1" in job.fields()
    finally:
        slurm("scancel", job.id)
