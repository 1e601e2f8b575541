"""Tasks of Flyte 2 on several pods: its real entrypoint ``a0``, under a real torchrun,
on local paths.
"""

import asyncio
import os
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flyte", reason="needs Flyte 2")

from flyte._internal.runtime.convert import (
    convert_from_native_to_error,
    convert_from_native_to_inputs,
)
from flyteidl2.core.execution_pb2 import ContainerError, ErrorDocument, ExecutionError

from firstfault.model import Action
from firstfault_torch.torchrun.job_names import read_job_names
from flyteplugins.firstfault.engine import Flyte2Engine, find_clustered
from lab.cascades.cases import Way
from tests.flyte2 import tasks
from tests.s3_server import S3
from tests.seals import DECISION, VERDICT
from tests.torchrun.nodes import Job, run_job
from tests.torchrun.test_exit_codes import LONG_S, LONG_STEPS

pytestmark = pytest.mark.jobs

ROOT = Path(__file__).resolve().parents[2]
USER, SYSTEM = ExecutionError.USER, ExecutionError.SYSTEM
ENVIRONMENT = {
    "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "DISABLE_RICH_LOGGING": "1",
    "FIRSTFAULT": "1",
    "OMP_NUM_THREADS": "1",
}


def _a0(folder: Path, name: str, fault: str, *options: str, outputs: str = "") -> list[str]:
    """Return the command line that Flyte's back end gives a pod; outputs go to ``outputs``,
    if not elsewhere.
    """
    task = getattr(tasks, name)
    values = ([fault], 3600) if name == "execute_script" else (fault,)
    inputs = asyncio.run(convert_from_native_to_inputs(task.native_interface, *values))
    (folder / "outputs").mkdir(exist_ok=True)
    (folder / "inputs.pb").write_bytes(inputs.proto_inputs.SerializeToString())
    given = {
        "inputs": folder / "inputs.pb",
        "outputs-path": outputs or folder / "outputs",
        "run-base-dir": folder / "base",
        "raw-data-path": folder / "raw",
        "version": "1",
        "run-name": "run",
        "name": "a0",
        "project": "project",
        "domain": "domain",
        "org": "org",
        "resolver": "flyte._internal.resolvers.default.DefaultTaskResolver",
    }
    pairs = [text for option, value in given.items() for text in (f"--{option}", str(value))]
    return ["a0", *pairs, *options, "mod", "tests.flyte2.tasks", "instance", name]


def _run(
    folder: Path,
    fault: str,
    *,
    task: str = "train",
    restart: int = 0,
    limit: int = 2,
    pods: int = 2,
    ranks_each: int = 1,
    outputs: str = "",
    options: Sequence[str] = (),
    door: str = "forked",
    **variables: str,
) -> Job:
    """Run a restart of a JobSet, whose pods have so many ranks each.

    The door "variable" starts torchrun as Flyte does. A forked launcher has imported torch already.
    """
    names = {
        "JOBSET_NAME": "job",
        "JOBSET_RESTART_ATTEMPT": str(restart),
        "JOBSET_MAX_RESTARTS": str(limit),
        "FLYTE_CLUSTERED_WORKER": "1",
    }
    environments = dict.fromkeys(range(pods), ENVIRONMENT | names | variables)
    of_torchrun = (f"--nproc-per-node={ranks_each}", "--no-python", "--")
    return run_job(
        folder,
        _a0(folder, task, fault, *options, outputs=outputs),
        Way(door, "static", ""),
        nodes=pods,
        options=of_torchrun,
        environments=environments,
        longest_s=LONG_S,
    )


def _read_error(folder: Path) -> ContainerError:
    return ErrorDocument.FromString((folder / "outputs" / "error.pb").read_bytes()).error


def _codes(job: Job) -> list[int]:
    return [node.code for node in job.nodes]


