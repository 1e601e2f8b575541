"""The node's folder under cleaners of /tmp, and folders that killed jobs have left."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from firstfault.model import Writer
from firstfault.recorder import folder_keeper
from firstfault.recorder.client import RecorderClient
from firstfault.recorder.folder import DEATH_DOCUMENT, DEATH_ROSTER_ENTRY, NodeFolder
from firstfault.recorder.folder_keeper import FolderKeeper
from firstfault.testing import make_error, make_presence
from firstfault.wire.documents import encode, encode_presence
from tests.prefix import Prefix
from tests.processes import is_gone
from tests.readers.recorders import HANG_S, Agent, Start, StartAgent
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def write_last_words(folder: NodeFolder) -> None:
    folder.last_words.add(
        DEATH_DOCUMENT,
        encode(make_error(None, at_ms=None, exception=None, message="the agent died")),
    )
    folder.last_words.add(DEATH_ROSTER_ENTRY, encode_presence(make_presence(timestamp_ns=None)))


def clean_unlocked(folder: Path) -> None:
    """Remove everything in a folder of temporary files that isn't locked, whatever its age."""
    if shutil.which("systemd-tmpfiles"):
        rules = folder.with_name(f"{folder.name}.conf")
        rules.write_text(f"e {folder} - - - 0\n")
        subprocess.run(["systemd-tmpfiles", "--clean", str(rules)], check=True, capture_output=True)
        rules.unlink()
        return
    for path in folder.iterdir():
        subprocess.run(
            ["flock", "--nonblock", str(path), "find", str(path), "-delete"], check=False
        )


def clean_all(folder: Path) -> None:
    """Remove everything in a folder of temporary files."""
    subprocess.run(["find", str(folder), "-mindepth", "1", "-delete"], check=True)


def kill_and_read(dying: Agent, out: Prefix) -> None:
    """Kill the agent; its death must be recorded."""
    dying.kill()
    dying.wait_for_recorder()
    assert [failure.writer for failure in out.failures()] == [Writer.RECORDER]
    assert len(out.roster()) == 1


def test_a_cleaner_that_respects_locks_removes_nothing_of_a_job(
    agent: StartAgent, out: Prefix, short: str
) -> None:
    """It removes nothing of a running job, but what nobody has locked."""
    dying = agent(out.uri)
    other = Path(short) / "other"
    other.mkdir()
    write_last_words(dying.folder)
    before = set(dying.folder.path.rglob("*"))
    clean_unlocked(Path(short))
    assert not other.exists()
    assert set(dying.folder.path.rglob("*")) == before
    kill_and_read(dying, out)


def test_a_removed_folder_is_restored_with_its_socket(
    agent: StartAgent, out: Prefix, short: str
) -> None:
    """The recorder restores its folder, its socket and the last words;
    the agent's death is recorded.
    """
    dying = agent(out.uri)
    folder = dying.folder
    words = folder.last_words.folder / DEATH_DOCUMENT

    def is_restored() -> bool:
        """Clean until the recorder had seen the last words before."""
        write_last_words(folder)
        time.sleep(0.6)  # it looks twice a second
        clean_all(Path(short))
        deadline = time.monotonic() + 2.0
        while not words.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return words.exists()

    RecorderClient(folder).resources(HANG_S)
    wait_until(is_restored)
    wait_until(folder.socket.exists)
    assert RecorderClient(folder).resources(HANG_S) is not None
    assert folder.path.stat().st_mode & 0o777 == 0o700
    kill_and_read(dying, out)


def test_the_recorder_touches_its_files_so_that_none_becomes_old(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder touches all files of its folder from time to time, so that none becomes old."""
    monkeypatch.setattr(folder_keeper.time_limits, "FOLDER_TOUCH_INTERVAL_SECONDS", -1.0)
    folder = NodeFolder(Path(short) / "node")
    folder.path.mkdir(0o700)
    folder.spool("0-0").folder.parent.mkdir()
    file = folder.spool("0-0").add("a.pb", b"held")
    os.mkfifo(folder.worker(0, 0).stderr)
    for path in (folder.path, *folder.path.rglob("*")):
        os.utime(path, (1, 1))
    FolderKeeper(folder).restore_removed_files()
    assert (
        min(path.stat().st_mtime for path in (folder.path, *folder.path.rglob("*")))
        > time.time() - HANG_S
    )
    assert (
        min(path.stat().st_atime for path in (folder.path, *folder.path.rglob("*")))
        > time.time() - HANG_S
    )
    assert file.read_bytes() == b"held"


def test_another_users_folder_in_its_place_is_not_used(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What somebody else makes in the place of a cleaned folder is neither used nor written to."""
    folder = NodeFolder(Path(short) / "node")
    (Path(short) / "elsewhere").mkdir()
    folder.path.symlink_to(Path(short) / "elsewhere")
    assert not folder.exists
    with pytest.raises(PermissionError):
        FolderKeeper(folder).restore_removed_files()
    folder.path.unlink()
    folder.path.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert not folder.exists
        with pytest.raises(PermissionError):
            FolderKeeper(folder).restore_removed_files()
    assert list((Path(short) / "elsewhere").iterdir()) == []


def test_emptied_last_words_are_not_restored(agent: StartAgent, out: Prefix) -> None:
    """A process that has emptied its last words ends normally:
    the recorder doesn't bring them back.
    """
    ending = agent(out.uri)
    write_last_words(ending.folder)
    RecorderClient(ending.folder).resources(HANG_S)
    ending.folder.last_words.add(DEATH_DOCUMENT, b"")
    ending.kill()
    ending.wait_for_recorder()
    assert out.failures() == []
    assert len(out.roster()) == 1


def test_the_next_recorder_removes_only_unused_folders(
    start: Start, agent: StartAgent, out: Prefix, short: str
) -> None:
    """The next recorder removes a folder that no process uses any more, and nothing else."""
    killed = agent(out.uri)
    runs = agent(out.uri)
    alone = agent(out.uri)
    for dead in (killed, alone):
        os.kill(dead.recorder_pid, signal.SIGKILL)
        wait_until(lambda one=dead: is_gone(one.recorder_pid))
    killed.kill()
    elsewhere = Path(short) / "elsewhere"
    elsewhere.mkdir(0o700)
    shutil.copy(killed.folder.path / "boot-id", elsewhere)
    link = Path(short) / "firstfault-aaaaaaaa"
    link.symlink_to(elsewhere)
    names = {
        "unmarked": "firstfault-bbbbbbbb",
        "open": "firstfault-cccccccc",
        "boot": "firstfault-dddddddd",
    }
    others = {name: Path(short) / folder for name, folder in names.items()}
    for path in others.values():
        path.mkdir(0o700)
    shutil.copy(killed.folder.path / "boot-id", others["open"])
    others["open"].chmod(0o755)
    (others["boot"] / "boot-id").write_text("another machine's\n")
    assert killed.folder.path.exists()
    start(out.uri)
    wait_until(lambda: not killed.folder.path.exists(), "the folder of a killed job stays")
    for path in (
        runs.folder.path,
        alone.folder.path,
        link,
        elsewhere / "boot-id",
        *others.values(),
    ):
        assert path.exists(), path
