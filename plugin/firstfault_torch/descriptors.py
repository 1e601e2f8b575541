"""Descriptors that firstfault keeps open in a process. The program may close and reuse any number.

A program may close all descriptors that it doesn't know, as daemons and ``os.closerange(3, 1024)``
do. The kernel then gives their numbers to the files that the program opens next. Two things keep
firstfault from touching those files: a number so high that a program hardly gets it, and a
comparison with the file that was opened before each use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource

FIRST_HIGH_NUMBER = 4000
"""Above the numbers that programs get or name;
the kernel's table of descriptors stays below 64 KiB.
"""
RESERVED_NUMBERS = 64
"""At the end of what the process may open, where its limit is below that."""


class KeptDescriptor:
    """A descriptor that stays open for long; its owner checks `is_ours` before each use.

    Between the check and the use another thread may close the number and open a file. That takes
    microseconds, and the file gets the lowest free number, which isn't this one as long as the
    program has fewer files open.

    Args:
        number: the descriptor, taken over: it is moved to a high number, and isn't inherited by
            other programs.
    """

    def __init__(self, number: int) -> None:
        self.number = move_up(number)
        self._opened = os.fstat(self.number)

    @property
    def is_ours(self) -> bool:
        """Whether the number still is the file that was opened."""
        try:
            return os.path.samestat(os.fstat(self.number), self._opened)
        except OSError:
            return False

    def close(self) -> None:
        """Close the descriptor, unless the program has done so and uses the number."""
        if self.is_ours:
            with contextlib.suppress(OSError):
                os.close(self.number)


def move_up(number: int, first: int | None = None) -> int:
    """Return a descriptor of the same file at the lowest free number from `first` on,
    and close `number`.

    Without `first` it is a high number. If none is free, the lowest that isn't a standard stream's.
    """
    if first is None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        first = (
            FIRST_HIGH_NUMBER
            if limit == resource.RLIM_INFINITY
            else min(FIRST_HIGH_NUMBER, limit - RESERVED_NUMBERS)
        )
    try:
        for lowest in (max(first, 3), 3):
            with contextlib.suppress(OSError):
                return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, lowest)
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 0)
    finally:
        os.close(number)
