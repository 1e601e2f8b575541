"""What another user of the machine has prepared in a shared folder is neither followed,
joined nor removed.
"""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from firstfault.cli import EXIT
from firstfault.cli._main import group
from firstfault.layout import RUN_MARK
from firstfault.run_folder import begin_run, find_fallback_folders, list_runs, make_fallback_folder
from firstfault_torch.torchrun.job_folder import choose_folder
from firstfault_torch.torchrun.job_names import read_job_names

PROFILE = "export PATH\n"
PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "link": lambda path, target: path.symlink_to(target),
    "dangling link": lambda path, target: path.symlink_to(target.with_name("new")),
    "hard link": lambda path, target: path.hardlink_to(target),
    "pipe": lambda path, _: os.mkfifo(path),
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A victim's folder with one file."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "profile").write_text(PROFILE)
    return home


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of temporary files, as all users share it."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setattr("tempfile.tempdir", None)
    return shared


def is_unchanged(home: Path) -> bool:
    """Whether the victim's folder is as before."""
    return [path.name for path in home.iterdir()] == ["profile"] and (
        home / "profile"
    ).read_text() == PROFILE


def choose_and_unlock_folder(name: str = "job") -> Path:
    """Return the folder that an agent chooses; its lock is released."""
    chosen = choose_folder(read_job_names(name, {}), None)
    os.close(chosen.mark or 0)
    return Path(chosen.folder)


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("at", [f"job/{RUN_MARK}", "job", "job/0"])
def test_no_planted_link_in_the_folder_of_runs_is_followed(
    plant: str,
    at: str,
    home: Path,
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job records, and writes through no link that was prepared at the name of its mark,
    run or attempt.
    """
    root = home.with_name("group")
    (root / at).parent.mkdir(parents=True)
    PLANTS[plant](
        root / at, home if at != f"job/{RUN_MARK}" and plant == "link" else home / "profile"
    )
    monkeypatch.setenv("FIRSTFAULT_FOLDER", str(root))
    folder = choose_and_unlock_folder()
    assert is_unchanged(home)
    assert folder.is_dir()
    assert (folder.parent / RUN_MARK).is_file()
    assert shared in folder.parents or (root in folder.parents and folder != root / "job" / "0")


def test_a_planted_gitignore_creates_no_file(
    home: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .gitignore that is a link to a file that doesn't exist yet makes no file there."""
    monkeypatch.delenv("FIRSTFAULT_FOLDER", raising=False)
    monkeypatch.chdir(shared)
    (shared / ".firstfault").mkdir()
    (shared / ".firstfault" / ".gitignore").symlink_to(home / "new")
    assert choose_and_unlock_folder() == shared / ".firstfault" / "torchrun" / "job" / "0"
    assert is_unchanged(home)


def test_a_users_own_link_to_the_folder_is_followed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user may link .firstfault in their working folder to a larger disk."""
    monkeypatch.delenv("FIRSTFAULT_FOLDER", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".firstfault").symlink_to(home)
    assert choose_and_unlock_folder() == tmp_path / ".firstfault" / "torchrun" / "job" / "0"
    assert (home / "torchrun" / "job" / RUN_MARK).read_text()
    assert (home / ".gitignore").read_text() == "*\n"


@pytest.mark.parametrize("plant", ["link", "dangling link", "hard link", "pipe", "open folder"])
def test_a_taken_private_folder_is_replaced_by_another(
    plant: str,
    home: Path,
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the name of the private folder is taken, the job records in another private one,
    which readers find.
    """
    taken = shared / f".firstfault-{os.geteuid()}"
    if plant == "open folder":
        (taken / "torchrun" / "job").mkdir(parents=True)
        (taken / "torchrun" / "job" / RUN_MARK).symlink_to(home / "profile")
        taken.chmod(0o777)
    else:
        PLANTS[plant](taken, home if plant == "link" else home / "profile")
    old = shared / ".firstfault" / "torchrun" / "job"
    old.mkdir(parents=True)
    (old / RUN_MARK).symlink_to(home / "profile")
    monkeypatch.setenv("FIRSTFAULT_FOLDER", str(home / "profile" / "no folder"))
    folder = choose_and_unlock_folder()
    private = folder.parents[2]
    assert is_unchanged(home)
    assert private.parent == shared
    assert private != taken
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert find_fallback_folders() == [make_fallback_folder()] == [private / "torchrun"]
    monkeypatch.chdir(home)
    pruned = CliRunner().invoke(group, ["prune", "--keep", "0"], standalone_mode=False)
    assert (pruned.return_value, f"removed {folder.parent}" in pruned.output) == (EXIT.OK, True)


def test_a_job_records_without_a_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job records in its folder although the machine has no folder for temporary files."""

    def fail() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    monkeypatch.setenv("FIRSTFAULT_FOLDER", str(tmp_path))
    assert choose_and_unlock_folder() == tmp_path / "job" / "0"
    monkeypatch.delenv("FIRSTFAULT_FOLDER")
    monkeypatch.chdir(tmp_path)
    assert choose_and_unlock_folder() == tmp_path / ".firstfault" / "torchrun" / "job" / "0"
    assert CliRunner().invoke(group, ["prune"], standalone_mode=False).return_value == EXIT.OK


def test_prune_ignores_a_mark_that_is_a_pipe(home: Path, shared: Path) -> None:
    """`firstfault prune` neither waits for nor removes a run whose mark was replaced by a pipe."""
    os.close(begin_run(shared / "job"))
    (shared / "job" / RUN_MARK).unlink()
    os.mkfifo(shared / "job" / RUN_MARK)
    assert list_runs(shared) == [shared / "job"]
    pruned = CliRunner().invoke(group, ["prune", str(shared), "--keep", "0"], standalone_mode=False)
    assert pruned.return_value == EXIT.OK
    assert (shared / "job").exists()
    assert is_unchanged(home)


# --- with real users: only root can be several ----------------------------------------------------

NOBODY, ATTACKER = 65534, 65533
START = """
import os, sys
from firstfault_torch.torchrun.job_folder import choose_folder  # as root: others may not read this environment
from firstfault_torch.torchrun.job_names import read_job_names  # as root: others may not read this environment
os.setgroups([])
os.setuid(int(sys.argv[1]))
"""
RECORDS = """
print(choose_folder(read_job_names("job", {}), None).folder)
"""
PREPARES = """
os.makedirs("tmp/.firstfault/torchrun/job")
os.symlink(os.path.abspath("victim"), "tmp/.firstfault/torchrun/job/firstfault.run")
os.symlink(os.path.abspath("victim"), "tmp/.firstfault/.gitignore")
os.makedirs("tmp/.firstfault-0/torchrun/job")
os.symlink(os.path.abspath("victim"), "tmp/.firstfault-0/torchrun/job/firstfault.run")
os.chmod("tmp/.firstfault-0", 0o777)
os.makedirs("group/job")
os.symlink(os.path.abspath("victim"), "group/job/firstfault.run")
os.chmod("group/job", 0o777)
"""


@pytest.fixture
def machine() -> Iterator[Path]:
    """A folder that all users may enter, with a folder of temporary files and one of a group."""
    folder = Path(tempfile.mkdtemp(prefix="ff-users-"))
    folder.chmod(0o755)
    for name in ("tmp", "group"):
        (folder / name).mkdir()
        (folder / name).chmod(0o1777)
    (folder / "victim").write_text(PROFILE)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs several users")
@pytest.mark.parametrize("place", ["tmp", "group", "working folder"])
def test_two_users_record_and_leave_each_others_folders_alone(place: str, machine: Path) -> None:
    """Another user's folders and links are left alone, and each of two users records."""

    def run(code: str, user: int) -> str:
        folder = {
            "tmp": str(machine / "victim" / "no folder"),
            "group": str(machine / "group"),
        }.get(place, "")
        environment = {
            **os.environ,
            "TMPDIR": str(machine / "tmp"),
            "FIRSTFAULT_FOLDER": folder,
            "HOME": "/nowhere",
        }
        working = machine / "tmp" if place == "working folder" and code == RECORDS else machine
        command = [sys.executable, "-c", START + code, str(user)]
        ended = subprocess.run(
            command,
            cwd=working,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    run(PREPARES, ATTACKER)
    folders = [Path(run(RECORDS, user)) for user in (0, NOBODY)]
    assert (machine / "victim").read_text() == PROFILE
    assert [folder.stat().st_uid for folder in folders] == [0, NOBODY]
    assert folders[0].parent.stat().st_uid == 0
    if place == "group":
        assert all(machine / "group" in folder.parents for folder in folders)
