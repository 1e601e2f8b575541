"""What this process could use of its machine when it failed: space of file systems, limits, open files."""

from __future__ import annotations

import os
import re
import resource
import tempfile
from functools import partial
from typing import TYPE_CHECKING

from firstfault.exceptions.first_cause import all_links
from firstfault.model import FileSystem, SystemState
from firstfault_torch.budgets import FILE_SYSTEMS_S
from firstfault_torch.guard import bounded, caught
from firstfault_torch.worker.in_flight import chain_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from firstfault.model import ExceptionInfo

_OF_MEMORY = ("RLIMIT_AS", "RLIMIT_DATA")
"""Above the machine's memory they limit nothing."""
_LIMITS = (*_OF_MEMORY, "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC")
_MAX_PATHS = 4
_OF_RESOURCES = re.compile(
    r"\b(?:writ(?:e|ing)|unexpected pos|no space|quota|mmap|ftruncate|/dev/shm|shared memory|bus error|allocat|memory"
    r"|open files|can't start new thread|pthread)",
    re.IGNORECASE,
)
"""Texts of failures that a limit of the machine or of the process may explain."""
_TYPES = {"OSError", "MemoryError"}


def system_state(error: BaseException, exception: ExceptionInfo) -> SystemState:
    """Return the state if it may explain an exception or one of its causes, else nothing; it takes at most 0.25 s.

    Args:
        error: the exception; an OSError has the path that it is about.
        exception: the same as data.
    """
    if not any(map(_may_be_explained, all_links(exception))):
        return SystemState()
    found: list[FileSystem] = []
    bounded(partial(_measure, _paths_of(error), found), FILE_SYSTEMS_S, "asking for the space of file systems")
    open_files, _ = caught(lambda: len(os.listdir("/proc/self/fd")), OSError)  # noqa: PTH208 - names alone
    return SystemState(tuple(found), tuple(_limits()), open_files)


def _paths_of(error: BaseException) -> list[str]:
    """Return the paths that an exception or one of its causes is about; else those where programs write."""
    named = [
        os.fsdecode(name)
        for link in chain_of(error)
        if isinstance(link, OSError)
        for name in (link.filename, link.filename2)
        if isinstance(name, str | bytes) and name
    ]
    return named or [os.curdir, tempfile.gettempdir(), "/dev/shm"]  # noqa: S108 - as torch's


def _measure(paths: Iterable[str], found: list[FileSystem]) -> None:
    """Add the file systems one by one: those that were measured count, also if a later one does not answer."""
    for path in list(dict.fromkeys(paths))[:_MAX_PATHS]:
        existing, _ = caught(lambda path=path: _existing(path), Exception)  # type: ignore[misc]
        space, _ = caught(lambda existing=existing: os.statvfs(existing), Exception)  # type: ignore[misc]
        if space is not None and not space.f_flag & os.ST_RDONLY:  # a read-only image has no free space
            size = space.f_frsize
            sizes = (space.f_bavail * size, space.f_blocks * size, space.f_favail, space.f_files)
            found.append(FileSystem(os.path.abspath(path), *sizes))  # noqa: PTH100 - asks no file system


def _existing(path: str) -> str:
    """Return the nearest folder above a path that exists, or the path."""
    path = os.path.abspath(path)  # noqa: PTH100 - as above
    while not os.path.exists(path) and path != os.path.dirname(path):  # noqa: PTH110, PTH120 - texts
        path = os.path.dirname(path)  # noqa: PTH120 - as above
    return path


def _limits() -> Iterable[tuple[str, int]]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in _LIMITS:
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY and not (name in _OF_MEMORY and soft > memory):
            yield name, soft


def _may_be_explained(link: ExceptionInfo) -> bool:
    return bool({link.type, *link.bases} & _TYPES) or _OF_RESOURCES.search(link.message[:1000]) is not None
