"""What a process printed last, if no launcher reports its end: an exception, a message of native
code, or a different error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from firstfault.credentials import redact
from firstfault.evidence.signatures import Role
from firstfault.evidence.texts import classify
from firstfault.exceptions.exceptions_in_text import format_exception
from firstfault.exceptions.fatal_text import find_native_lines
from firstfault.exceptions.printed_tracebacks import find_printed_exception
from firstfault.model import ExceptionInfo
from firstfault.model.failure import fatal_error
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.attempts import find_progress, shows_life
from firstfault_logs.completion.noise import (
    HANDLED_ERROR,
    SHUTDOWN_NOISE,
    drop_below_error,
    drop_ignored_exceptions,
)
from firstfault_logs.completion.words import is_success_report
from firstfault_logs.framing.lines import EXCEPTION_LINE, FRAME_LINE, TRACEBACK, has_failure_word
from firstfault_logs.tracebacks import ERROR_LEVEL, EXIT_FUNCTIONS, LAUNCHER_FILE

if TYPE_CHECKING:
    from firstfault_logs.framing.labels import LogRecord

_LINES_AFTER_ERROR = 3
"""Lines after an error that may still belong to the end."""
_LINES_AFTER_EXCEPTION = 6
"""The same, with what torch advises below an exception."""
_MAX_NATIVE_LINES = 40

# What the watchdogs of collectives print.
COLLECTIVE_TIMEOUT = LazyPattern(r"""
  caught[ ]collective[ ]operation[ ]timeout
