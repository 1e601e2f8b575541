"""Records the exception or exit that ends a worker that is a program.
`firstfault_start` imports and calls it.

Python keeps no `SystemExit` that has left the program. The last instruction of the outermost frame
shows whether the program reached its end, and `sys.exit` first notes where it is called, with which
code, and which exception is handled there. A program whose last statement exits with success, such
as the ``sys.exit(main())`` of console scripts, has reached its end, too.
"""

from __future__ import annotations

import builtins
import dis
import os
import sys
import threading
from dataclasses import dataclass
from functools import partial
from types import FrameType, ModuleType, TracebackType
from typing import Any

from firstfault_torch.compat.torch_worker import has_process_group
from firstfault_torch.engine import PlainEngine
from firstfault_torch.failures.capture import NOTED, capture
from firstfault_torch.guard import call_with_timeout, suppress_internal_errors
from firstfault_torch.worker.in_flight import is_clean_exit
from firstfault_torch.worker.last_call import is_last_exit
from firstfault_torch.worker.worker_monitor import (
    WorkerMonitor,
    current_monitor,
    open_monitor,
    record_end,
)

_WORKER = os.getpid()
_outermost: list[FrameType] = []


@dataclass(frozen=True, slots=True)
class _ExitCall:
    """A call of `sys.exit`."""

    at: int
    """The outermost frame's instruction at that time."""
    noted: Any = None
    """The exit as data; None: the program had no process group."""
    is_end: bool = False
    """Whether nothing of the program was left to run, and it exits with success."""


_called: list[_ExitCall] = []
"""The last call."""


class _Exit:
    """`sys.exit`, `exit` or `quit`, which notes its call first;
    so no frame of this module is in a traceback.
    """

    def __init__(self, module: ModuleType, name: str) -> None:
        call = getattr(module, name)

        # Python runs `__new__`, whose frame is gone when it then calls `__init__`: the real
        # sys.exit, which is no method because it's written in C, or an object.
        class Noting:
            def __new__(cls, *arguments: Any) -> Any:
                _note_exit(sys._getframe(1), *arguments)  # noqa: SLF001 - documented
                return object.__new__(cls)

            __init__ = call

        self._noting = Noting
        self._call = call
        self.__module__, self.__name__, self.__doc__ = module.__name__, name, call.__doc__

    def __repr__(self) -> str:
        return repr(self._call)

    def __reduce__(self) -> str:
        return self.__name__  # of its module's global

    # A property: for a call Python first gets this attribute, and then calls the result. This
    # method has returned by then, so it isn't in the traceback.
    @property
    def __call__(self) -> Any:
        return self._noting


def _note_exit(frame: FrameType, code: Any = None, *_: Any) -> None:
    """Note that a frame calls `sys.exit`, if that ends this program."""
    with suppress_internal_errors("noting an exit"):
        # A forked child and other threads don't end this program by sys.exit.
        is_main = os.getpid() == _WORKER and threading.current_thread() is threading.main_thread()
        if not _outermost or not is_main:
            return
        handled = sys.exc_info()[1]
        is_end = is_clean_exit(SystemExit(code)) and is_last_exit(frame, handled)
        noted = _capture_exit(frame, handled) if has_process_group() else None
        # Only the last call: an earlier one was caught, or this one wouldn't run.
        _called[:] = [_ExitCall(_outermost[0].f_lasti, noted, is_end)]


def begin() -> None:
    """Begin to watch this process: its agent may ask it for its state."""
    with suppress_internal_errors("preparing to record"):
        _monitor()
        # The import that calls this may be deep in the program. Its outermost frame is kept: after
        # the program's end, `f_lasti` shows the last instruction.
        # as above
        frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
        while frame is not None:
            _outermost[:], frame = [frame], frame.f_back
        for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            if hasattr(module, name):
                setattr(module, name, _Exit(module, name))


def record_exception(error: BaseException) -> None:
    """Make a document about the exception that ends this process durable."""
    with suppress_internal_errors("recording an exception"):
        if _monitor().in_flight.left is None:  # else an exception of this program has been recorded
            record_end(_monitor(), error, os.getppid())


def record_finish() -> None:
    """Inform the agent that this program has run to its end: its threads have ended,
    its exit functions haven't run.
    """
    with suppress_internal_errors("reporting the end of the program"):
        if _outermost and _has_reached_end(_outermost[-1]) and _monitor().in_flight.left is None:
            _monitor().finishes()


def record_exit() -> None:
    """Record that this process is about to exit: if it still has a process group,
    its peers may wait for it.
    """
    with suppress_internal_errors("recording an exit"):
        # pop() also drops the frame, which holds the program's globals and objects.
        error = _find_end(_outermost.pop()) if _outermost else SystemExit()
        # Flyte 2's runtime catches the exception of its task, which its observer records, and then
        # exits with 1.
        if has_process_group() and _monitor().in_flight.left is None:
            _monitor().exits(error, is_kept=False)


def _capture_exit(frame: FrameType, handled: BaseException | None) -> Any:
    """Return an exit as data: the exceptions would hold the program's objects."""
    if (node_context := _monitor().node_context) is None:
        return None
    error = _exit_at(frame)
    error.__context__ = handled
    read = partial(capture, error, in_flight=True)
    seconds = node_context.upload_deadline_seconds / 2
    return call_with_timeout(read, seconds, "noting an exit", local=True)


def _find_end(frame: FrameType) -> SystemExit:
    """Return the exit of a program, given its outermost frame."""
    if _has_reached_end(frame):
        return SystemExit("its program reached its end")
    error = _exit_at(frame)
    call = _find_call(frame)
    vars(error)[NOTED] = call.noted if call is not None else None
    return error


def _find_call(frame: FrameType) -> _ExitCall | None:
    """Return the call of `sys.exit` that has ended a program, given its outermost frame."""
    # A handler may have caught an earlier SystemExit: the note counts only if the outermost frame
    # is still at the same instruction.
    return next((call for call in _called if call.at == frame.f_lasti), None)


def _has_reached_end(frame: FrameType) -> bool:
    """Whether a program ran to its end, given its outermost frame."""
    call = _find_call(frame)
    return _has_returned(frame) or (call is not None and call.is_end)


def _has_returned(frame: FrameType) -> bool:
    """Whether a program's outermost frame has reached its end,
    and wasn't left by an exit or another exception.
    """
    # `co_code` returns the original instructions: CPython 3.11 specializes a separate copy.
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def _exit_at(frame: FrameType) -> SystemExit:
    return SystemExit().with_traceback(TracebackType(None, frame, frame.f_lasti, frame.f_lineno))


def _monitor() -> WorkerMonitor:
    return current_monitor() or open_monitor(PlainEngine(), is_program=True)
