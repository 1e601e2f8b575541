"""``firstfault requeue`` in jobs of a real Slurm with the nodes gpu-a and gpu-b (tools/start_slurm.sh)."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.utils.distributed import get_free_port

ROOT = Path(__file__).parents[2]
FAULTY = ROOT / "tests" / "torchrun" / "faulty.py"
CONFIGURATION = Path(os.environ.get("SLURM_CONF") or ROOT / "build" / "slurm" / "slurm.conf")
LONGEST_S = 90
TORCHRUN = (
    "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --local-addr 127.0.0.1 --rdzv-endpoint 127.0.0.1:{port}"
    " --rdzv-conf is_host=$((SLURM_NODEID == 0)) --rdzv-id $SLURM_JOB_ID {program} {fault}"
)
SCRIPT = """#!/bin/bash
export FIRSTFAULT_FOLDER={folder}/ff MARKS={folder} OMP_NUM_THREADS=1 FIRSTFAULT_EXIT_CODES=default
srun --kill-on-bad-exit=1 bash -c {train}
code=$?
echo "srun left with $code" >>{folder}/told
{firstfault} requeue {options} 2>>{folder}/told
echo "requeue left with $?" >>{folder}/told
"""

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(not CONFIGURATION.exists(), reason="needs tools/start_slurm.sh, as root"),
]


class Job:
    """A job that trains with a fault, and then asks for a requeue."""

    def __init__(self, folder: Path, fault: str, options: str = "", **sbatch: str) -> None:
        firstfault = f"{shlex.quote(sys.executable)} -m firstfault"
        train = TORCHRUN.format(port=get_free_port(), program=FAULTY, fault=fault)
        script, self._told = folder / "job.sh", folder / "told"
        script.write_text(
            SCRIPT.format(
                folder=folder, train=shlex.quote(f"exec {firstfault} {train}"), firstfault=firstfault, options=options
            )
        )
        given = [
            f"--{name.replace('_', '-')}={value}" if value else f"--{name.replace('_', '-')}"
            for name, value in ({"requeue": ""} | sbatch).items()
        ]
        command = ["--parsable", "-N2", "--ntasks-per-node=1", f"--output={folder}/out", "--open-mode=append", *given]
        self.id = slurm("sbatch", *command, str(script)).strip()

    def fields(self, task: str = "") -> str:
        """Return what Slurm knows of the job."""
        return slurm("scontrol", "-o", "show", "job", f"{self.id}{task}")

    def wait(self, for_text: str) -> list[str]:
        """Return the lines that the job's script wrote, once they have a text."""
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline:
            told = self._told.read_text().splitlines() if self._told.exists() else []
            if any(for_text in line for line in told):
                return told
            time.sleep(0.2)
        raise AssertionError(f"no {for_text!r} after {LONGEST_S} s")

    def start_now(self) -> None:
        """Start the requeued job, which Slurm would do two minutes later.

        Slurm takes the new time only once the job's last start has been cleaned up, which nothing shows.
        """
        deadline = time.monotonic() + LONGEST_S
        while "JobState=RUNNING" not in self.fields() and time.monotonic() < deadline:
            slurm("scontrol", "update", f"JobId={self.id}", "StartTime=now", check=False)  # it may have started
            time.sleep(0.5)

    def wait_for(self, field: str) -> str:
        """Return what Slurm knows of the job, once that has a text."""
        deadline = time.monotonic() + LONGEST_S
        while field not in (known := self.fields()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert field in known
        return known


def slurm(*command: str, check: bool = True) -> str:
    """Run a command of Slurm."""
    environment = {**os.environ, "SLURM_CONF": str(CONFIGURATION)}
    return subprocess.run(command, env=environment, check=check, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[type[Job]]:
    """Return the class of jobs; those that are left are cancelled."""
    made: list[str] = []

    class Submitted(Job):
        def __init__(self, fault: str, options: str = "", **sbatch: str) -> None:
            super().__init__(tmp_path, fault, options, **sbatch)
            made.append(self.id)

    yield Submitted  # type: ignore[misc]
    for job in made:
        slurm("scancel", job)


def test_a_bug_stops(submit: type[Job]) -> None:
    """All nodes leave with the code of the decision, and the job isn't requeued."""
    job = submit("raise")
    told = job.wait("requeue left")
    assert told == [
        "srun left with 93",
        f"firstfault: job {job.id} stops: the same code would probably fail again",
        "requeue left with 1",
    ]


def test_a_recoverable_exception_is_requeued_once(submit: type[Job], tmp_path: Path) -> None:
    """The second start fails with the same fault and without progress, so the job stops."""
    job = submit("recoverable", "--max 3")
    known = job.wait_for("Restarts=1")
    assert "Comment=RecoverableError, rank 1 on " in known
    job.start_now()
    told = job.wait("requeue left")
    assert told[0] == "srun left with 75"
    assert "is requeued: RecoverableError was raised as recoverable" in told[1]
    assert told[-3] == "srun left with 93"
    assert "stops: the previous attempt failed with the same fault, and this one made no progress" in told[-2]
    assert json.loads((tmp_path / "ff" / job.id / "requeues.json").read_text()) == {"count": 1}


def test_a_faulty_machine_is_excluded(submit: type[Job]) -> None:
    """A machine with a proven fault of its GPU is in the list of nodes that the job must not use."""
    job = submit("ecc", "--exclude-bad-node", comment="mine")
    known = job.wait_for("Restarts=1")
    assert "ExcNodeList=gpu-" in known
    assert "Comment=mine" in known


def test_one_task_of_an_array(submit: type[Job]) -> None:
    """Only the task that failed is requeued."""
    job = submit("recoverable", array="1-2%1")
    told = job.wait("requeued")
    assert f"firstfault: job {job.id}_1 is requeued" in told[1]
    deadline = time.monotonic() + LONGEST_S
    while "Restarts=1" not in job.fields("_1") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "Restarts=1" in job.fields("_1")
    assert "Restarts=0" in job.fields("_2")


def test_observed(submit: type[Job]) -> None:
    """In the mode "observe" nothing is requeued."""
    told = submit("recoverable", "--decisions observe").wait("requeue left")
    assert told[1].startswith("firstfault would have done this: job ")
    assert told[2:] == ["requeue left with 1"]


def test_slurm_refuses(submit: type[Job]) -> None:
    """A job that may not be requeued isn't, and one line gives Slurm's reason."""
    script_job = submit("recoverable", no_requeue="")
    told = script_job.wait("requeue left")
    assert "requeuehold: " in told[-2]
    assert told[-1] == "requeue left with 1"
