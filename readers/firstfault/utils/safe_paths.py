"""Opens and makes files in folders where another user of the machine may have
prepared links or folders.

A path is resolved anew at each use, and in a shared folder somebody else may replace a part of it.
So each part below a trusted folder is opened relative to the descriptor of the part above it, and
no link is followed.
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


class ForeignPathError(PermissionError):
    """Another user has made what is at this path, or has prepared a link there."""

    def __init__(self, reason: str, name: str) -> None:
        super().__init__(errno.EPERM, reason, name)


def open_below(base: Path, names: Iterable[str], *, mode: int = 0o777) -> int:
    """Open the folder `names` below `base`, make what is missing,
    and return a descriptor with O_PATH.

    `base` itself may be reached through links: the user or their administrator chose it. Below it
    no link is followed, and each folder belongs to this user or to the owner of `base`. The second
    is necessary because a file system may show one owner for all (FUSE, an NFS that maps users),
    and a container's root may write into a user's folder.

    Raises:
        ForeignPathError: there is a link, a file, or another user's folder.
        OSError: nothing can be made.
    """
    base.mkdir(parents=True, exist_ok=True)
    folder = os.open(base, _FOLDER)
    try:
        for name in names:
            below = enter(name, folder, mode=mode)
            os.close(folder)
            folder = below
    except OSError:
        os.close(folder)
        raise
    return folder


def enter(name: str, folder: int, *, mode: int = 0o777) -> int:
    """Open a folder in the folder of a descriptor, and make it if it's missing,
    as `open_below` does.

    Raises:
        ForeignPathError: it's a link, a file, or belongs to another user than the folder above it.
        OSError: it can't be made.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=folder)
    try:
        below = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except NotADirectoryError:
        raise ForeignPathError("it's a link or a file, not a folder", name) from None
    try:
        # The owner of the trusted folder is passed on: below it, each folder's owner was allowed by
        # the one above.
        owners = {os.geteuid(), os.fstat(folder).st_uid}
        if os.fstat(below).st_uid not in owners:
            check_owner(below, {_find_owner_when_new(folder)}, name)
    except OSError:
        os.close(below)
        raise
    return below


def _find_owner_when_new(folder: int) -> int:
    """Return whom a file system names as the owner of what this process makes:
    an NFS may map root to nobody.
    """
    probe = f".firstfault-{os.getpid()}-{os.urandom(4).hex()}"
    os.mkdir(probe, 0o700, dir_fd=folder)
    try:
        return os.stat(probe, dir_fd=folder, follow_symlinks=False).st_uid
    finally:
        os.rmdir(probe, dir_fd=folder)


def check_owner(descriptor: int, owners: Collection[int], name: str) -> None:
    """Check that one of these users owns what a descriptor refers to.

    Raises:
        ForeignPathError: somebody else does.
    """
    owner = os.fstat(descriptor).st_uid
    if owner not in owners:
        raise ForeignPathError(f"it belongs to another user, with id {owner}", name)


def open_file(name: str, flags: int, folder: int, *, mode: int = 0o666) -> int:
    """Open a file in the folder of a descriptor; it is no link, no pipe,
    and has no second name elsewhere.

    Raises:
        ForeignPathError: it is one of these.
        OSError: it can't be opened.
    """
    # O_NONBLOCK: the open of a prepared FIFO would wait for its other end.
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags | safe, mode, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ForeignPathError("it's a link", name) from None
    status = os.fstat(descriptor)
    # A hard link is no link for O_NOFOLLOW: it's a second name of a file, perhaps of one in this
    # user's home.
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise ForeignPathError("it isn't an ordinary file with one name", name)
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
        # it replaces a link itself, not its target
        os.rename(
            part,
            name,
            src_dir_fd=folder,
            dst_dir_fd=folder,
        )
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=folder)
        raise
