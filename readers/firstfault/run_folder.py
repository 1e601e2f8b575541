"""The folder of a run on this machine: firstfault's mark in it,
and whether the run may still be active.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from firstfault.layout import ERROR_FILE, OUTPUTS, ROSTER, RUN_MARK, RosterKey
from firstfault.model import Phase
from firstfault.utils.safe_paths import enter, open_below, open_file

_ROOT = ".firstfault"
_TORCHRUN_FOLDER = "torchrun"
RUNS_FOLDERS = (f"{_ROOT}/{_TORCHRUN_FOLDER}", f"{_ROOT}/runs")
"""Where torchrun's jobs and ``firstfault run`` leave their runs by default."""
PRUNED_FOLDERS = (*RUNS_FOLDERS, f"{_ROOT}/logs")
"""The same, and where ``firstfault run`` leaves its logs if its store is remote."""
_PRIVATE_MODE = 0o700
_QUIET_SECONDS = 24 * 3600.0
_private_folder_locks: dict[Path, int] = {}
"""Descriptors of the private folders that this process has made or used."""


# --- begin a run ----------------------------------------------------------------------------------


def begin_run(folder: Path, attempt: str = "") -> int:
    """Make a run's folder and mark it; the mark is locked until the returned descriptor is closed.

    The run may lie in a folder that other users can write to. So nothing is opened through a link
    below the folder of all runs, and a run that another user has begun isn't joined.

    Args:
        folder: the run's.
        attempt: name of a folder to make in it, or empty to make none.

    Raises:
        OSError: nothing can be written there, or another user got ahead.
    """
    trusted_folder, names = _split_at_chosen_folder(folder)
    folder_descriptor = open_below(trusted_folder, names)
    try:
        if attempt:
            os.close(enter(attempt, folder_descriptor))
        # Nodes on a shared file system each append a line to the same file.
        mark = open_file(RUN_MARK, os.O_RDWR | os.O_CREAT | os.O_APPEND, folder_descriptor)
    finally:
        os.close(folder_descriptor)
    try:
        os.write(mark, _make_host_line(folder))
    except OSError:
        os.close(mark)
        raise
    # All nodes of the run hold a shared lock. The kernel releases it when the process ends, also
    # after SIGKILL.
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return mark


def _make_host_line(run: Path) -> bytes:
    host = socket.gethostname().encode()
    if run.parent.parent not in {*_find_private_folders()}:
        return host + b"\n"  # the path shows where the run was started
    try:
        working = os.fsencode(os.getcwd())  # noqa: PTH109 - Path has no bytes
    except OSError:  # it has been removed
        working = b""
    return host + (b"\t" + working if working and b"\n" not in working else b"") + b"\n"


def make_attempt(run: Path, attempt: str) -> None:
    """Make the folder of an attempt, to claim its number: of several callers, one succeeds.

    Raises:
        FileExistsError: it exists.
        OSError: it can't be made, or the run is another user's.
    """
    trusted_folder, names = _split_at_chosen_folder(run)
    folder_descriptor = open_below(trusted_folder, names)
    try:
        os.mkdir(attempt, dir_fd=folder_descriptor)
    finally:
        os.close(folder_descriptor)


