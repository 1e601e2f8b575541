"""The first failure of a step that a program tried again."""

from __future__ import annotations

import itertools
import re
from functools import lru_cache

from firstfault.exceptions.exceptions_in_text import get_short_name
from firstfault.exceptions.first_cause import find_causes, iter_exceptions
from firstfault.exceptions.printed_tracebacks import (
    STDERR_CHARS_READ,
    find_chain_spans,
    find_tracebacks,
    parse_chain,
    to_plain_lines,
)
from firstfault.exceptions.stack_position import is_process_group_code
from firstfault.model import ExceptionInfo, Subject, WorkerError

TRACEBACK_TITLE = "Traceback (most recent call last)"
_TRIES = 2
TRIES_FAILED = re.compile(
    r"(?i)^(?:.{1,80}: )?(?:(?:the )?\w+(?: \d+)? failed(?: after)?|(?:it )?(?:gave|giving) up after|all) "
    r"\d+ (?:times|attempts|tries|retries)(?: failed)?[.!]?$"
)
"""Tells that something failed several times, and not why."""
LINES_PROVING_SURVIVAL = 10
"""Lines after a traceback that show that its process lived on."""


def find_original_failure(failure: WorkerError) -> ExceptionInfo | None:
    """Return the exception with which a step failed first, if it was tried again and then failed in a collective.

    The process had printed it, from the same line of its own code. None: no step was tried again, the first try failed
    in a collective, too, or it isn't known; if the program raised that it gave up, such a first try counts, too.
    """
    if failure.subject is Subject.AGENT or TRACEBACK_TITLE not in failure.printed:
        return None
    raised, text = failure.exception, failure.printed[-STDERR_CHARS_READ:]
    if raised is not None and (tried := _before_giving_up(raised, text)) is not None:
        return tried
    is_exit = raised is not None and get_short_name(find_causes(raised).first) == "SystemExit"
    again = None if is_exit else raised
    # without an exception of its own it has printed those of two tries at least
    if (
        not _waits(again)
        if again is not None
        else text.count(TRACEBACK_TITLE) < _TRIES or not is_process_group_code(text)
    ):
        return None
    lines, spans = _read(text)
    if again is None:
        printed = (parse_chain(lines, *span) for span in reversed(spans))
        again = next((found.exception for found in printed if found is not None and _waits(found.exception)), None)
    frames = (frame for link in iter_exceptions(again) for frame in link.frames) if again is not None else ()
    calls = {f'File "{frame.file}", line {frame.line}, in {frame.function}' for frame in frames}
    same = (span for span in spans if "".join(lines[span[1] + 1 : span[1] + 2]).lstrip(" |") in calls)
    found = next((parse_chain(lines, *span) for span in same), None)
    return None if found is None or _waits(found.exception) else found.exception


def _before_giving_up(raised: ExceptionInfo, text: str) -> ExceptionInfo | None:
    """Return the exception of a first try, if all that a program printed last are tries of the function that raised."""
    at = raised.frames[-1] if raised.frames and not raised.causes else None
    if at is None or not at.code.startswith("raise") or TRACEBACK_TITLE not in text:
        return None
    lines, spans = _read(text)
    parsed = ((lines[span[1] + 1].strip(" |"), parse_chain(lines, *span)) for span in spans if span[1] + 1 < len(lines))
    printed = [(call, found) for call, found in parsed if found and found.exception.message != raised.message]
    call = printed[-1][0] if printed else ""
    tries = [found for _, found in itertools.takewhile(lambda item: item[0] == call, reversed(printed))]
    is_same = call.startswith(f'File "{at.file}", line ') and call.endswith(f", in {at.function}")
    if not is_same or len(tries) < (1 if TRIES_FAILED.match(raised.message) else _TRIES):
        return None
    later = (*tries[0].exception.message.splitlines()[1:], *tries[0].after)
    return tries[-1].exception if sum(not line[:1].isspace() for line in later) <= LINES_PROVING_SURVIVAL else None


@lru_cache(maxsize=256)
def _read(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    lines = to_plain_lines(text)
    return lines, find_chain_spans(lines, find_tracebacks(lines))


def _waits(exception: ExceptionInfo) -> bool:
    """Whether an exception comes out of a collective."""
    return any(is_process_group_code(frame.file) for link in find_causes(exception).told for frame in link.frames)
