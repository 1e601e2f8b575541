"""Pointers from the numbers of a Slurm job to where its steps recorded."""

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from firstfault.slurm_pointer import find_pointers, find_start, leave_pointer

BATCH = {"SLURM_JOB_ID": "4711", "SLURM_CLUSTER_NAME": "blue"}


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """The variables of a user with an empty home."""
    return {"HOME": str(tmp_path / "home"), **BATCH}


def uris(
    job: str,
    environment: dict[str, str],
    restart: str = "0",
    root: str = "",
    since: float = 0,
) -> list[str]:
    """Return where a start's steps recorded."""
    return [
        one.uri
        for one in find_pointers(job, restart, root=root, since=since, environment=environment)
    ]


def test_a_step_is_known_by_job_restart_step_and_cluster() -> None:
    """A step's start is known by job, restart, step and cluster;
    a job submitted from an array isn't a task of it.
    """
    step = {"SLURM_STEP_ID": "2", "SLURM_RESTART_COUNT": "1"}
    task = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3"}
    assert find_start(BATCH | step | task) == ("4711", "1", "2", "blue")
    assert find_start(BATCH) == ("4711", "0", "batch", "blue")
    assert find_start({}) is None
    assert find_start({"SLURM_JOB_ID": "../4711"}) == ("-4711", "0", "batch", "cluster")


def test_the_script_finds_all_steps_of_this_start(home: dict[str, str], tmp_path: Path) -> None:
    """Whatever folder an option named, the script gets each step's, in order,
    of this start of this job only.
    """
    steps = [("/b/ten", "10"), ("s3://b/two", "2"), (str(tmp_path / "a b"), "0")]
    for uri, step in steps:
        assert leave_pointer(uri, "", home | {"SLURM_STEP_ID": step})
    assert leave_pointer("/b/again", "", home | {"SLURM_RESTART_COUNT": "1", "SLURM_STEP_ID": "0"})
    assert leave_pointer("/b/other", "", home | {"SLURM_JOB_ID": "47110", "SLURM_STEP_ID": "0"})
    assert uris("4711", home) == [uri for uri, _ in reversed(steps)]
    assert uris("4711", home, "1") == ["/b/again"]
    assert uris("471", home) == []


def test_the_last_program_of_a_script_is_found_last(home: dict[str, str]) -> None:
    """The script starts programs with and without srun,
    and the last of them is the last to be found.
    """
    step = {"SLURM_STEP_ID": "0"}
    for uri, variables in (("/b/first", {}), ("/b/step", step), ("/b/eval", {}), ("/b/train", {})):
        assert leave_pointer(uri, "", home | variables)
    assert uris("4711", home) == ["/b/first", "/b/step", "/b/eval", "/b/train"]


def test_a_second_node_adds_a_pointer_only_for_another_folder(home: dict[str, str]) -> None:
    """A second node with the same folder adds nothing,
    one with a folder of its own adds a pointer.
    """
    for uri in ("/b/4711/0", "/b/4711/0", "/on/node/4711/0"):
        assert leave_pointer(uri, "", home | {"SLURM_STEP_ID": "0"})
    assert sorted(uris("4711", home)) == ["/b/4711/0", "/on/node/4711/0"]


def test_the_folder_of_runs_has_the_pointer_too(home: dict[str, str], tmp_path: Path) -> None:
    """The folder of the runs has the pointer, too: a container's home isn't the script's."""
    root = str(tmp_path / "runs")
    assert leave_pointer("/b/4711/0", root, home | {"HOME": "/proc/nowhere"})
    assert uris("4711", home, root=root) == ["/b/4711/0"]


def test_a_reused_job_number_is_another_job(home: dict[str, str]) -> None:
    """Another cluster's job, and one from before a cluster's numbers began anew,
    isn't taken for this one.
    """
    assert leave_pointer("/b/blue", "", home)
    nowhere = {"HOME": home["HOME"]}
    assert uris("4711", nowhere) == ["/b/blue"]
    assert uris("4711", home | {"SLURM_CLUSTER_NAME": "red"}) == []
    assert uris("4711", home, since=time.time() + 86_400) == []
    assert leave_pointer("/b/red", "", home | {"SLURM_CLUSTER_NAME": "red"})
    assert uris("4711", nowhere) == []


def test_old_pointers_are_removed(home: dict[str, str], tmp_path: Path) -> None:
    """A user's home doesn't fill up with pointers."""
    assert leave_pointer("/b/4711/0", "", home)
    (old,) = (tmp_path / "home").rglob("4711")
    os.utime(old, (0, 0))
    assert leave_pointer("/b/4712/0", "", home | {"SLURM_JOB_ID": "4712"})
    assert (uris("4711", home), uris("4712", home)) == ([], ["/b/4712/0"])


def test_a_planted_link_is_neither_written_nor_read(tmp_path: Path) -> None:
    """In a folder that others can write to, no link leads a pointer elsewhere."""
    root = tmp_path / "runs"
    root.mkdir()
    own = root / f".slurm-{os.geteuid()}"
    own.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    assert not leave_pointer("/b/4711/0", str(root), BATCH)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    own.unlink()
    assert leave_pointer("/b/4711/0", str(root), BATCH)
    (pointer,) = own.rglob("*.json")
    pointer.rename(tmp_path / "planted")
    pointer.symlink_to(tmp_path / "planted")
    assert uris("4711", BATCH, root=str(root)) == []


@pytest.mark.parametrize("linked", [".slurm-7", ".slurm-7/blue", ".slurm-7/blue/4711"])
def test_a_pointer_of_another_job_is_never_read(linked: str, tmp_path: Path) -> None:
    """No link to this user's own pointers, and no other name of them,
    makes one job's verdict another's.
    """
    root = tmp_path / "runs"
    assert leave_pointer("/b/4000/0", str(root), BATCH | {"SLURM_JOB_ID": "4000"})
    (pointer,) = root.rglob("*.json")
    (pointer.parents[1] / "4711").symlink_to(pointer.parent)
    target = pointer.parents[3 - len(Path(linked).parts)]
    (root / linked).parent.mkdir(parents=True, exist_ok=True)
    (root / linked).symlink_to(target)
    assert uris("4711", BATCH, root=str(root)) == []
    (root / linked).unlink()
    (root / ".slurm-7" / "blue" / "4711").mkdir(parents=True, exist_ok=True)
    pointer.rename(root / ".slurm-7" / "blue" / "4711" / pointer.name)
    assert uris("4711", BATCH, root=str(root)) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_each_user_of_a_shared_folder_reads_only_their_own_pointer(tmp_path: Path) -> None:
    """The second user of a shared folder finds their own pointer there,
    and never reads the first one's.
    """
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o1777)
        try:
            for user, uri in ((4001, "/b/first"), (4002, "/b/second")):
                os.seteuid(user)
                assert leave_pointer(uri, root, BATCH)
                assert uris("4711", BATCH, root=root) == [uri]
                os.seteuid(0)
        finally:
            os.seteuid(0)
        # With another id, as in a container, the name of the folder is another one.
        shutil.copytree(f"{root}/.slurm-4001", tmp_path / ".slurm-4003")
        assert uris("4711", BATCH, root=str(tmp_path)) == ["/b/first"]
