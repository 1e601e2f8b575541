"""Records the exception or exit that ends a worker that is a program.
`firstfault_start` imports and calls it.

Python keeps no `SystemExit` that has left the program. The last instruction of the outermost frame
shows whether the program reached its end, and `sys.exit` first notes where it is called, with which
argument, and which exception is handled there. A program that exits with success in its last
statement, such as the ``sys.exit(main())`` of console scripts, has reached its end, too.
"""

from __future__ import annotations

import builtins
import dis
import os
import sys
import threading
from _sitebuiltins import Quitter
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FrameType, ModuleType, TracebackType
from typing import Any

from firstfault.model import ExceptionInfo
from firstfault.utils.frames import get_current_frames
from firstfault_torch.compat.torch_worker import has_process_group
from firstfault_torch.engine import PlainEngine
from firstfault_torch.failures.capture import CAPTURED_ATTRIBUTE, capture, safe_text
from firstfault_torch.guard import call_with_timeout, suppress_internal_errors
from firstfault_torch.worker.in_flight import is_clean_exit
from firstfault_torch.worker.last_call import is_last_exit
from firstfault_torch.worker.worker_monitor import (
    WorkerMonitor,
    current_monitor,
    open_monitor,
    record_end,
)

_WORKER_PID = os.getpid()
_BITS_OF_C_LONG = 64
"""Of C's long: Python exits with -1 for a larger number."""
_outermost: list[FrameType] = []
"""The program's outermost frame, from `begin` to `record_exit`."""


@dataclass(frozen=True, slots=True)
class _ExitCall:
    """A call of `sys.exit`."""

    at: int
    """The outermost frame's instruction at that time."""
    exit_data: Any = None
    """The exit as `ExceptionInfo`. None if the program had no process group, or if reading the exit
    took too long.
    """
    is_end: bool = False
    """Whether nothing of the program was left to run, and it exits with success."""


_exit_calls: list[_ExitCall] = []
"""The last call of `sys.exit` that may end the program; empty before it."""


class _Exit:
    """`sys.exit`, `exit` or `quit`, which notes its call first;
    so no frame of this module is in a traceback.
    """

    def __init__(self, module: ModuleType, name: str) -> None:
        call = getattr(module, name)
        self._call = call
        self.__module__, self.__name__, self.__doc__ = module.__name__, name, call.__doc__

        def note(kind: type, *arguments: Any, **more: Any) -> Any:
            given = (*arguments, *more.values())
            _note_exit(sys._getframe(1), given[0] if given else None)  # noqa: SLF001 - documented
            return object.__new__(kind)

        # Python makes an instance of a class in two calls: `__new__` notes the call, and has
        # returned when `__init__`, the real sys.exit, raises. So neither is in the traceback.
        self._noted = type(name, (), {"__new__": note, "__init__": staticmethod(self._call)})

    def __repr__(self) -> str:
        return repr(self._call)

    def __reduce__(self) -> str:
        return self.__name__  # of its module's global

    # A property: for a call Python first gets this attribute, and then calls the result with the
    # arguments.
    @property
    def __call__(self) -> Any:
        return self._noted


def _note_exit(frame: FrameType, argument: Any) -> None:
    """Note that a frame calls `sys.exit`, if that ends this program."""
    with suppress_internal_errors("noting an exit"):
        # A forked child and other threads don't end this program by sys.exit.
        is_main = (
            os.getpid() == _WORKER_PID and threading.current_thread() is threading.main_thread()
        )
        if not _outermost or not is_main:
            return
        # the exception that the caller handles: this function handles none
        handled = sys.exc_info()[1]
        is_end = is_clean_exit(SystemExit(argument)) and is_last_exit(frame, handled)
        exit_data = _capture_exit(frame, argument, handled) if has_process_group() else None
        # Only the last call: an earlier one was caught, or this one wouldn't run.
        _exit_calls[:] = [_ExitCall(_outermost[0].f_lasti, exit_data, is_end)]


