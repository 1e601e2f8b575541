"""The exception that ended a process, raised or only printed, or the first failure of a step that a
program tried again.

Rank 3's step failed with a full disk, while its peers reached the next collective. Rank 3 tried the
step again, and failed in a collective that no peer took part in. Rank 3's last exception is a
timeout, like that of its victims; the exception of its first try, which it printed, is the root
cause.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache

from firstfault.exceptions.exceptions_in_text import get_short_name
from firstfault.exceptions.fatal_text import find_cpp_exception, find_native_lines
from firstfault.exceptions.first_cause import find_causes, iter_exceptions
from firstfault.exceptions.printed_tracebacks import (
    STDERR_CHARS_READ,
    add_first_try,
    find_chain_spans,
    find_printed_exception,
    find_tracebacks,
    is_double_init_error,
    parse_chain,
    to_plain_lines,
)
from firstfault.exceptions.stack_position import (
    PROGRAM_ENDED,
    find_crash_frames,
    is_process_group_code,
    locate_main_thread,
)
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


TRACEBACK_TITLE = "Traceback (most recent call last)"
_MIN_TRIES = 2
LINES_PROVING_SURVIVAL = 10
"""If a process printed more lines after a traceback, it survived the exception."""


def find_original_failure(failure: WorkerError) -> ExceptionInfo | None:
    """Return the exception of a step's first try, if a later try failed in a collective.

    The process had printed it, from the same line of the user's code. Returns None if no step was
    tried again, or if the first try isn't known or failed in a collective, too. If the program
    raised that it gave up, any first try counts.
    """
    if failure.subject is Subject.AGENT or TRACEBACK_TITLE not in failure.printed:
        return None
    raised, text = failure.exception, failure.printed[-STDERR_CHARS_READ:]
    if raised is not None and (first_try := _find_first_printed_try(raised, text)) is not None:
        return first_try
    is_exit = raised is not None and get_short_name(find_causes(raised).first) == "SystemExit"
    last_try = None if is_exit else raised
    if last_try is not None and not _is_from_collective(last_try):
        return None
    # a process that exits without an exception must have printed at least two tries
    if last_try is None and (
        text.count(TRACEBACK_TITLE) < _MIN_TRIES or not is_process_group_code(text)
    ):
        return None
    lines, spans = _find_chains(text)
    if last_try is None:
        chains = (parse_chain(lines, *span) for span in reversed(spans))
        exceptions = (chain.exception for chain in chains if chain is not None)
        last_try = next(filter(_is_from_collective, exceptions), None)
    frames = (
        (frame for link in iter_exceptions(last_try) for frame in link.frames)
        if last_try is not None
        else ()
    )
    calls = {f'File "{frame.file}", line {frame.line}, in {frame.function}' for frame in frames}
    # the first traceback with an outermost frame in which the last try failed, too
    same_call = (
        span for span in spans if "".join(lines[span[1] + 1 : span[1] + 2]).lstrip(" |") in calls
    )
    first_chain = next((parse_chain(lines, *span) for span in same_call), None)
    return (
        None
        if first_chain is None or _is_from_collective(first_chain.exception)
        else first_chain.exception
    )


def find_printed_tries(text: str) -> list[ExceptionInfo]:
    """Return all exceptions that a process printed, in their order."""
    if TRACEBACK_TITLE not in text:
        return []
    lines, spans = _find_chains(text[-STDERR_CHARS_READ:])
    chains = (parse_chain(lines, *span) for span in spans)
    return [chain.exception for chain in chains if chain is not None]


# The message of an exception that reports how often something failed, without the reason
ALL_TRIES_FAILED = LazyPattern(r"""(?i)
  ^(?:.{1,80}:[ ])?(?:(?:the[ ])?\w+(?:[ ]\d+)?[ ]failed(?:[ ]after)?|(?:it[ ])?(?:gave|giving)[ ]up[ ]after|all)[ ]
  \d+[ ](?:times|attempts|tries|retries)(?:[ ]failed)?[.!]?$
""")


def _find_first_printed_try(raised: ExceptionInfo, text: str) -> ExceptionInfo | None:
    """Return the first try's exception, if the last printed exceptions are all tries of
    the function that raised.
    """
    raising = raised.frames[-1] if raised.frames and not raised.causes else None
    if raising is None or not raising.code.startswith("raise") or TRACEBACK_TITLE not in text:
        return None
    lines, spans = _find_chains(text)
    # "failed 3 times" is raised in the function that printed the three tracebacks, from the same
    # call
    chains = (
        (lines[span[1] + 1].strip(" |"), parse_chain(lines, *span))
        for span in spans
        if span[1] + 1 < len(lines)
    )
    printed = [
        (call, chain)
        for call, chain in chains
        if chain and chain.exception.message != raised.message
    ]
    last_call = printed[-1][0] if printed else ""
    tries = [
        chain
        for _, chain in itertools.takewhile(lambda item: item[0] == last_call, reversed(printed))
    ]
    is_same = last_call.startswith(f'File "{raising.file}", line ') and last_call.endswith(
        f", in {raising.function}"
    )
    if not is_same or len(tries) < (1 if ALL_TRIES_FAILED.match(raised.message) else _MIN_TRIES):
        return None
    lines_after = (*tries[0].exception.message.splitlines()[1:], *tries[0].after)
    has_survived = sum(not line[:1].isspace() for line in lines_after) > LINES_PROVING_SURVIVAL
    return None if has_survived else tries[-1].exception


@lru_cache(maxsize=256)
def _find_chains(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    lines = to_plain_lines(text)
    return lines, find_chain_spans(lines, find_tracebacks(lines))


def _is_from_collective(exception: ExceptionInfo) -> bool:
    """Whether a collective raised an exception."""
    frames = (frame for link in find_causes(exception).informative_causes for frame in link.frames)
    return any(is_process_group_code(frame.file) for frame in frames)
