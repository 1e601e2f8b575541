"""The exception that ended a process, raised or only printed."""

from __future__ import annotations

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
from firstfault.exceptions.retried_step import (
    LINES_PROVING_SURVIVAL,
    TRACEBACK_TITLE,
    find_original_failure,
)
from firstfault.exceptions.stack_dumps import find_crash_frames
from firstfault.exceptions.stack_position import PROGRAM_ENDED, locate_main_thread
from firstfault.model import ExceptionInfo, FrameInfo, Subject, WorkerError
from firstfault.model.failure import get_shell_signal
from firstfault.utils.lazy_pattern import LazyPattern


def find_ending_exception(failure: WorkerError) -> ExceptionInfo | None:
    """Return the exception that ended a process: the exception that it raised,
    else the last one that it printed.

    The printed exception counts

    - before an exit without a reason, or an abort for which native code printed no reason;
    - if the program had ended, and the process was stopped before it could write a document;
    - if the program tried again, and failed only because the first try had left its process group,
      or the step at which its peers were.
    """
    raised = failure.exception
    if raised is not None and is_double_init_error(raised):
        return add_first_try(raised, to_plain_lines(failure.printed[-STDERR_CHARS_READ:]))
    if (first_try := find_original_failure(failure)) is not None:
        cause = replace(first_try, relation="context", causes=())
        return (
            first_try
            if raised is None
            else replace(raised, causes=(*raised.causes, cause, *first_try.causes))
        )
    if raised is not None and get_short_name(find_causes(raised).first) != "SystemExit":
        return raised
    if raised is None and failure.stopped_by_agent:
        has_ended = (
            TRACEBACK_TITLE in failure.printed
            and locate_main_thread(failure).exit_stage == PROGRAM_ENDED
        )
        return (
            getattr(find_printed_exception(failure.printed), "exception", None)
            if has_ended
            else None
        )
    return _find_printed_before_exit(failure)


_FATAL_WORD = LazyPattern(r"(?i)\b(?:fatal|critical|panic|abort\w*|giving[ ]up)\b")

# An abort without a reason
_ABORT_WITHOUT_REASON = LazyPattern(
    r"terminate[ ]called[ ]without[ ]an[ ]active[ ]exception|^Aborted\b"
)


def _find_printed_before_exit(failure: WorkerError) -> ExceptionInfo | None:
    """Return the exception printed before an exit or an abort that gives no reason,
    else the raised one.
    """
    raised = failure.exception
    if failure.sent_signals or failure.expired is not None or failure.subject is Subject.AGENT:
        return raised
    signal = failure.signal or get_shell_signal(failure.exit_code)
    # a program that runs as a worker records `sys.exit(3)` before its process has an exit code
    code = (raised.message if raised is not None else "") or str(failure.exit_code)
    has_error_code = code.lstrip("-").isdigit() and code != "0"
    if signal != "SIGABRT" if signal else not has_error_code:
        return raised
    if signal and (thrown := _find_exception_thrown_to_cpp(failure.printed)):
        return thrown
    # native code printed why it aborted, not only that it did
    if signal and any(
        not _ABORT_WITHOUT_REASON.search(line)
        for line in find_native_lines(failure.printed.splitlines())
    ):
        return raised
    printed = find_printed_exception(failure.printed)
    if printed is None or (signal and _aborted_elsewhere(failure, printed.exception)):
        return raised
    # lines after the traceback, without a level or a date, are part of the message for all we can
    # see
    message_lines = printed.exception.message.splitlines()[1:]
    unindented = [line for line in message_lines if line and not line[0].isspace()]
    if len(unindented) + len(printed.after) > LINES_PROVING_SURVIVAL:
        return raised
    # "giving up" after the traceback, then `sys.exit` outside of a handler: the program exits for
    # its own reason
    has_own_reason = raised is not None and any(
        map(_FATAL_WORD.search, (*message_lines, *printed.after))
    )
    return raised if has_own_reason else printed.exception


def _aborted_elsewhere(failure: WorkerError, exception: ExceptionInfo) -> bool:
    """Whether Python, when the process aborted, was in another function than the exception."""
    called = {(frame.file, frame.function) for frame in find_crash_frames(failure)}
    return (
        bool(called and exception.frames)
        and (exception.frames[0].file, exception.frames[0].function) not in called
    )


_PYTHON_ERROR_TEXT = LazyPattern(
    r"(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Iteration|Timeout))(?::\s(?P<message>.*))?$"
)

# A frame as pybind11 prints it, innermost first
_PYBIND_FRAME = LazyPattern(
    r"(?m)^\s{1,8}(?P<file>/[^\n()]{1,300})\((?P<line>\d{1,9})\):[ ](?P<function>\S{1,200})$"
)


def _find_exception_thrown_to_cpp(stderr: str) -> ExceptionInfo | None:
    """Return the Python exception that C++ couldn't handle, such as one of an autograd hook, or
    None if there is none.
    """
    match = _PYTHON_ERROR_TEXT.match(find_cpp_exception(stderr))
    if match is None:
        return None
    matches = _PYBIND_FRAME.finditer(stderr)
    frames = [FrameInfo(frame["file"], int(frame["line"]), frame["function"]) for frame in matches]
    return ExceptionInfo(match["type"], match["message"] or "", frames=tuple(reversed(frames)))
