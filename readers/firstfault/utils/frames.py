"""What all threads of this process do, read without a deadlock."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def get_current_frames() -> dict[int, FrameType]:
    """Return the topmost frame of each thread, by the thread's identifier."""
    return _without_collections(sys._current_frames)  # noqa: SLF001 - documented


def get_current_exceptions() -> dict[int, Any]:
    """Return what each thread handles, by the thread's identifier: an exception, before Python 3.12
    a tuple as of `sys.exc_info`, or None.
    """
    return _without_collections(sys._current_exceptions)  # noqa: SLF001 - documented


def _without_collections(read: Callable[[], T]) -> T:
    # Python before 3.11.5 holds a lock of the interpreter while it makes the result. If that starts
    # a collection of garbage, and the garbage has an ended thread, the process hangs for ever, with
    # the GIL (https://github.com/python/cpython/issues/106883).
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return read()
    finally:
        if was_enabled:
            gc.enable()