def _split_at_chosen_folder(run: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the folder above a run that the user chose, and the names from there to the run."""
    root = run.parent.parent
    if root.name != _ROOT:
        return run.parent, (run.name,)
    # Nobody chose the folder `.firstfault` in the working folder, which may be one that all users
    # write to.
    trusted_folder, names = (root, ()) if _is_trusted_link(root) else (root.parent, (_ROOT,))
    _ignore_in_git(trusted_folder, names)
    return trusted_folder, (*names, run.parent.name, run.name)


def _is_trusted_link(path: Path) -> bool:
    """Whether it's a link that this user has made, perhaps to a larger disk,
    and that no other user can replace.
    """
    try:
        status = path.lstat()
        folder = path.parent.stat()
    except OSError:
        return False
    is_replaceable = (
        folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not folder.st_mode & stat.S_ISVTX
    )
    return stat.S_ISLNK(status.st_mode) and status.st_uid == os.geteuid() and not is_replaceable


def _ignore_in_git(trusted_folder: Path, names: tuple[str, ...]) -> None:
    """Keep the runs in the working folder out of its repository."""
    folder_descriptor = open_below(trusted_folder, names)
    try:
        ignore = open_file(".gitignore", os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder_descriptor)
    except OSError:  # it exists; any other problem shows when the mark is made
        return
    finally:
        os.close(folder_descriptor)
    with os.fdopen(ignore, "w", encoding="ascii") as file:
        file.write("*\n")


# --- this user's folder among temporary files -----------------------------------------------------


def make_fallback_folder() -> Path:
    """Return the folder of torchrun's runs for a node that can't write the usual one,
    made for this user alone.

    All users may write to the folder of temporary files. So another one may have taken any name in
    it; then this user gets a name that nobody can guess, and finds it again by its owner.

    Raises:
        OSError: there is no folder for temporary files, or it can't be written.
    """
    private = next(_find_private_folders(), None)
    if private is None:
        parent = Path(tempfile.gettempdir())
        name = _get_private_folder_name()
        private = parent / name
        try:
            private.mkdir(_PRIVATE_MODE)
        except FileExistsError:
            private = next(_find_private_folders(), None) or Path(
                tempfile.mkdtemp(prefix=f"{name}-", dir=parent)
            )
    if private not in _private_folder_locks:
        _private_folder_locks[private] = _lock_against_cleaners(private)
    runs = private / _TORCHRUN_FOLDER
    runs.mkdir(exist_ok=True)
    return runs


def find_fallback_folders() -> list[Path]:
    """Return the folders of torchrun's runs among temporary files that are this user's."""
    return [private / _TORCHRUN_FOLDER for private in _find_private_folders()]


def find_foreign_folder(runs: Path) -> str:
    """Return the part of a folder of runs that `begin_run` refuses, or an empty string if no part
    that exists by now is refused.
    """
    if runs.parent.name != _ROOT or _is_trusted_link(runs.parent):
        return ""
    for folder in (runs.parent, runs):
        if os.path.lexists(folder):
            status = folder.lstat()
            owners = {os.geteuid(), folder.parent.stat().st_uid}
            if not stat.S_ISDIR(status.st_mode) or status.st_uid not in owners:
                return str(folder)
    return ""


def describe_fallback_folder() -> str:
    """Return, for a person, what `make_fallback_folder` would return; it makes nothing."""
    try:
        usual = Path(tempfile.gettempdir(), _get_private_folder_name())
    except OSError as error:
        return f"no folder: {error}"
    if (private_folder := next(_find_private_folders(), None)) is not None:
        return str(private_folder / _TORCHRUN_FOLDER)
    if os.path.lexists(usual):
        return f"{usual}-<random>/{_TORCHRUN_FOLDER} ({usual} isn't this user's alone)"
    return str(usual / _TORCHRUN_FOLDER)


def _get_private_folder_name() -> str:
    return f"{_ROOT}-{os.geteuid()}"


def _find_private_folders() -> Iterator[Path]:
    with contextlib.suppress(OSError):
        parent = Path(tempfile.gettempdir())
        name = _get_private_folder_name()
        yield from filter(_is_private, (parent / name, *sorted(parent.glob(f"{name}-*"))))


def _is_private(folder: Path) -> bool:
    """Whether it's a folder of this user, no link to one,
    that no other user can have written to.
    """
    try:
        status = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o077
    )


def _lock_against_cleaners(folder: Path) -> int:
    """Keep a folder from systemd-tmpfiles, which leaves out what has a lock;
    return the descriptor that holds it.
    """
    folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        fcntl.flock(folder_descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return folder_descriptor


# --- find runs ------------------------------------------------------------------------------------


def list_runs(folder: Path) -> list[Path]:
    """Return the runs directly in a folder, the last begun first."""
    runs = [mark.parent for mark in folder.glob(f"*/{RUN_MARK}") if not mark.parent.is_symlink()]
    return sorted(runs, key=get_begin_time, reverse=True)


def find_newest_run(folder: Path) -> Path | None:
    """Return the run that was begun last in a folder of runs,
    or in ``.firstfault`` with several of them; without any, the last one without a mark.
    """
    runs = [
        run
        for parent in (folder, *(folder / Path(name).name for name in RUNS_FOLDERS))
        for run in list_runs(parent)
    ]
    unmarked = () if runs else find_unmarked_runs(folder)
    return max(runs, key=get_begin_time, default=None) or max(
        unmarked, key=_get_last_attempt_time, default=None
    )


def find_unmarked_runs(folder: Path) -> list[Path]:
    """Return the folders with attempts directly in a folder that no process has marked as runs,
    such as those of `PlainEngine` and of ranks that nobody waited for.
    """
    candidates = {
        path.parent.parent.parent
        for path in folder.glob(f"*/*/{ROSTER}")
        if _is_attempt_roster(path)
    }
    return sorted(run for run in candidates if not (run.is_symlink() or (run / RUN_MARK).exists()))


def _is_attempt_roster(roster: Path) -> bool:
    return roster.parent.parent.name.isdecimal()


def _get_last_attempt_time(run: Path) -> float:
    """Return when the last attempt of a run began, seconds since the Unix epoch, or later."""
    times = (path.lstat().st_mtime for path in run.glob(f"*/{ROSTER}") if _is_attempt_roster(path))
    return max(times, default=0.0)


def find_newest_attempt(folder: Path) -> Path | None:
    """Return the last attempt of a run, or of the newest run in a folder of runs, or None if the
    folder is neither.
    """
    run = folder if (folder / RUN_MARK).is_file() else find_newest_run(folder)
    attempts = list_attempts(run) if run is not None else []
    return max(attempts, key=lambda attempt: int(attempt.name), default=None)


def find_runs_folders_here() -> list[Path]:
    """Return the folders with runs of torchrun and ``firstfault run`` in the working folder."""
    return [folder for folder in map(Path, RUNS_FOLDERS) if list_runs(folder)]


def find_fallback_runs(started_in: str) -> list[Path]:
    """Return this user's runs among temporary files that a node began in this working folder. The
    list is empty if no run is known to have begun there.

    An earlier release recorded no working folder.
    """
    runs = [run for folder in find_fallback_folders() for run in list_runs(folder)]
    return [run for run in runs if started_in in (read_working_folders(run) or [""])]


def read_working_folders(run: Path) -> list[str]:
    """Return the working folders in the mark of a run among temporary files, without duplicates."""
    try:
        lines = (run / RUN_MARK).read_bytes().splitlines()
    except OSError:  # it has just been removed
        return []
    return list(
        dict.fromkeys(os.fsdecode(line.partition(b"\t")[2]) for line in lines if b"\t" in line)
    )


def get_begin_time(run: Path) -> float:
    """Return when the last node began a run, seconds since the Unix epoch;
    0 if the run has gone.
    """
    try:
        return (run / RUN_MARK).lstat().st_mtime
    except OSError:
        return 0.0


def belongs_to_another_user(run: Path) -> bool:
    """Whether a run in a folder of several users isn't this user's."""
    # A file system that shows one owner for everything shows it for the folder above, too.
    return run.lstat().st_uid not in {os.geteuid(), run.parent.stat().st_uid}


def may_be_active(run: Path) -> bool:
    """Return whether the run may still be active,
    here or on another host with locks that aren't visible here.
    """
    folder = os.open(run, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        descriptor = open_file(RUN_MARK, os.O_RDONLY, folder)
    finally:
        os.close(folder)
    with os.fdopen(descriptor, "rb") as mark:
        # An exclusive lock is refused while a node of the run holds its shared one. Another host's
        # lock may be invisible here, so the names of the hosts decide below.
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        hosts = {line.partition(b"\t")[0].decode(errors="replace").strip() for line in mark}
    return hosts != {socket.gethostname()} and not all(map(_has_ended, list_attempts(run)))


def list_attempts(run: Path) -> list[Path]:
    """Return the folders of a run's attempts."""
    return [path for path in run.iterdir() if path.name.isdecimal() and path.is_dir()]


def _has_ended(attempt: Path) -> bool:
    """Whether an attempt has its error or its outputs,
    or all nodes of its last round have succeeded, or ended in any way a day ago.

    Ranks without an agent publish no verdict. Under an agent, nodes that have failed may meet for
    another round, and wait for hours until one more of them has started.
    """
    if (attempt / ERROR_FILE).exists() or (attempt / OUTPUTS).exists():
        return True
    keys = [
        key
        for path in (attempt / ROSTER).glob("r1-*")
        if (key := RosterKey.parse(path.name)) is not None
    ]
    last_round_keys = [key for key in keys if key.round == max(other.round for other in keys)]
    last_nodes = {(key.group_rank, key.incarnation) for key in last_round_keys}
    succeeded = {
        (key.group_rank, key.incarnation) for key in last_round_keys if key.phase is Phase.SUCCEEDED
    }
    if last_round_keys and last_nodes == succeeded:
        return True
    # The newest incarnation counts: a container may have started again after a failure.
    newest_incarnations = {
        key.group_rank: key.incarnation for key in sorted(last_round_keys, key=_get_incarnation)
    }
    ended_nodes = {
        key.group_rank
        for key in last_round_keys
        if key.phase is not Phase.JOINED and key.incarnation == newest_incarnations[key.group_rank]
    }
    return (
        bool(last_round_keys)
        and ended_nodes == newest_incarnations.keys()
        and _is_quiet(attempt / ROSTER)
    )


def _get_incarnation(key: RosterKey) -> int:
    return key.incarnation


def _is_quiet(roster: Path) -> bool:
    written = max(path.lstat().st_mtime for path in (roster, *roster.iterdir()))
    return time.time() - written > _QUIET_SECONDS
