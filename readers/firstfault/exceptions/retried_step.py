"""The first failure of a step that a program tried again.

Rank 3's step failed with a full disk, while its peers reached the next collective. Rank 3 tried the
step again, and failed in a collective that no peer took part in. Rank 3's last exception is a
timeout, like that of its victims; the exception of its first try, which it printed, is the root
cause.
"""

from __future__ import annotations

import itertools
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
from firstfault.utils.lazy_pattern import LazyPattern

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
