"""Whether a call is the last thing that a program does: what fails in it takes no work away.

Most programs end with ``dist.destroy_process_group()``. Their main function has not returned then,
but nothing of it is left to run, which the instructions behind the call show, in its frame and in
each frame below.

Others end with ``sys.exit(main())``, or with ``main()`` of a library for command lines, which calls
``sys.exit`` when the function of the command has returned.
"""

from __future__ import annotations

import dis
from collections.abc import Collection, Iterator
from types import FrameType

_RETURN_INSTRUCTIONS = {"RETURN_VALUE", "RETURN_CONST"}
_HARMLESS_INSTRUCTIONS = {
    "NOP",
    "POP_TOP",
    "LOAD_CONST",
    "LOAD_FAST",
    "STORE_FAST",
    "EXTENDED_ARG",
    "CACHE",
}
"""Instructions between a call and the return of its frame that run no code: they drop the result,
or return a value.
"""
_CALL_INSTRUCTIONS = {"PRECALL", "CALL", "CALL_FUNCTION", "CALL_METHOD"}
"""The call that gets the result of the present one, as in ``sys.exit(main())``: an exit skips it.
"""
_COMMAND_LINE_PACKAGES = {"absl", "click", "typer"}
"""Packages that run the function of a command, and then exit."""
_MODULE_RUNNER = "runpy"
"""The module that runs a program for ``python -m``."""


def is_last_call(frame: FrameType | None) -> bool:
    """Whether the present call of `frame` is the last one of the whole program, if it returns."""
    return all(map(_is_last_in_frame, _iter_callers(frame)))


def is_last_exit(frame: FrameType, handled: BaseException | None) -> bool:
    """Whether `frame` calls ``sys.exit`` where nothing of the program is left to run.

    Then either the last statement of the program calls it itself, or a library for command lines
    that this statement has called. `handled`: the exception that is handled there. A library's own
    one, which carries the exit code, changes nothing.
    """
    callers = list(_iter_callers(frame))
    while callers and _find_package(callers[-1]) == _MODULE_RUNNER:
        callers.pop()
    if not callers:
        return False
    *library, program = callers
    if not library:
        return handled is None and _is_last_in_frame(program)
    raised = handled.__traceback__ if handled is not None else None
    while raised is not None:
        library.append(raised.tb_frame)
        raised = raised.tb_next
    is_library = all(_find_package(item) in _COMMAND_LINE_PACKAGES for item in library)
    has_context = handled is not None and handled.__context__ is not None
    return (
        is_library
        and not has_context
        and _is_last_in_frame(program, _HARMLESS_INSTRUCTIONS | _CALL_INSTRUCTIONS)
    )


def _iter_callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those below it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _find_package(frame: FrameType) -> str:
    """Return the top-level package or module of a frame's code."""
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _is_last_in_frame(frame: FrameType, skipped: Collection[str] = _HARMLESS_INSTRUCTIONS) -> bool:
    behind = (item for item in dis.get_instructions(frame.f_code) if item.offset > frame.f_lasti)
    rest = next((item.opname for item in behind if item.opname not in skipped), "")
    return rest in _RETURN_INSTRUCTIONS
