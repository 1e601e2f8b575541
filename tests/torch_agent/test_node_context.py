"""What a node reads from its environment and from git's files,
and what an agent passes to its workers.
"""

import os
import shutil
import socket
import subprocess
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from unittest.mock import Mock

import pytest

from firstfault_torch import node_setup, places, source_code
from firstfault_torch.node_context import NODE_CONTEXT_VARIABLE, Identity, NodeContext

IDENTITY = Identity(
    "s3://bucket/out",
    engine="flyte",
    attempt=2,
    node="worker-1",
    namespace="team-development",
)
RECORDING = NodeContext(
    "earliest",
    IDENTITY,
    2.5,
    round=3,
    incarnation=7,
    group_world_size=2,
    ip="10.0.0.7",
)


def test_a_recording_goes_through_the_environment() -> None:
    """What the agent knows arrives in the worker unchanged, with variables of its engine;
    else recording is off.
    """
    node_context = replace(
        RECORDING, identity=replace(IDENTITY, worker_environment={"ENGINE": "1"})
    )
    environment = node_context.to_environment()
    assert (NodeContext.from_environment(environment), environment["ENGINE"]) == (RECORDING, "1")
    assert NodeContext.from_environment({}) is None
    # or a number of numpy
    of_a_library = replace(RECORDING, upload_deadline_seconds=Fraction(5, 2))
    assert NodeContext.from_environment(of_a_library.to_environment()) == RECORDING


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, "7", "{}", '{"identity": {"unknown": 1}}', '{"identity": 1}']
)
def test_another_versions_recording_is_one_warning(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that cannot read its agent's recording records nothing,
    and one warning tells what to do.
    """
    assert NodeContext.from_environment({NODE_CONTEXT_VARIABLE: text}) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Install the agent's version of firstfault" in caplog.text


def test_a_nodes_place_has_its_names_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's place has attempt, node, host, address, pid,
    and the machine if the pod's template names it.
    """
    monkeypatch.setenv("NODE_NAME", "gpu-node-7")
    assert (
        places.get_node_place(RECORDING).machine
        == places.get_worker_place(RECORDING, {}).machine
        == "gpu-node-7"
    )
    monkeypatch.delenv("NODE_NAME")
    place = places.get_node_place(RECORDING)
    assert (place.attempt, place.node, place.host) == (2, "worker-1", socket.gethostname())
    assert (place.ip, place.pid, place.rank, place.machine) == ("10.0.0.7", os.getpid(), None, "")


def test_a_workers_place_has_torchs_ranks() -> None:
    """A worker's ranks are torch elastic's, its round and incarnation are the agent's."""
    environment = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "1",
    }
    place = places.get_worker_place(RECORDING, environment)
    assert (place.rank, place.local_rank, place.group_rank) == (3, 1, 1)
    assert (place.world_size, place.group_world_size, place.role) == (4, 2, "default")
    assert (place.round, place.incarnation, place.restart_count) == (3, 7, 1)
    place = places.get_worker_place(RECORDING, {"RANK": "no number"})
    assert (place.rank, place.local_rank, place.group_rank, place.world_size) == (
        None,
        None,
        None,
        0,
    )
    assert place.group_world_size == 2


def test_processes_of_a_boot_share_an_id() -> None:
    """All processes of a boot share an id; the versions of loaded packages are listed,
    and Python's always.
    """
    import torch  # noqa: PLC0415 - loaded by now, as in a worker

    assert places.read_boot_id() == places.read_boot_id() != ""
    found = dict(places.find_versions())
    assert found["torch"] == torch.__version__
    assert found["python"].count(".") == 2


