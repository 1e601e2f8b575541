"""The private names of torch that firstfault uses inside a training process."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from firstfault_torch.compat import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["flight_recorders", "group_teardown"]

_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""NCCL's flight recorder, in builds with NCCL since torch 2.5; that of all other backends, since 2.8."""


def flight_recorders() -> list[Callable[[], Any]]:
    """Return the functions that dump torch's flight recorders as JSON, NCCL's first; later torch fills both alike.

    A torch built without distributed support, or before it had a recorder, lacks it: there is no warning.
    """
    try:
        from torch._C import _distributed_c10d as c10d  # noqa: PLC0415 - a worker has it loaded
    except ImportError:
        return []
    return [getattr(c10d, name) for name in _RECORDERS if hasattr(c10d, name)]


def group_teardown() -> types.FunctionType | None:
    """Return ``torch.distributed.destroy_process_group``, whose code is replaced; None if that is not possible."""
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415 - a worker process has it loaded

    function = getattr(c10d, "destroy_process_group", None)
    if not isinstance(function, types.FunctionType):
        warn_once("destroy_process_group", "an exception is recorded when it leaves the task function")
        return None
    return function