| watchdog[ ]detected[ ]operation[ ]timeout
| ran[ ]for[ ]\d+[ ]milliseconds[ ]before
| \bEI000[26]\b
| waiting[ ]for[ ](?:the[ ])?remainder[ ]of[ ]ranks
| ^(?:Missing|Stalled)[ ]ranks:
| \[missing[ ]ranks:[ ]\d
| \(marked[ ]by[ ]"missing[ ]ranks"\)[ ]are[ ]stalled
| ^\d{1,6}(?:,[ ]\d{1,6})*:[ ]\[\w+[\w.]*[,\]]
""")


class OwnReport(NamedTuple):
    """The lines that show that a process failed, or empty if there are none."""

    raised: ExceptionInfo | None = None
    text: str = ""
    signal: str = ""
    lines: tuple[int, int] = (0, 0)
    """The first and the last one."""
    uncaught: bool = False
    """Whether torch printed it because nothing had caught it."""


def find_uncaught_exception(by_torch: Sequence[LogRecord], text: str) -> OwnReport:
    """Return the exception that torch printed with the process's rank: nothing had caught it."""
    torch_text = redact("\n".join(record.text for record in by_torch))
    lines = [
        record
        for record in by_torch
        if TRACEBACK in record.text or EXCEPTION_LINE.match(record.text)
    ]
    # torchrun's --tee and torchtitan put the rank before every line: a rank that prints more has
    # handled the exception
    if (
        not lines
        or sum(map(shows_life, (record for record in by_torch if record.number > lines[-1].number)))
        > _LINES_AFTER_ERROR
    ):
        return OwnReport()
    printed = find_printed_exception(torch_text) or (
        find_printed_exception(redact(text)) if TRACEBACK in torch_text else None
    )
    raised = printed.exception if printed is not None else None
    if raised is None and (named := EXCEPTION_LINE.match(lines[-1].text)):
        raised = ExceptionInfo(named["type"], redact(named["message"] or ""))
    if raised is None or (raised.frames and raised.frames[0].function in EXIT_FUNCTIONS):
        return OwnReport()
    # Ascend's library prints below the exception why it gave up: a peer that didn't come
    waits = [
        record.text
        for record in by_torch
        if record.number > lines[-1].number and COLLECTIVE_TIMEOUT.search(record.text)
    ]
    if waits and waits[0] not in raised.message:
        raised = replace(
            raised, message=redact("\n".join((raised.message, *waits[:_LINES_AFTER_ERROR])))
        )
    first = next((record for record in reversed(lines) if TRACEBACK in record.text), lines[-1])
    last = max(lines[-1], first, key=lambda record: record.number)
    return OwnReport(
        raised,
        format_exception(raised),
        lines=(first.number, last.number),
        uncaught=True,
    )


# What native code prints before it aborts.
_ABORT_MESSAGE = LazyPattern(r"""
  terminate[ ]called[ ]after[ ]throwing
| taking[ ]the[ ]entire[ ]process[ ]down
| Fatal[ ]Python[ ]error:[ ]Aborted
""")


def find_last_error(lines: Sequence[LogRecord], log_end: int) -> OwnReport:
    """Return what a process printed last about a failure;
    `log_end` is the number of the log's last line.
    """
    lines = drop_below_error(drop_ignored_exceptions(lines))
    text = "\n".join(record.text for record in lines)
    if not lines or not has_failure_word(text):
        return OwnReport()
    end, at = lines[-_LINES_AFTER_ERROR:], (lines[-1].number, lines[-1].number)
    if signal := fatal_error(text)[1] or ("SIGABRT" if _ABORT_MESSAGE.search(text) else ""):
        return OwnReport(None, text, signal, at)
    native = "\n".join(find_native_lines(text.splitlines())[-_MAX_NATIVE_LINES:])
    if native and _reports_failure(native):
        return OwnReport(None, native, lines=at)
    if waits := [record for record in lines if COLLECTIVE_TIMEOUT.search(record.text)]:
        text = "\n".join(record.text for record in _take_last_report(waits))
        return OwnReport(None, text, lines=(waits[0].number, waits[-1].number))
    if lines[-1].number == log_end and (cut_off := _find_cut_traceback(lines)):
        return cut_off
    if report := _find_swallowed_error(lines) or _find_exception_line(lines):
        return report
    steps = [at for at, record in enumerate(end, 1) if find_progress(record) is not None]
    # a process that printed a step after an error had handled it
    end = end[steps[-1] if steps else 0 :]
    if not end:
        return OwnReport()
    last = "\n".join(record.text for record in end)
    is_noise = SHUTDOWN_NOISE.search(end[-1].text) is not None
    if (
        not is_noise
        and not any(map(_shows_handling, end))
        and (ERROR_LEVEL.search(lines[-1].text) or _reports_failure(last, own=True))
    ):
        return OwnReport(None, last, lines=(end[0].number, end[-1].number))
    return OwnReport()


# Begins Horovod's report of the ranks that have not submitted their tensors.
_STALL_REPORT = LazyPattern(r"waiting[ ]for[ ](?:the[ ])?remainder[ ]of[ ]ranks")


def _take_last_report(waits: Sequence[LogRecord]) -> Sequence[LogRecord]:
    """Return the last lines about a wait; of a report that lists the missing ranks, all lines."""
    begins = (index for index, record in enumerate(waits) if _STALL_REPORT.search(record.text))
    begin = max(begins, default=None)
    return waits[-_LINES_AFTER_ERROR:] if begin is None else waits[begin:][:_MAX_NATIVE_LINES]


def _find_exception_line(lines: Sequence[LogRecord]) -> OwnReport | None:
    """Return the exception in one of the last lines, without its traceback."""
    # a list at the end belongs to the message above it
    end = next(
        (at for at in range(len(lines), 0, -1) if not lines[at - 1].text.startswith("/job:")), 0
    )
    last_few = [*lines[max(end - _LINES_AFTER_EXCEPTION, 0) : end], *lines[end:]]
    for at_end, record in enumerate(last_few):
        named = EXCEPTION_LINE.match(record.text)
        later = last_few[at_end:]
        if named is None or any(map(_shows_handling, later)):
            continue
        if not _is_of_exit(lines[: len(lines) - len(later)]):
            # a message that announces a list has it in the lines below
            announces = any(one.text.rstrip().endswith(":") for one in later[:-1])
            listed = later if announces else later[:1]
            below = [redact(one.text) for one in listed[1:]]
            raised = ExceptionInfo(
                named["type"], "\n".join([redact(named["message"] or ""), *below])
            )
            text = "\n".join([record.text, *below])
            return OwnReport(raised, text, lines=(record.number, listed[-1].number))
    return None


def _is_of_exit(above: Sequence[LogRecord]) -> bool:
    """Whether the traceback that ends with these lines is of a function that
    Python calls when it exits.
    """
    for record in reversed(above):
        frame = FRAME_LINE.match(record.text)
        if frame is not None and frame["function"] in EXIT_FUNCTIONS:
            return True
        if not record.text[:1].isspace():
            return False
    return False


@cache
def _full_trace_advice() -> re.Pattern[str]:
    """Match a framework's advice on how to see the traceback of an error that it caught."""
    return re.compile(
        r"\b(?:complete|full|whole|entire)\b[^\n]{0,30}\b(?:stack ?trace|traceback|exception)\b",
        re.IGNORECASE,
    )


@cache
def _error_summary() -> re.Pattern[str]:
    """Match the line in which a framework reports an error without its traceback."""
    return re.compile(
        r"\s{0,4}(?:\w{1,30} )?(?:Error|Failed|Failure|Exception)\b(?! ignored)", re.IGNORECASE
    )


def _find_swallowed_error(lines: Sequence[LogRecord]) -> OwnReport | None:
    """Return the report of an error without a traceback, with advice on how to see it."""
    last_few = [record for record in lines if record.text.strip()][-2 * _LINES_AFTER_EXCEPTION :]
    advice = next(
        (at for at, record in enumerate(last_few) if _full_trace_advice().search(record.text)), None
    )
    above = last_few[max((advice or 0) - _LINES_AFTER_ERROR, 0) : advice or 0]
    report = next((record for record in above if _error_summary().match(record.text)), None)
    if advice is None or report is None or any(map(_shows_handling, last_few[advice + 1 :])):
        return None
    text = redact(f"{report.text}\n{last_few[advice].text}")
    return OwnReport(None, text, lines=(report.number, last_few[advice].number))


def _find_cut_traceback(lines: Sequence[LogRecord]) -> OwnReport | None:
    """Return the last frame of a traceback in which a process's output ends."""
    begin = next((at for at in range(len(lines) - 1, -1, -1) if TRACEBACK in lines[at].text), None)
    below = lines[begin + 1 :] if begin is not None else []
    frames = [record for record in below if FRAME_LINE.match(record.text)]
    is_whole = not all(record.text[:1].isspace() for record in below)
    # a launcher's exception may be a report, which isn't among these lines
    if not frames or is_whole or any(LAUNCHER_FILE.search(record.text) for record in frames):
        return None
    source = next(
        (record.text.strip() for record in below if record.number > frames[-1].number), ""
    )
    frame = FRAME_LINE.match(frames[-1].text)
    position = (
        f"{frame['file'].rpartition('/')[2]}:{frame['line']} in {frame['function']}"
        if frame
        else ""
    )
    text = redact(f"the log ends inside a traceback, at {position}: {source}")
    return OwnReport(None, text, lines=(lines[begin or 0].number, lines[-1].number))


def _shows_handling(record: LogRecord) -> bool:
    """Whether a line after an error shows that its process handled it."""
    is_handled = HANDLED_ERROR.search(record.text) or find_progress(record)
    return is_handled is not None or is_success_report(record.text)


def _reports_failure(text: str, *, own: bool = False) -> bool:
    """Whether a text reports a failure or, with `own`, a failure of the process that printed it."""
    classification = classify(text)
    if own:
        return classification.role is Role.PRIMARY and classification.category not in {
            "unknown",
            "user_code",
        }
    return classification.role is not Role.AMBIGUOUS or classification.category == "hang"
