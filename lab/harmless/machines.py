"""Makes the machine of a job unusual: its temporary folder, its user, its limits."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import sys
import threading
import time
from pathlib import Path

from tests.torch_agent.hostile import NotAllowedError, mount, own_mounts

CLEANING_AGE_SECONDS = 3.0
MAX_PROCESSES = 90
_READ_ONLY, _BIND = 1, 0x1000
"""MS_RDONLY and MS_BIND of mount(2)."""
_FIRST_USER = 61_000
"""User ids that no user of the machine has."""


def enter_machine(name: str, folder: Path, number: int) -> None:
    """Make this process, which becomes a node's launcher, live on such a machine.

    Args:
        name: of `lab.harmless.plans.MACHINES`.
        folder: of the job; `folder/tmp` is its folder for temporary files.
        number: of the job among all that run at the same time, for a user id of its own.

    Raises:
        NotAllowedError: this process may not, for instance because it isn't root.
    """
    if name in {"read-only /tmp", "full /tmp"}:
        own_mounts()
        for path in _find_temporary_folders(folder):
            if name == "read-only /tmp":
                mount("tmpfs", path, "tmpfs", flags=_READ_ONLY)
            else:
                mount("tmpfs", path, "tmpfs", options="size=64k")
                _fill(Path(path))
    elif name in {"another user", "few processes"}:
        user = _FIRST_USER + number
        _give_to_user(folder, user)
        if name == "another user":
            # Somebody else was here first: the working folder and the names among temporary files
            # are theirs.
            os.chown(folder / "runs", 0, 0)
            for taken in (".firstfault", f".firstfault-{user}"):
                (folder / "tmp" / taken).mkdir()
        else:
            resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
        _become_user(folder, user)


def _fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 1024)


def _give_to_user(folder: Path, user: int) -> None:
    if os.getuid():
        raise NotAllowedError("not possible here: only root can be another user")
    _open_interpreter_to_all_users()
    for owned in (folder, *folder.rglob("*")):
        os.chown(owned, user, user)


def _become_user(folder: Path, user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    # torch looks its user up for the folder of compiled code
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "tmp" / "cache")
    os.environ["HOME"] = str(folder)


def _open_interpreter_to_all_users() -> None:
    """Let other users run this Python in this process's view,
    if it's installed in a private folder such as /root.
    """
    prefix = Path(sys.base_prefix).resolve()
    private = next(
        (path for path in (*reversed(prefix.parents), prefix) if not path.stat().st_mode & 1), None
    )
    if private is None:
        return
    own_mounts()
    descriptor = os.open(prefix, os.O_PATH)
    mount("tmpfs", str(private), "tmpfs", options="mode=755")
    prefix.mkdir(parents=True)
    mount(f"/proc/self/fd/{descriptor}", str(prefix), flags=_BIND)
    os.close(descriptor)


def _find_temporary_folders(folder: Path) -> list[str]:
    """Return all folders for temporary files, but those that hold the job's own folder."""
    # to mount on them
    common = [path for path in ("/tmp", "/var/tmp") if not folder.is_relative_to(path)]  # noqa: S108
    return [*common, str(folder / "tmp")]


class Cleaner:
    """Removes what is old below a folder, again and again, as systemd-tmpfiles does once a day.

    Like that program it leaves a folder alone that a process has locked.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._clean, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the cleaning."""
        self._ending.set()
        self._thread.join()

    def _clean(self) -> None:
        while not self._ending.wait(0.5):
            for path in list(self._folder.iterdir()):
                self._remove_if_old(path)

    def _remove_if_old(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            # By the oldest entry, as in a folder of which single files are removed
            entries = [path, *path.rglob("*")] if path.is_dir() else [path]
            youngest = max(entry.lstat().st_mtime for entry in entries)
            if time.time() - youngest < CLEANING_AGE_SECONDS:
                return
            if not path.is_dir():
                path.unlink()
                return
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
