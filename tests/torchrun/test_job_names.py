"""Who a node or a rank is, and in which folder it records."""

import os
import re
import socket
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from firstfault.attempt import read as read_attempt
from firstfault.layout import RUN_MARK
from firstfault.slurm_pointer import find_pointers
from firstfault_start import read_rank_numbers
from firstfault_torch.torchrun.job_folder import choose_folder
from firstfault_torch.torchrun.job_names import HOST as HOST_NAME
from firstfault_torch.torchrun.job_names import SOURCES, Source, read_job_names
from lab.cascades.cases import Way
from tests.torchrun.nodes import run_job

DOCS = Path(__file__).parents[2] / "docs" / "start" / "clusters.md"
HOST = socket.gethostname()


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.of}-{source.variables[0]}")
def test_each_source_gives_a_name_and_precedes_those_below(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of the table gives a name if its variables are set,
    and comes before the rows below it.
    """
    monkeypatch.setattr(socket, "gethostname", lambda: "train-3")
    below = [row for row in SOURCES[SOURCES.index(source) :] if row.of == source.of]
    names = {name for row in below for name in row.variables} - {HOST_NAME}
    run_id = "7" if names & {"--rdzv-id", "PET_RDZV_ID"} else ""
    environment = {name: {"JOB_COMPLETION_INDEX": "3"}.get(name, "7") for name in names} | {
        "HOSTNAME": "other-3"
    }
    value = {HOST_NAME: "train-3", "JOB_COMPLETION_INDEX": "train"}.get(source.variables[-1])
    found = getattr(read_job_names(run_id, environment), source.of)
    assert found.value == (source.value or value or "_".join("7" for _ in source.variables))
    assert found.source == " and ".join(source.variables)


def test_the_documented_table_is_that_of_the_code() -> None:
    """docs/start/clusters.md has the table of the code."""
    rows = [
        f"| {source.of} | {' and '.join(f'`{name}`' for name in source.variables)} |"
        f" {source.launcher} |".replace(f"`{HOST_NAME}`", HOST_NAME)
        for source in SOURCES
    ]
    assert (
        re.findall(r"^\| (?:job|attempt|node|namespace) \|.*$", DOCS.read_text(), re.MULTILINE)
        == rows
    )


@pytest.mark.parametrize(
    ("value", "cleaned"),
    [
        ("local_cwd://torchx/train-abc", "local_cwd-torchx-train-abc"),
        ("../../etc", "etc"),
        ("a b/c", "a-b-c"),
        ("..", None),
        ("none", None),
        ("0c2e1c9e-7a06-4d2b-9d3a-0a5e6a4f1b11", None),
    ],
)
def test_a_name_is_one_folder_and_a_drawn_name_is_none(value: str, cleaned: str | None) -> None:
    """A name is one folder below the user's; a name that torchrun drew is none."""
    assert read_job_names(value, {}).job.value == (cleaned or "")


def test_an_attempt_that_is_no_number_is_ignored() -> None:
    """It does not count."""
    found = read_job_names("", {"FIRSTFAULT_ATTEMPT": "two", "SLURM_RESTART_COUNT": "3"})
    assert found.attempt == ("3", "SLURM_RESTART_COUNT")


def _folder(
    monkeypatch: pytest.MonkeyPatch,
    root: object,
    meet: object = None,
    **environment: str,
) -> str:
    monkeypatch.setenv("FIRSTFAULT_FOLDER", str(root))
    chosen = choose_folder(read_job_names(environment.pop("run_id", ""), environment), meet)  # type: ignore[arg-type]
    if chosen.mark is not None:
        os.close(chosen.mark)
    return chosen.folder


def test_a_home_folder_in_a_manifest_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell expands "~" in a manifest, nor in `--ff-folder=~/runs`;
    a block of YAML ends with a line break.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _folder(monkeypatch, "~/runs\n", SLURM_JOB_ID="4711") == f"{tmp_path}/runs/4711/0"


def test_runs_never_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A requeue is the next attempt beside the first;
    another run of the same name has a folder of its own.
    """
    first = _folder(monkeypatch, tmp_path, SLURM_JOB_ID="4711")
    again = _folder(monkeypatch, tmp_path, SLURM_JOB_ID="4711")
    requeued = _folder(monkeypatch, tmp_path, SLURM_JOB_ID="4711", SLURM_RESTART_COUNT="1")
    assert (first, requeued) == (f"{tmp_path}/4711/0", f"{tmp_path}/4711/1")
    assert re.fullmatch(rf"{tmp_path}/4711-\d{{8}}-\d{{6}}-{HOST}-\d+/0", again)


@pytest.mark.parametrize("root", ["/runs", "s3://bucket/runs"])
def test_another_job_of_the_same_name_adds_no_attempts(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run belongs to one job of the scheduler: another one with the same FIRSTFAULT_JOB
    never adds attempts to it.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    root = root if root.startswith("s3") else f"{tmp_path}{root}"

    def run(job: str, **environment: str) -> str:
        environment |= {"FIRSTFAULT_JOB": "team/llama 7b", "SLURM_JOB_ID": job}
        return _folder(monkeypatch, root, **environment).removeprefix(f"{root}/")

    assert (run("1"), run("2")) == ("team-llama-7b-1/0", "team-llama-7b-2/0")
    assert run("2", SLURM_RESTART_COUNT="1") == "team-llama-7b-2/1"
    task = {"SLURM_ARRAY_JOB_ID": "3", "SLURM_ARRAY_TASK_ID": "7"}
    assert run("4", **task, SLURM_RESTART_COUNT="1") == "team-llama-7b-4/1"
    assert run("5", FIRSTFAULT_ATTEMPT="1") == "team-llama-7b/1"


def test_array_tasks_and_jobs_that_they_submit_are_separate_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of an array and the jobs that it submits, which inherit its variables,
    are separate runs.
    """
    task = {"SLURM_ARRAY_JOB_ID": "700", "SLURM_ARRAY_TASK_ID": "3"}
    jobs = [
        _folder(monkeypatch, tmp_path, **task, SLURM_JOB_ID=job) for job in ("703", "4711", "4712")
    ]
    requeued = _folder(monkeypatch, tmp_path, **task, SLURM_JOB_ID="4711", SLURM_RESTART_COUNT="1")
    assert jobs == [f"{tmp_path}/700_3-{job}/0" for job in ("703", "4711", "4712")]
    assert requeued == f"{tmp_path}/700_3-4711/1"


def test_each_step_of_a_job_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is a run with its own attempts,
    also if its nodes have no common store to agree on a name.
    """
    steps = [{"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": step} for step in ("0", "2")]
    for requeue in ({}, {"SLURM_RESTART_COUNT": "1"}):
        found = [
            _folder(monkeypatch, tmp_path, meet, **step, **requeue)
            for meet in (None, lambda: None)
            for step in steps
        ]
        number = requeue.get("SLURM_RESTART_COUNT", "0")
        assert found == [f"{tmp_path}/4711/{number}", f"{tmp_path}/4711.2/{number}"] * 2


def test_a_restart_belongs_to_the_latest_job_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart belongs to the job that was begun last,
    not to an older one of this name with fewer attempts.
    """

    def start(attempt: str) -> Path:
        folder = _folder(monkeypatch, tmp_path, JOBSET_NAME="llama", JOBSET_RESTART_ATTEMPT=attempt)
        return Path(folder)

    old = start("0")
    os.utime(old.parent / RUN_MARK, (1, 1))
    new = start("0")
    assert old == tmp_path / "llama" / "0"
    assert new.parent.name.startswith("llama-2")
    assert start("1") == new.parent / "1"


def test_runs_on_a_storage_never_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage is not asked: what an allocation left on its node, or the time,
    tells runs apart.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    root = "s3://bucket/runs"
    names = [_folder(monkeypatch, root, SLURM_JOB_ID="4711") for _ in range(2)]
    assert names[0] == f"{root}/4711/0"
    assert names[1].startswith(f"{root}/4711-")
    assert _folder(monkeypatch, root, run_id="train").startswith(f"{root}/train-")


def test_all_nodes_take_the_name_that_the_first_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes of a run take the name that the first one claimed,
    also if nothing names the job.
    """
    store = dist.HashStore()
    folders = {_folder(monkeypatch, tmp_path, lambda: store) for _ in range(3)}
    assert len(folders) == 1
    assert _folder(monkeypatch, tmp_path, dist.HashStore) not in folders


def test_nodes_without_a_store_take_the_name_of_the_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a store before the first round, variables name the folder;
    without those one line says what to set.
    """
    assert _folder(
        monkeypatch,
        tmp_path,
        lambda: None,
        JOBSET_NAME="a",
        JOBSET_RESTART_ATTEMPT="2",
    ).endswith("/a/2")
    assert not caplog.messages
    _folder(monkeypatch, tmp_path, lambda: None)
    assert "set FIRSTFAULT_JOB to a new name for each run" in caplog.text


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ("RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 SLURM_PROCID=0 SLURM_NTASKS=1", (5, 1, 8)),
        (
            (
                "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_SIZE=8"
                " SLURM_PROCID=0"
            ),
            (5, 1, 8),
        ),
        ("PMI_RANK=5 MPI_LOCALRANKID=1 PMI_SIZE=8", (5, 1, 8)),
        ("SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NTASKS=8", (5, 1, 8)),
        ("LOCAL_RANK=1 WORLD_SIZE=8 NODE_RANK=0", (1, 1, 8)),
        ("LOCAL_RANK=1 WORLD_SIZE=8 NODE_RANK=2", (None, 1, 8)),
        ("RANK=5 WORLD_SIZE=many", (5, 0, 0)),
        ("NODE_RANK=2", (None, 0, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_ranks_are_those_of_the_nearest_launcher(
    variables: str, found: tuple[int | None, int, int]
) -> None:
    """Rank, local rank and world size are those of the launcher that is nearest to the process."""
    assert read_rank_numbers(dict(item.split("=") for item in variables.split())) == found


@pytest.mark.jobs
def test_a_requeued_jobs_failure_is_found_in_the_common_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure of the requeued job is found in the common folder,
    and its report tells where its name came from.
    """
    folder = tmp_path / "node-0" / "ff"
    first = _folder(monkeypatch, folder, SLURM_JOB_ID="4711")
    program = "import sys; sys.exit('no licence')"
    variables = {"FIRSTFAULT_FOLDER": "ff", "SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "1"}
    variables |= {"XDG_STATE_HOME": str(tmp_path / "home")}
    words = ["--nproc-per-node=1", "--no-python", sys.executable, "-c", program]
    (node,) = run_job(
        tmp_path,
        words,
        Way("forked", "static"),
        nodes=1,
        environments={0: variables},
    ).nodes
    read = read_attempt(str(folder))
    assert (first, read.uri, node.prefix) == (
        f"{folder}/4711/0",
        f"{folder}/4711/1",
        f"{folder}/4711/1",
    )
    assert [one.uri for one in find_pointers("4711", "1", environment=variables)] == [node.prefix]
    assert read.conclusion is not None
    told = read.report(read.conclusion).identity.task
    assert (
        told
        == "4711 (SLURM_JOB_ID), attempt 1 (SLURM_RESTART_COUNT), nodes named by FIRSTFAULT_NODE"
    )