def test_a_host_without_name_service_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without a name service has no address, and that is not an error."""
    refused = socket.gaierror(-2, "name or service not known")
    monkeypatch.setattr(socket, "gethostbyname", Mock(side_effect=refused))
    assert places.look_up_address() == ""


_IDENTITY = Identity(output_prefix="s3://bucket/run", task="train.fit", image="trainer:1")


def _git(folder: Path, *arguments: str) -> str:
    if shutil.which("git") is None:
        if os.environ.get("CI"):
            pytest.fail("git is not installed")
        pytest.skip("git is not installed")
    no_settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    author = {
        f"GIT_{who}_{what}": "someone"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    environment = {**os.environ, **no_settings, **author}
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with one commit and a working folder in it,
    in which this process works.
    """
    folder = tmp_path / "repository"
    (folder / "src").mkdir(parents=True)
    _git(folder, "init", "-q", "-b", "main")
    (folder / "src" / "train.py").write_text("pass\n")
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "first")
    monkeypatch.chdir(folder / "src")
    return folder


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@github.com:org/repo.git", "https://github.com/org/repo/blob/{commit}"),
        ("https://user:token@github.com/org/repo", "https://github.com/org/repo/blob/{commit}"),
        (
            "ssh://git@gitlab.example.com:2222/team/sub/repo.git",
            "https://gitlab.example.com/team/sub/repo/-/blob/{commit}",
        ),
        (
            "https://github.example.com:8443/org/repo.git",
            "https://github.example.com:8443/org/repo/blob/{commit}",
        ),
        ("https://code.example.com/org/repo.git", ""),
        ("github:org/repo.git", ""),
        ("git@bitbucket.org:org/repo.git", "https://bitbucket.org/org/repo/src/{commit}"),
        ("/srv/git/repo.git", ""),
    ],
)
def test_a_sources_address_has_commit_but_no_credentials(
    repository: Path, remote: str, address: str
) -> None:
    """The checked-out commit at the remote's web address, without user and token;
    a remote on a disk has none.
    """
    _git(repository, "remote", "add", "origin", remote)
    setup = node_setup.read_node_setup(_IDENTITY)
    assert setup.source_url == address.format(commit=_git(repository, "rev-parse", "HEAD"))
    assert setup.source_root == (str(repository) if address else "")
    assert (setup.task, setup.image) == ("train.fit", "trainer:1")


def test_all_forms_of_git_heads_name_the_commit(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A detached head, packed references and another worktree name the same commit."""
    _git(repository, "remote", "add", "origin", "git@github.com:org/repo.git")
    expected = node_setup.read_node_setup(_IDENTITY).source_url
    assert expected
    _git(repository, "pack-refs", "--all")
    assert node_setup.read_node_setup(_IDENTITY).source_url == expected
    _git(repository, "worktree", "add", "-q", "-b", "other", str(tmp_path / "other"))
    monkeypatch.chdir(tmp_path / "other")
    there = node_setup.read_node_setup(_IDENTITY)
    assert (there.source_url, there.source_root) == (expected, str(tmp_path / "other"))
    monkeypatch.chdir(repository)
    _git(repository, "checkout", "-q", "--detach")
    assert node_setup.read_node_setup(_IDENTITY).source_url == expected


def test_a_damaged_repository_has_no_address(repository: Path) -> None:
    """What git's files do not tell is left out."""
    _git(repository, "remote", "add", "origin", "git@github.com:org/repo.git")
    (repository / ".git" / "HEAD").write_bytes(b"\xff\xfe")
    assert not node_setup.read_node_setup(_IDENTITY).source_url


def test_a_deleted_working_folder_has_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose working folder was deleted still tells its GPUs, without a warning."""
    (tmp_path / "bus").mkdir()
    (tmp_path / "bus" / "information").write_text("Model: NVIDIA H100 80GB HBM3\n")
    monkeypatch.setattr(node_setup, "_GPUS_FOLDER", tmp_path)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    setup = node_setup.read_node_setup(_IDENTITY)
    assert (setup.gpu_model, setup.source_url, setup.source_root) == (
        "NVIDIA H100 80GB HBM3",
        "",
        "",
    )


def test_the_environment_names_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images without git's files name it themselves; the address stands for the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(source_code.SOURCE_VARIABLE, "https://code.example.com/repo/blob/3f2c1e9/")
    setup = node_setup.read_node_setup(_IDENTITY)
    assert (setup.source_url, setup.source_root) == (
        "https://code.example.com/repo/blob/3f2c1e9",
        str(tmp_path),
    )


def test_the_drivers_files_name_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's files name the model of each GPU of the container."""
    for bus in ("0000:19:00.0", "0000:3b:00.0"):
        (tmp_path / bus).mkdir()
        text = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 317\nGPU UUID: \t GPU-8f3a\n"
        (tmp_path / bus / "information").write_text(text)
    monkeypatch.setattr(node_setup, "_GPUS_FOLDER", tmp_path)
    setup = node_setup.read_node_setup(_IDENTITY)
    assert (setup.gpu_model, setup.gpus) == ("NVIDIA H100 80GB HBM3", 2)


def test_a_hanging_disk_delays_no_roster_entry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files are read with a limit, so that a roster entry is not late;
    what is known without them stays.
    """
    pipe = tmp_path / "0000:19:00.0" / "information"
    pipe.parent.mkdir()
    os.mkfifo(pipe)  # opening it waits for a writer
    monkeypatch.setattr(node_setup, "_GPUS_FOLDER", tmp_path)
    monkeypatch.setattr(node_setup, "NODE_SETUP_TIMEOUT_SECONDS", 0.1)
    began = time.monotonic()
    setup = node_setup.read_node_setup(_IDENTITY)
    took = time.monotonic() - began
    with pipe.open("w"):  # the thread that reads ends now, or other tests wait for it
        pass
    assert took < 30
    assert (setup.task, setup.gpus) == ("train.fit", 0)