def test_the_documented_trial_records_a_failure(tmp_path: Path) -> None:
    """The page's task and commands record a failure on a machine without a cluster."""
    page = (
        (ROOT / "docs" / "start" / "flyte2.md")
        .read_text(encoding="utf-8")
        .partition("## Try it on a laptop")[2]
    )
    (tmp_path / "trial.py").write_text(
        page.partition("```python\n")[2].partition("```")[0], encoding="utf-8"
    )
    commands = page.partition("```bash\n")[2].partition("```")[0]
    ended = subprocess.run(
        ["bash", "-c", commands],
        cwd=tmp_path,
        env={**os.environ, "PATH": ENVIRONMENT["PATH"], "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert "firstfault: TypeError, rank 1 on " in ended.stderr
    assert ended.stderr.endswith("/out/firstfault-runs/trial/0\n")
    assert (tmp_path / "out" / "report.html").is_file()


def test_the_documented_elastic_trial_records_a_failure(tmp_path: Path) -> None:
    """The page's second task, with its script for inputs and without torchrun,
    records a failure, too.
    """
    page = (
        (ROOT / "docs" / "start" / "flyte2.md")
        .read_text(encoding="utf-8")
        .partition("### A task with inputs, and `Elastic`")[2]
    )
    for name in ("elastic_trial.py", "write_inputs.py"):
        text, _, page = page.partition("```python\n")[2].partition("```")
        (tmp_path / name).write_text(text, encoding="utf-8")
    subprocess.run(
        ["bash", "-c", page.partition("```bash\n")[2].partition("```")[0]],
        cwd=tmp_path,
        env={**os.environ, "PATH": ENVIRONMENT["PATH"], "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=LONG_S,
        check=True,
    )
    error = ErrorDocument.FromString((tmp_path / "out" / "error.pb").read_bytes()).error
    assert error.message.startswith("TypeError rank 1 ")
    assert (tmp_path / "out" / "firstfault-runs" / "elastic-a0" / "0" / "error.pb").is_file()


def test_a_bug_ends_the_job_after_one_run(tmp_path: Path) -> None:
    """All pods exit with 0, after which JobSet restarts none and Flyte reads the error,
    which isn't recoverable.

    Also if the image sets exit codes for another scheduler.
    """
    job = _run(tmp_path, "bug", door="variable", FIRSTFAULT_EXIT_CODES="default")
    assert _codes(job) == [0, 0]
    assert job.nodes[0].headline == "TypeError, rank 1 on host-1: learning_rate is None"
    error = _read_error(tmp_path)
    assert (error.code, error.kind, error.origin) == (
        "USER:TypeError",
        ContainerError.NON_RECOVERABLE,
        USER,
    )
    assert error.message.startswith("TypeError rank 1 host-1 no retry: learning_rate is None\n")
    page = (tmp_path / "outputs" / "report.html").read_text()
    assert "learning_rate" in page


def _get(s3: S3, outputs: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = s3.client().get_object(
        Bucket=s3.bucket, Key=f"{outputs.rpartition('/')[2]}/{name}"
    )
    return found


@pytest.mark.s3
def test_error_and_report_are_where_flyte_reads_them_on_s3(tmp_path: Path, s3: S3) -> None:
    """The error and the report are where Flyte looks for them, and a browser shows the report."""
    outputs = s3.uri()
    job = _run(tmp_path, "bug", outputs=outputs, door="variable", **s3.environment())
    assert _codes(job) == [0, 0]
    assert job.nodes[0].prefix.startswith(f"{outputs}/firstfault-runs/job")
    error = ErrorDocument.FromString(_get(s3, outputs, "error.pb")["Body"].read()).error
    assert (error.code, error.kind) == ("USER:TypeError", ContainerError.NON_RECOVERABLE)
    assert _get(s3, outputs, "report.html")["ContentType"] == "text/html"


def test_the_same_fault_twice_without_progress_ends_the_job(tmp_path: Path) -> None:
    """A recoverable exception runs again; after the next restart of the JobSet,
    the same one ends it.

    The task runs in a thread here, and its second run saves a checkpoint, which is one object.
    """
    options = ("--checkpoint-path", str(tmp_path / "checkpoint"))
    first = _run(tmp_path, "recoverable", task="train_in_thread", options=options)
    assert _codes(first) == [1, 1]
    assert not (tmp_path / "outputs" / "error.pb").exists()
    again = _run(tmp_path, "recoverable", task="train_in_thread", options=options, restart=1)
    assert (tmp_path / "checkpoint").read_bytes() == b"the model"
    assert _codes(again) == [0, 0]
    assert "trained less than 10 minutes" in _read_error(tmp_path).message
    assert _read_error(tmp_path).kind == ContainerError.NON_RECOVERABLE


def test_jobs_of_one_image_have_separate_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each JobSet has documents of its own, so that none takes another one's
    verdict for its previous one.
    """
    monkeypatch.setattr("flyteplugins.firstfault.engine._USER_JOB_NAME", "team")
    monkeypatch.setenv("FIRSTFAULT_FOLDER", "s3://bucket/all")
    monkeypatch.setenv("FIRSTFAULT_JOB", "team")
    for name in ("run-a0", "run-a1"):
        monkeypatch.setenv("JOBSET_NAME", name)
        find_clustered(SimpleNamespace(args=("--outputs-path", "s3://bucket/outputs")))
        assert read_job_names("").job.value == f"team-{name}"


@pytest.mark.skipif(
    not os.environ.get("FIRSTFAULT_LONG"), reason="trains for 10 minutes: `make progress`"
)
@pytest.mark.timeout(LONG_S * 2)
def test_the_same_fault_after_progress_continues(tmp_path: Path) -> None:
    """The same fault as before doesn't stop a task that has trained for 10 minutes in between."""
    assert _codes(_run(tmp_path, "recoverable")) == [1, 1]
    assert _codes(_run(tmp_path, "recoverable", restart=1, TRAIN_STEPS=str(LONG_STEPS))) == [1, 1]


def test_the_last_restart_leaves_an_error_for_the_parent_action(tmp_path: Path) -> None:
    """Flyte's parent action reads it, although the JobSet has failed;
    Flyte retries it unless a repeat is proven.
    """
    assert _codes(_run(tmp_path, "unclear", limit=0)) == [1, 1]
    assert (_read_error(tmp_path).kind, _read_error(tmp_path).origin) == (
        ContainerError.RECOVERABLE,
        USER,
    )


@pytest.mark.parametrize(
    ("fault", "task", "headline"),
    [
        ("cancelled", "train", "CancelledError, rank 0 on host-0: the evaluation was cancelled"),
        (
            "interrupted",
            "train_in_thread",
            "interrupted (KeyboardInterrupt), rank 0 on host-0: the evaluation was interrupted",
        ),
    ],
)
def test_an_interruption_is_recorded_and_restarted_as_without_firstfault(
    tmp_path: Path, fault: str, task: str, headline: str
) -> None:
    """An exception that Flyte doesn't report is recorded as what it is,
    and JobSet decides as without firstfault.
    """
    job = _run(tmp_path, fault, task=task, pods=1)
    assert _codes(job) == [1]
    assert job.nodes[0].headline == headline
    assert not (tmp_path / "outputs" / "error.pb").exists()


def test_observe_restarts_as_without_firstfault_and_prints_the_decision(tmp_path: Path) -> None:
    """In the mode "observe" JobSet restarts the pods as without firstfault,
    and each pod prints what it would do.

    A report that the task has published stays, in any mode.
    """
    job = _run(tmp_path, "reported", FIRSTFAULT_DECISIONS="observe")
    assert _codes(job) == [1, 1]
    assert all(
        "  Observed: would have exited with 0 (stop) after attempt 0: " in node.err
        for node in job.nodes
    )
    assert not (tmp_path / "outputs" / "error.pb").exists()
    page = (tmp_path / "outputs" / "report.html").read_text()
    assert "the loss is 0.3" in page
    assert "learning_rate" not in page


def test_a_pod_whose_agent_is_killed_is_restarted_and_named(tmp_path: Path) -> None:
    """A pod fails if its agent is killed, so JobSet restarts all pods;
    the surviving pod names it.
    """
    job = _run(tmp_path, "lost")
    assert _codes(job) == [1, -9]
    assert "host-1" in job.nodes[0].headline


def test_a_task_that_returns_early_is_reported_despite_sys_exit(tmp_path: Path) -> None:
    """Its entrypoint ends with ``sys.exit(main())``, which is no call of the task's."""
    job = _run(tmp_path, "early", pods=1, ranks_each=2)
    assert _codes(job) == [1]
    headline = job.nodes[0].headline
    assert headline.startswith("ended early, rank 1 on host-0: its program reached its end")


def test_a_success_leaves_only_outputs(tmp_path: Path) -> None:
    """Also if the task handles the exception of another one, which it runs in its own process."""
    job = _run(tmp_path, "handled", door="variable")
    assert _codes(job) == [0, 0]
    assert {path.name for path in (tmp_path / "outputs").iterdir()} - {"firstfault-runs"} == {
        "outputs.pb"
    }
    assert not list((tmp_path / "outputs").rglob("e1-*.pb"))


@pytest.mark.parametrize(("pods", "ranks_each"), [(2, 1), (1, 2)])
def test_outputs_of_a_wrong_type_leave_flytes_error(
    tmp_path: Path, pods: int, ranks_each: int
) -> None:
    """Flyte handles an exception outside of the task function, and its pods exit with 0:
    here with its error, also if all workers exit with 0 at the same time.
    """
    job = _run(tmp_path, "none", task="train_to_text", pods=pods, ranks_each=ranks_each)
    assert _codes(job) == [0] * pods
    assert job.nodes[0].headline.startswith(
        "TypeTransformerFailedError, ranks 0, 1: Expected value of type"
    )
    assert _read_error(tmp_path).kind == ContainerError.NON_RECOVERABLE


def test_observe_leaves_no_error_for_outputs_of_a_wrong_type(tmp_path: Path) -> None:
    """In the mode "observe" such a pod exits with 0 and without an error, as without firstfault,
    but with a line.
    """
    job = _run(tmp_path, "none", task="train_to_text", pods=1, FIRSTFAULT_DECISIONS="observe")
    assert _codes(job) == [0]
    assert "observed: would have failed the attempt, whose pods exit with 0: " in job.nodes[0].err
    assert not (tmp_path / "outputs" / "error.pb").exists()


def test_a_scripts_own_exception_is_reported_with_its_line(tmp_path: Path) -> None:
    """``flyte run python-script --clustered``: the exception is the script's own, with its line."""
    job = _run(tmp_path, "bug", task="execute_script")
    assert _codes(job) == [0, 0]
    assert job.nodes[0].headline == "TypeError, rank 1 on host-1: learning_rate is None"


def _run_elastic(
    folder: Path,
    fault: str,
    *options: str,
    outputs: str = "",
    **variables: str,
) -> str:
    """Run an attempt of an ``Elastic`` task on one pod; return what it prints."""
    marks = folder / "marks"
    marks.mkdir(exist_ok=True)
    environment = os.environ | ENVIRONMENT | {"MARKS": str(marks)} | variables
    command = _a0(folder, "train_elastic", fault, *options, outputs=outputs)
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stderr


def _count_marks(folder: Path) -> int:
    """Return how many workers were started."""
    return len(list((folder / "marks").iterdir()))


@pytest.mark.s3
def test_a_bug_in_an_elastic_task_uses_no_restarts_and_no_retries(tmp_path: Path, s3: S3) -> None:
    """A bug uses none of torch's restarts and none of Flyte's retries:
    a0 uploads the verdict as its error.

    On S3, because Flyte registers its own S3 client for the whole process, agent included.
    """
    outputs = s3.uri()
    printed = _run_elastic(tmp_path, "bug", outputs=outputs, **s3.environment())
    assert "the job itself isn't affected" not in printed
    assert "learning_rate" in _get(s3, outputs, "report.html")["Body"].read().decode()
    error = ErrorDocument.FromString(_get(s3, outputs, "error.pb")["Body"].read()).error
    assert (error.code, error.kind, error.origin) == (
        "USER:TypeError",
        ContainerError.NON_RECOVERABLE,
        USER,
    )
    assert "rank 1" in error.message.splitlines()[0]
    assert _count_marks(tmp_path) == len(["rank 0", "rank 1"])


def test_the_next_elastic_attempt_stops_at_the_same_fault(tmp_path: Path) -> None:
    """The next attempt finds the verdict of the one before by Flyte's checkpoint,
    and stops at the same fault.
    """
    folder = str(tmp_path / "folder")
    _run_elastic(
        tmp_path,
        "recoverable",
        "--checkpoint-path",
        str(tmp_path / "first"),
        FIRSTFAULT_FOLDER=folder,
    )
    # a run may have several such actions
    assert (tmp_path / "folder" / "run-a0" / "0" / "error.pb").exists()
    assert _read_error(tmp_path).kind == ContainerError.RECOVERABLE
    paths = (
        "--checkpoint-path",
        str(tmp_path / "second"),
        "--prev-checkpoint",
        str(tmp_path / "first"),
    )
    _run_elastic(tmp_path, "recoverable", *paths, FLYTE_ATTEMPT_NUMBER="1")
    assert _read_error(tmp_path).kind == ContainerError.NON_RECOVERABLE
    assert "trained less than 10 minutes" in _read_error(tmp_path).message


def test_observe_leaves_restarts_and_error_of_elastic_to_torch(tmp_path: Path) -> None:
    """In the mode "observe" torch restarts the workers, and the error is torch's,
    and recoverable.
    """
    printed = _run_elastic(tmp_path, "bug", FIRSTFAULT_DECISIONS="observe")
    assert "Observed: would have raised NonRecoverableError (stop) after attempt 0: " in printed
    assert _read_error(tmp_path).kind == ContainerError.RECOVERABLE
    assert _read_error(tmp_path).message.startswith("PyTorch worker(s) failed:")
    assert _count_marks(tmp_path) == 2 * len(["rank 0", "rank 1"])


def test_elastic_restarts_after_an_unclear_failure(tmp_path: Path) -> None:
    """Without proof of a repeat torch's restarts are used, and the task succeeds."""
    _run_elastic(tmp_path, "once")
    assert (tmp_path / "outputs" / "outputs.pb").exists()
    assert not (tmp_path / "outputs" / "error.pb").exists()
    assert _count_marks(tmp_path) == 2 * len(["rank 0", "rank 1"])


@pytest.mark.parametrize(
    ("action", "recoverable", "code", "kind"),
    [
        (Action.UNKNOWN, True, "RuntimeError", USER),
        (Action.RETRY, True, "USER", USER),
        (Action.SYSTEM, True, "USER", SYSTEM),
        (Action.STOP, False, "USER", USER),
    ],
)
def test_an_unknown_cause_is_recoverable_for_elastic_but_a_stop_is_not(
    action: Action, recoverable: bool, code: str, kind: int
) -> None:
    """An unknown cause is to Flyte what Elastic's own error is; only a stop isn't recoverable."""
    seal = SimpleNamespace(message="what failed")
    sealed: Any = SimpleNamespace(
        decision=replace(DECISION, action=action), verdict=VERDICT, seal=seal
    )
    error = convert_from_native_to_error(Flyte2Engine(outputs="outputs").to_exception(sealed))
    assert (error.recoverable, error.err.code, error.err.kind) == (recoverable, code, kind)