def begin() -> None:
    """Begin to watch this process: its agent may ask it for its state."""
    with suppress_internal_errors("preparing to record"):
        _monitor()
        # The import that calls this may be deep in the program. Its outermost frame is kept: after
        # the program's end, `f_lasti` shows the last instruction.
        # as above
        frame = get_current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            _outermost[:], frame = [frame], frame.f_back
        for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            # Not what a program has put there: it may return instead of raising.
            if type(getattr(module, name, None)) in {BuiltinFunctionType, Quitter}:
                setattr(module, name, _Exit(module, name))


def record_exception(error: BaseException) -> None:
    """Make a document about the exception that ends this process durable."""
    with suppress_internal_errors("recording an exception"):
        if (
            _monitor().in_flight.escaped_error is None
        ):  # else an exception of this program has been recorded
            record_end(_monitor(), error, os.getppid())


def record_finish() -> None:
    """Inform the agent that this program has run to its end: its threads have ended,
    its exit functions haven't run.
    """
    with suppress_internal_errors("reporting the end of the program"):
        if (
            _outermost
            and _has_reached_end(_outermost[-1])
            and _monitor().in_flight.escaped_error is None
        ):
            _monitor().finishes()


def record_exit() -> None:
    """Record that this process is about to exit: if it still has a process group,
    its peers may wait for it.
    """
    with suppress_internal_errors("recording an exit"):
        # pop() also drops the frame, which holds the program's globals and objects.
        frame = _outermost.pop() if _outermost else None
        error = _find_end(frame) if frame is not None else SystemExit()
        is_call = frame is not None and not _has_returned(frame)
        del frame
        # Flyte 2's runtime catches the exception of its task, which its observer records, and then
        # exits with 1.
        if has_process_group() and _monitor().in_flight.escaped_error is None:
            _monitor().exits(error, is_kept=False, is_announced=is_call)


def _capture_exit(frame: FrameType, argument: Any, handled: BaseException | None) -> Any:
    """Return an exit as `ExceptionInfo`, because the exceptions would hold the program's objects.
    Return None if nothing is recorded, or if reading takes too long.
    """
    if (node_context := _monitor().node_context) is None:
        return None
    error = _build_exit(frame)
    error.__context__ = handled

    def read() -> ExceptionInfo:
        message = _describe_argument(argument)  # calls the `__str__` of the program's object
        return replace(capture(error, in_flight=True), message=message)

    seconds = node_context.upload_deadline_seconds / 2
    return call_with_timeout(read, seconds, "noting an exit", local=True)


def _describe_argument(argument: Any) -> str:
    """Return the exit code that Python makes of an argument of `sys.exit`, or the text that it
    prints before it exits with 1.
    """
    if argument is None:
        return "0"
    if isinstance(argument, int):
        number = int.__index__(argument)
        return str(number & 0xFF if number.bit_length() < _BITS_OF_C_LONG else 0xFF)
    text = safe_text(argument)
    # quoted, to differ from an exit code
    return repr(text) if text.strip().lstrip("-").isdigit() else text


def _find_end(frame: FrameType) -> SystemExit:
    """Return the exit of a program, given its outermost frame."""
    if _has_reached_end(frame):
        return SystemExit("its program reached its end")
    error = _build_exit(frame)
    call = _find_call(frame)
    vars(error)[CAPTURED_ATTRIBUTE] = call.exit_data if call is not None else None
    return error


def _find_call(frame: FrameType) -> _ExitCall | None:
    """Return the call of `sys.exit` that has ended a program, given its outermost frame."""
    # A handler may have caught an earlier SystemExit: the note counts only if the outermost frame
    # is still at the same instruction.
    return next((call for call in _exit_calls if call.at == frame.f_lasti), None)


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


def _build_exit(frame: FrameType) -> SystemExit:
    return SystemExit().with_traceback(TracebackType(None, frame, frame.f_lasti, frame.f_lineno))


def _monitor() -> WorkerMonitor:
    return current_monitor() or open_monitor(PlainEngine(), is_program=True)
