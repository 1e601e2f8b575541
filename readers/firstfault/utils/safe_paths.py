"""Opens and makes files in folders where another user of the machine may have prepared links or folders.

A path is resolved anew at each use, and in a shared folder somebody else may replace a part of it. So each part below a
trusted folder is opened relative to the descriptor of the part above it, and no link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
"""O_PATH: neither needs the right to read the folder, nor waits."""


def open_below(base: Path, names: Iterable[str], *, mode: int = 0o777) -> int:
    """Open the folder `names` below `base`, make what is missing, and return a descriptor with O_PATH.

    `base` itself may be reached through links: the user or their administrator chose it. Below it no link is followed,
    and each folder belongs to this user or to the owner of `base`. The second is necessary because a file system may
    show one owner for all (FUSE, an NFS that maps users), and a container's root may write into a user's folder.

    Raises:
        OSError: there is a link or another user's folder, or nothing can be made.
    """
    base.mkdir(parents=True, exist_ok=True)
    folder = os.open(base, _FOLDER)
    try:
        owners = {os.geteuid(), os.fstat(folder).st_uid}
        for name in names:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, mode, dir_fd=folder)
            below = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = below
            check_owner(folder, owners, name)
    except OSError:
        os.close(folder)
        raise
    return folder


def check_owner(descriptor: int, owners: Collection[int], name: str) -> None:
    """Raise PermissionError unless one of these users owns what a descriptor refers to."""
    owner = os.fstat(descriptor).st_uid
    if owner not in owners:
        raise PermissionError(errno.EPERM, f"it belongs to another user, with id {owner}", name)


def open_file(name: str, flags: int, folder: int, *, mode: int = 0o666) -> int:
    """Open a file in the folder of a descriptor; it is no link, no pipe, and has no second name elsewhere.

    Raises:
        OSError: it is one of these, or it can't be opened.
    """
    # O_NONBLOCK: the open of a prepared FIFO would wait for its other end.
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(name, flags | safe, mode, dir_fd=folder)
    found = os.fstat(descriptor)
    # A hard link is no link for O_NOFOLLOW: it's a second name of a file, perhaps of one in this user's home.
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "it isn't an ordinary file with one name", name)
    return descriptor


def write_file(name: str, data: bytes, folder: int, *, mode: int = 0o666) -> None:
    """Make or replace a file in the folder of a descriptor; a reader sees all of it or nothing.

    Raises:
        OSError: it can't be written.
    """
    part = f".{name}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):  # left by a killed process that had this id
        os.unlink(part, dir_fd=folder)
    descriptor = open_file(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder, mode=mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)  # it replaces a link itself, not its target
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=folder)
        raise
