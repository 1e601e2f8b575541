"""``firstfault requeue`` for finished jobs of a real Slurm (tools/start_slurm.sh),
with failures written by hand.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from firstfault import model
from firstfault.layout import VERDICT_JSON, error_key_for
from firstfault.model.job import Action
from firstfault.slurm_pointer import leave_pointer
from firstfault.testing import make_error
from firstfault.wire.documents import encode
from firstfault.wire.json_schemas import to_json
from tests.readers.commands import Ran, run
from tests.seals import DECISION, VERDICT
from tests.torchrun.test_requeue import CONFIGURATION, LONGEST_S, pytestmark, slurm

__all__ = ["pytestmark", "run"]

JOBS: dict[str, tuple[str | bytes, ...]] = {
    "one node": ("-N1",),
    "all nodes": ("-N2", "--ntasks-per-node=1"),
    "its node": ("-N1", "-w", "gpu-a"),
    "odd names": (
        "-N1",
        "--job-name",
        b"caf\xe9\n   JobState=COMPLETING Restarts=9",
        "--comment=mine Restarts=7 |",
    ),
    "array": ("-N1", "--array=1-2", "--job-name=JobState=CANCELLED"),
    "killed": ("-N1",),
    "steps": ("-N1",),
    "observed": ("-N1",),
}
FRAMES = (
    model.FrameInfo("train.py", 3, "step", "model(batch)"),
    model.FrameInfo(
        "/v/site-packages/torch/cuda/__init__.py",
        9,
        "forward",
        "raise AcceleratorError(text)",
    ),
)
ECC = model.ExceptionInfo(
    "RuntimeError", "CUDA error: uncorrectable ECC error encountered", frames=FRAMES
)
BUG = make_error(exception="NameError", message="name 'bach' is not defined")
TEMPORARY = make_error(
    exception="firstfault_torch.engine.RecoverableError", kind=model.Kind.RECOVERABLE
)
KILL_AFTER_REQUEUE = """#!/bin/bash
{scontrol} "$@" || exit
case $1 in requeue*) kill -KILL $PPID ;; esac
"""


@pytest.fixture(scope="module")
def failed() -> Iterator[dict[str, str]]:
    """Return the ids of jobs that have failed, by name."""
    script = b"#!/bin/bash\nexit 3\n"
    ids: dict[str, str] = {}
    environment = {**os.environ, "SLURM_CONF": str(CONFIGURATION)}
    for name, options in JOBS.items():
        command = ("sbatch", "--parsable", "--requeue", "--output=/dev/null", *options)
        done = subprocess.run(
            command,
            env=environment,
            input=script,
            stdout=subprocess.PIPE,
            check=True,
            timeout=60,
        )
        ids[name] = done.stdout.decode().strip()
    deadline = time.monotonic() + LONGEST_S
    query = ("squeue", "-h", "-r", "-t", "all", "-o", "%T", "-j", ",".join(ids.values()))
    while {*slurm(*query).split()} != {"FAILED"}:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    yield ids
    slurm("scancel", *ids.values())


@pytest.fixture(autouse=True)
def _user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user of this Slurm, with an empty home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SLURM_CONF", str(CONFIGURATION))
    for name in ("XDG_STATE_HOME", "FIRSTFAULT_FOLDER", "FIRSTFAULT_JOB", "FIRSTFAULT_DECISIONS"):
        monkeypatch.delenv(name, raising=False)


def show(job: str, columns: str) -> str:
    """Return columns of what Slurm knows of a job."""
    return slurm("squeue", "-h", "-t", "all", "-o", columns, "-j", job).strip()


def record(job: str, error: model.WorkerError, run_name: str = "", step: int = 0) -> Path:
    """Write a failure of a step as its agent does, and the pointer to it;
    return the run's folder.
    """
    attempt = Path(run_name or f".firstfault/torchrun/{job}", "0").absolute()
    path = attempt / "firstfault" / "errors" / error_key_for(error)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(error))
    number = show(job, "%A")
    step_variables = {
        "SLURM_JOB_ID": number,
        "SLURM_STEP_ID": str(step),
        "SLURM_CLUSTER_NAME": "lab",
    }
    if "_" in job:
        array, task = job.split("_")
        step_variables |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task}
    assert leave_pointer(str(attempt), environment={**os.environ, **step_variables})
    return attempt.parent


def record_ecc(job: str) -> str:
    """Write a proven hardware fault of the job's first node; return the node."""
    node = show(job, "%N").replace("gpu-[a-b]", "gpu-a").split(",")[0]
    record(job, make_error(exception=ECC, category="gpu_hardware", node=node))
    return node


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("one node", ""),
        ("all nodes", "the job needs 2 nodes, and 1 that satisfy it would be left"),
        ("its node", "the job requires it"),
    ],
)
def test_a_bad_node_is_excluded_if_enough_are_left(
    failed: dict[str, str],
    run: Callable[..., Ran],
    name: str,
    problem: str,
) -> None:
    """A job that couldn't be placed without its faulty node is requeued with it,
    and one line gives the reason.
    """
    job = failed[name]
    node = record_ecc(job)
    done = run("requeue", "--job", job, "--exclude-bad-node")
    assert done.code == 0
    assert f"job {job} is requeued{'' if problem else f', without {node}'}: " in done.err
    assert (f"{node} is faulty, but can't be excluded: {problem}" in done.err) is bool(problem)
    assert show(job, "%T %x").split() == ["PENDING", *([] if problem else [node])]
    assert show(job, "%k").startswith("firstfault: RuntimeError, rank 0 on gpu-"), (
        "commented once it waits"
    )


