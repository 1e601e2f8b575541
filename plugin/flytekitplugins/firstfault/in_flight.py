"""When an exception was on its way out before it left the task function.

``finally: destroy_process_group()`` closes the sockets while the exception is still inside the function, so the peers
fail before it can be recorded. Its time is taken at that call: the document comes later, its time does not.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any, NamedTuple

from flytekitplugins.firstfault.guard import guarded

__all__ = ["Moment", "moment_of", "watch_process_groups"]

_ATTRIBUTE = "__firstfault_moment__"


class Moment(NamedTuple):
    """A point in time by two clocks, nanoseconds."""

    wall_ns: int
    monotonic_ns: int

    @classmethod
    def now(cls) -> Moment:
        """Return this moment."""
        return cls(time.time_ns(), time.monotonic_ns())


def moment_of(error: BaseException) -> Moment:
    """Return when `error` was first seen on its way out: at a process group's end, else now.

    An exception that was raised from another one, after a clean-up in its handler, failed when that one did. What it
    was merely raised in the context of may have been handled long ago.
    """
    noted = None
    seen: set[int] = set()
    current: BaseException | None = error
    with guarded("asking when an exception was first seen"):
        while current is not None and id(current) not in seen:
            seen.add(id(current))
            noted = vars(current).get(_ATTRIBUTE, noted)
            current = current.__cause__
    return noted if isinstance(noted, Moment) else Moment.now()


def watch_process_groups() -> None:
    """Let ``torch.distributed.destroy_process_group`` note the exception in flight; once a process."""
    import torch.distributed as dist  # noqa: PLC0415 - a worker process has it loaded

    original = getattr(dist, "destroy_process_group", None)
    if original is None or hasattr(original, _ATTRIBUTE):
        return

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if error is not None:
            with guarded("noting an exception in flight"):
                vars(error).setdefault(_ATTRIBUTE, Moment.now())
        return original(*args, **kwargs)

    setattr(noting, _ATTRIBUTE, None)
    dist.destroy_process_group = noting
