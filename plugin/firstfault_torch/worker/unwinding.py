"""Exceptions on their way out of a frame in which Python handles none.

When an exception leaves ``for batch in DataLoader(...)``, the frame first drops the iterator, whose ``__del__`` joins
its processes. Meanwhile ``sys.exc_info()`` has no exception: only the frame's place, and the traceback that refers to
it, tell that one was raised. Looking costs a healthy training nothing: the agent asks before it stops the worker.
"""

from __future__ import annotations

import dis
import gc
import inspect
import sys
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from firstfault.model import FrameInfo

_RAISES = {dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE") if name in dis.opmap}


_SEARCHES = 2
"""For a frame's traceback: each looks at all objects of the process, and the agent waits a fraction of a second."""


@dataclass(frozen=True, slots=True)
class Unwinding:
    """An exception that is leaving a frame."""

    frame: FrameType
    """The frame that it is leaving."""
    instruction: int
    """The frame's instruction that raised, or called what raised."""
    raised_at: FrameInfo

    def is_of(self, error: BaseException) -> bool:
        """Whether `error` is this exception."""
        # a user's class may override how attributes are read
        entry: TracebackType | None = BaseException.__getattribute__(error, "__traceback__")
        while entry is not None:
            if entry.tb_frame is self.frame:
                return bool(entry.tb_lasti == self.instruction)
            entry = entry.tb_next
        return False


def handled_exception(thread: int) -> BaseException | None:
    """Return the exception that a thread is handling: in a clean-up, too."""
    item: Any = sys._current_exceptions().get(thread)  # noqa: SLF001 - documented, for debuggers and the like
    if isinstance(item, tuple):
        item = item[1]  # (type, value, traceback): Python 3.10 and 3.11
    return item if isinstance(item, BaseException) else None


def unwinding_of(thread: int) -> Unwinding | None:
    """Return the innermost exception that is leaving a frame of a thread; None if there is none."""
    closes = isinstance(handled_exception(thread), GeneratorExit)
    searches = 0
    above = sys._current_frames().get(thread)  # noqa: SLF001 - as above
    while above is not None and above.f_back is not None:
        frame = above.f_back
        raises = frame.f_code.co_code[frame.f_lasti] in _RAISES
        if (raises or _may_be_released(above, closes=closes)) and searches < _SEARCHES:
            searches += 1
            entry = _entry_of(frame)
            if entry is not None or raises:
                # without an entry the exception is being made: its class is Python code
                return Unwinding(frame, frame.f_lasti, _raised_at(entry) if entry is not None else _place(frame))
        above = frame
    return None


def _may_be_released(frame: FrameType, *, closes: bool) -> bool:
    """Whether a frame may run because the one below drops an object: a finaliser, or a generator that is closed."""
    return frame.f_code.co_name == "__del__" or (closes and bool(frame.f_code.co_flags & inspect.CO_GENERATOR))


def _entry_of(frame: FrameType) -> TracebackType | None:
    """Return the traceback entry of the instruction at which `frame` stands: it raised, and nothing ran since."""
    for entry in gc.get_referrers(frame):
        if type(entry) is TracebackType and entry.tb_frame is frame and entry.tb_lasti == frame.f_lasti:
            return entry
    return None


def _raised_at(entry: TracebackType) -> FrameInfo:
    while entry.tb_next is not None:
        entry = entry.tb_next
    code = entry.tb_frame.f_code
    return FrameInfo(code.co_filename, entry.tb_lineno or 0, code.co_name)


def _place(frame: FrameType) -> FrameInfo:
    return FrameInfo(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)