def test_a_killed_requeue_leaves_no_held_job(failed: dict[str, str], tmp_path: Path) -> None:
    """If Slurm kills the script in the middle of a requeue with an exclusion,
    the job still starts again.
    """
    job = failed["killed"]
    record_ecc(job)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    real = subprocess.run(
        ("bash", "-c", "command -v scontrol"),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    scontrol.write_text(KILL_AFTER_REQUEUE.format(scontrol=real.strip()))
    scontrol.chmod(0o755)
    environment = {**os.environ, "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    command = (sys.executable, "-m", "firstfault", "requeue", "--job", job, "--exclude-bad-node")
    assert subprocess.run(command, env=environment, check=False, timeout=LONGEST_S).returncode == -9
    state, priority = show(job, "%T %Q").split()
    assert state == "PENDING"
    assert int(priority) > 0, "a held job has the priority 0"


def test_texts_of_the_user_are_no_fields_of_slurm(
    failed: dict[str, str], run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Job names and comments are no fields of Slurm, in whatever encoding,
    and a foreign comment stays.
    """
    job = failed["odd names"]
    record(job, TEMPORARY)
    # the number of the job around counts, whatever an outer job has left in the environment
    outer = {
        "SLURM_JOB_ID": job,
        "SLURM_ARRAY_JOB_ID": "77",
        "SLURM_ARRAY_TASK_ID": "5",
        "SQUEUE_FORMAT": "%j",
    }
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    done = run("requeue")
    assert (done.code, f"firstfault: job {job} is requeued: " in done.err) == (0, True)
    assert show(job, "%T|%k") == "PENDING|mine Restarts=7 |"
    again = run("requeue")
    assert (again.code, again.err) == (0, f"firstfault: Slurm has already requeued job {job}\n")


def test_array_tasks_have_separate_verdicts_and_counts(
    failed: dict[str, str], run: Callable[..., Ran]
) -> None:
    """Each task has a verdict and a count of its own, also if all record in one folder;
    an array isn't requeued.
    """
    array = failed["array"]
    folder = record(f"{array}_1", TEMPORARY, "run")
    record(f"{array}_2", BUG, "other")
    (folder / f"requeues-{array}_2.json").write_text(json.dumps({"starts": [7, 8, 9]}))
    whole = run("requeue", "--job", array)
    assert whole.code == 1
    assert f"{array} is an array of jobs; name one of its tasks, such as {array}_" in whole.err
    assert run("requeue", "--job", f"{array}_1", "--max", "1").code == 0
    assert json.loads((folder / f"requeues-{array}_1.json").read_text()) == {"starts": [0]}
    other = run("requeue", "--job", f"{array}_2")
    assert (other.code, " stops: " in other.err) == (1, True)


def test_the_published_decision_of_the_last_step_counts(
    failed: dict[str, str], run: Callable[..., Ran]
) -> None:
    """Of several steps, the last stops the job by what it published; without a pointer,
    no folder's name is guessed.
    """
    job = failed["steps"]
    record(failed["observed"], TEMPORARY, f".firstfault/torchrun/{job}")
    nothing = run("requeue", "--job", job)
    assert (nothing.code, nothing.err) == (
        3,
        f"firstfault: job {job} isn't requeued: no verdict on its start 0\n",
    )
    sealed = record(job, TEMPORARY, "second", step=1) / "0" / VERDICT_JSON
    # what the nodes published counts, although this reader would decide otherwise
    sealed.write_text(
        to_json(VERDICT, replace(DECISION, retry=False, action=Action.STOP, reason="it came again"))
    )
    done = run("requeue", "--job", job)
    assert (done.code, done.err) == (1, f"firstfault: job {job} stops: it came again\n")
    record(job, TEMPORARY, "third", step=2)
    later = run("requeue", "--job", job)
    assert (later.code, f"job {job} is requeued: " in later.err) == (
        0,
        True,
    ), "the script tolerated the second step"


def test_observe_and_off_requeue_nothing(
    failed: dict[str, str],
    run: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Observing prints one line, off prints none, a misspelled mode is observed,
    none requeues, and each exits with the code for scripts that then decide themselves.
    """
    job = failed["observed"]
    record(job, TEMPORARY)
    for mode, lines in (("observe", 1), ("off", 0), ("obsreve", 1)):
        monkeypatch.setenv("FIRSTFAULT_DECISIONS", mode)
        done = run("requeue", "--job", job)
        assert done.code == 3
        assert done.err.count(f"firstfault: observed: would have requeued job {job}: ") == lines
        assert mode != "off" or not done.err
    assert ["not 'obsreve'" in text for text in caplog.messages] == [True]
    assert show(job, "%T") == "FAILED"
