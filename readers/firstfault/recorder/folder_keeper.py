"""Keeps the node's folder for as long as the job runs, and removes folders of killed jobs.

The folder is below /tmp, where cleaners remove what is some days old, also under a running job:
systemd-tmpfiles does so after 10 days on many systems. It skips a locked directory. Others
(tmpwatch, tmpreaper, ``find -mtime +7 -delete``) know no locks, but skip what was touched lately.
After all of them, the recorder restores what it needs itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from pathlib import Path

from firstfault.recorder import time_limits
from firstfault.recorder.folder import DEATH_DOCUMENT, DEATH_ROSTER_ENTRY, SESSIONS_FILE, NodeFolder

PREFIX = "firstfault-"
"""How the name of each node's folder begins."""
_NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}(\.gone)?")
"""What `tempfile.mkdtemp` and `NodeFolder.remove` make of the prefix."""
_BOOT = "boot-id"
"""A file in a folder that was locked when it was made:
the machine and the boot in which its lock counts.
"""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PRIVATE_MODE = 0o700


class FolderLock:
    """A lock on a directory, held until the last process that has inherited it has ended.

    Raises:
        OSError: the directory isn't there, isn't this user's alone, is locked, or is on a file
            system without locks.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(
            path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
        try:
            self._status = os.fstat(self._descriptor)
            _check_private(path, self._status)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def descriptor(self) -> int:
        """The descriptor for a child that is to hold the lock, too."""
        return self._descriptor

    def is_at(self, path: Path) -> bool:
        """Whether the directory is still at this path."""
        with contextlib.suppress(OSError):
            return os.path.samestat(path.lstat(), self._status)
        return False

    def release(self) -> None:
        """Hold the lock no longer in this process."""
        # The program may have closed the descriptor, and opened one of its own files under the
        # number since.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._descriptor), self._status):
                os.close(self._descriptor)


def lock_folder(path: Path) -> FolderLock | None:
    """Lock a new node's folder, and mark it as locked; None where a directory can't be locked."""
    with contextlib.suppress(OSError):
        lock = FolderLock(path)
        # After the lock: a marked folder that isn't locked is one that a killed job has left.
        with contextlib.suppress(OSError):
            (path / _BOOT).write_bytes(_BOOT_ID.read_bytes())
        return lock
    return None


def remove_stale_folders(own: NodeFolder) -> None:
    """Remove unused folders next to `own`: left by this user's jobs that were killed as a whole."""
    for path in own.path.parent.glob(f"{PREFIX}*"):
        if not _NAME.fullmatch(path.name) or path == own.path:
            continue
        with contextlib.suppress(OSError):
            # Locked means in use, by an agent or a recorder of this machine.
            lock = FolderLock(path)
            try:
                # Another machine may share this folder, and its locks may not be seen here. A
                # folder that is not marked was made by another version of firstfault, or just now,
                # and isn't locked yet.
                if (path / _BOOT).read_bytes() == _BOOT_ID.read_bytes() and lock.is_at(path):
                    NodeFolder(path).remove()
            finally:
                lock.release()


class FolderKeeper:
    """The recorder's care for its own folder: `look` is called twice a second."""

    def __init__(self, folder: NodeFolder) -> None:
        self._folder = folder
        self._kept: dict[Path, tuple[tuple[int, int], bytes]] = {}
        """The files about the agent's death, each with inode and time of change."""
        self._touched = time.monotonic()
        self._lock: FolderLock | None = None

    def restore_removed_files(self) -> bool:
        """Restore what a cleaner has removed; return whether the recorder has to
        listen on a new socket.

        Raises:
            OSError: it can't be restored, such as with a full disk.
        """
        self._restore_folders()
        words = self._folder.last_words.folder
        for file in (
            words / DEATH_DOCUMENT,
            words / DEATH_ROSTER_ENTRY,
            self._folder.path / SESSIONS_FILE,
        ):
            self._keep(file)
        if time.monotonic() - self._touched > time_limits.FOLDER_TOUCH_INTERVAL_SECONDS:
            self._touched = time.monotonic()
            self._touch_all()
        return not self._folder.socket.is_socket()

    def read(self, file: Path) -> bytes | None:
        """Return the content of one of the files about the agent's death,
        also if a cleaner has just removed it.
        """
        with contextlib.suppress(OSError):
            return file.read_bytes()
        return self._kept[file][1] if file in self._kept else None

    def _restore_folders(self) -> None:
        path = self._folder.path
        if not os.path.lexists(path):
            path.mkdir(_PRIVATE_MODE)
            if self._lock is not None:
                self._lock.release()
            self._lock = lock_folder(path)
        # Its name is known to all users of the machine: another one may have made something in its
        # place.
        if not self._folder.exists:
            raise PermissionError(f"{path} is not this user's folder")
        (path / "spool").mkdir(exist_ok=True)

    def _keep(self, file: Path) -> None:
        """Remember a file's content, or write the file again."""
        try:
            status = file.stat()
        except FileNotFoundError:
            if file in self._kept:
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(self._kept[file][1])
            return
        version = (status.st_ino, status.st_mtime_ns)
        if file not in self._kept or self._kept[file][0] != version:
            self._kept[file] = (version, file.read_bytes())

    def _touch_all(self) -> None:
        for folder, _, files in os.walk(self._folder.path):
            for name in (".", *files):
                with contextlib.suppress(OSError):  # it has just been removed
                    # many, and often
                    os.utime(os.path.join(folder, name), follow_symlinks=False)  # noqa: PTH118


def _check_private(path: Path, status: os.stat_result) -> None:
    """Raise a PermissionError for a folder that isn't this user's, or that others may enter."""
    if status.st_mode & 0o777 != _PRIVATE_MODE or status.st_uid != os.geteuid():
        raise PermissionError(f"{path} is not a folder of this user alone")
