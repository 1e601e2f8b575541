"""The exception that ended a process: raised, or only printed."""

from __future__ import annotations

import re
from dataclasses import replace

from firstfault.exceptions.exceptions_in_text import get_short_name
from firstfault.exceptions.fatal_text import find_cpp_exception, find_native_lines
from firstfault.exceptions.first_cause import find_causes
from firstfault.exceptions.printed_tracebacks import (
    STDERR_CHARS_READ,
    add_first_try,
    find_printed_exception,
    is_double_init_error,
    to_plain_lines,
)
from firstfault.exceptions.retried_step import LINES_PROVING_SURVIVAL, TRACEBACK_TITLE, find_original_failure
from firstfault.exceptions.stack_dumps import find_crash_frames
from firstfault.exceptions.stack_position import PROGRAM_ENDED, locate_main_thread
from firstfault.model import ExceptionInfo, FrameInfo, Subject, WorkerError
from firstfault.model.failure import signal_of_exit_code

_FATAL = re.compile(r"\b(?:fatal|critical|panic|abort\w*|giving up)\b", re.IGNORECASE)
_PYTHONS = re.compile(
    r"(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Iteration|Timeout))(?::\s(?P<message>.*))?$"
)
_AT = re.compile(r"^\s{1,8}(?P<file>/[^\n()]{1,300})\((?P<line>\d{1,9})\): (?P<function>\S{1,200})$", re.MULTILINE)
"""A frame as pybind11 prints it, the innermost first."""
_ONLY_AN_END = re.compile(r"terminate called without an active exception|^Aborted\b")


def find_ending_exception(failure: WorkerError) -> ExceptionInfo | None:
    """Return the exception that ended a process: the one that it raised, else the last one that it printed.

    What it printed counts for an exit without a reason, for an abort without native code's own reason, for a program
    that had ended and whose process was stopped before it left a document, and for a second try that failed only
    because the first one had left its process group, or the step that its peers were at.
    """
    raised = failure.exception
    if raised is not None and is_double_init_error(raised):
        return add_first_try(raised, to_plain_lines(failure.printed[-STDERR_CHARS_READ:]))
    if (first := find_original_failure(failure)) is not None:
        cause = replace(first, relation="context", causes=())
        return first if raised is None else replace(raised, causes=(*raised.causes, cause, *first.causes))
    if raised is not None and get_short_name(find_causes(raised).first) != "SystemExit":
        return raised
    if raised is None and failure.stopped_by_agent:
        has_ended = TRACEBACK_TITLE in failure.printed and locate_main_thread(failure).exit_stage == PROGRAM_ENDED
        return getattr(find_printed_exception(failure.printed), "exception", None) if has_ended else None
    return _before_end(failure)


def _before_end(failure: WorkerError) -> ExceptionInfo | None:
    """Return the exception that a process printed before an exit or an abort that gives no reason, else its own."""
    raised = failure.exception
    if failure.sent_signals or failure.expired is not None or failure.subject is Subject.AGENT:
        return raised
    signal = failure.signal or signal_of_exit_code(failure.exit_code)
    # a program that is a worker doesn't know its own exit code
    code = (raised.message if raised is not None else "") or str(failure.exit_code)
    if signal != "SIGABRT" if signal else not code.lstrip("-").isdigit() or code == "0":
        return raised
    if signal and (hooked := _thrown_exception(failure.printed)):
        return hooked
    # native code printed why it aborted, not only that it did
    if signal and any(not _ONLY_AN_END.search(line) for line in find_native_lines(failure.printed.splitlines())):
        return raised
    printed = find_printed_exception(failure.printed)
    if printed is None or (signal and _is_aborted_elsewhere(failure, printed.exception)):
        return raised
    # lines without a level or a date can't be told from the exception's message
    more = [line for line in printed.exception.message.splitlines()[1:] if line and not line[0].isspace()]
    if len(more) + len(printed.after) > LINES_PROVING_SURVIVAL:
        return raised  # it printed so much later that it can't have ended because of the exception
    # `sys.exit` outside of a handler: the program had dealt with the exception, and may tell why it ends
    later = (*printed.exception.message.splitlines()[1:], *printed.after)
    is_dealt_with = raised is not None and any(map(_FATAL.search, later))
    return raised if is_dealt_with else printed.exception


def _is_aborted_elsewhere(failure: WorkerError, exception: ExceptionInfo) -> bool:
    """Whether Python was in another function, when the process aborted, than the one that printed the exception."""
    called = {(frame.file, frame.function) for frame in find_crash_frames(failure)}
    return bool(called and exception.frames) and (exception.frames[0].file, exception.frames[0].function) not in called


def _thrown_exception(stderr: str) -> ExceptionInfo | None:
    """Return a Python exception that C++ could not handle, as one of an autograd hook; None: it had another reason."""
    match = _PYTHONS.match(find_cpp_exception(stderr))
    if match is None:
        return None
    frames = [FrameInfo(found["file"], int(found["line"]), found["function"]) for found in _AT.finditer(stderr)]
    return ExceptionInfo(match["type"], match["message"] or "", frames=tuple(reversed(frames)))
