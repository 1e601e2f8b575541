"""Find the exception that a rank handled and that left it out of step with its peers.

Rank 2 fails after a step's collective, handles its exception and calls the step again: its next
collective is the step's, that of its peers the next step's. All of them time out, or fail because
the sizes differ.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from firstfault.evidence.classification import ClassifiedFailure, classify_failures, is_own_fault
from firstfault.evidence.diagnosis import Diagnosis
from firstfault.evidence.hangs import OutOfStep, find_ranks_out_of_step
from firstfault.exceptions.ending_exception import find_printed_tries
from firstfault.exceptions.exceptions_in_text import format_exception
from firstfault.exceptions.fingerprint import compute_fingerprint
from firstfault.exceptions.first_cause import find_causes, iter_exceptions
from firstfault.exceptions.stack_position import (
    THREAD_HEADER,
    get_stack_dumps,
    is_process_group_code,
    parse_frames,
)
from firstfault.model import HandledException, JobErrors, WorkerError

_MAX_CALLS_BEHIND = 8
"""A rank that has called more collectives since, and is behind,
continued in step after the exception.
"""
_MAX_CALLS_DIVERGED = 64
"""A rank out of step may call the same collectives as its peers for long; after more,
the evidence is weak.
"""


@dataclass(frozen=True, slots=True)
class HandledFault:
    """The exception that explains why a rank is out of step."""

    judged: ClassifiedFailure
    """The rank's failure with this exception in place of its last one."""
    original: WorkerError
    """The rank's failure as it was read."""
    out_of_step: str
    """Why its rank is out of step."""
    is_sure: bool


def find_handled_fault(diagnosis: Diagnosis) -> HandledFault | None:
    """Return the handled exception of the only rank that is out of step and has one, or None if
    there is no such rank.

    An exception that a rank in step has handled, too, is part of the program's business.
    """
    for out_of_step in find_ranks_out_of_step(diagnosis):
        failures = [judged.failure for judged in diagnosis.workers]
        in_step = (failure for failure in failures if failure.rank not in out_of_step.ranks)
        usual = {_identify(item) for failure in in_step for item in _list_own_exceptions(failure)}
        unusual_exceptions = []
        for failure in failures:
            item = (
                _choose(failure, usual, out_of_step) if failure.rank in out_of_step.ranks else None
            )
            if item is not None:
                unusual_exceptions.append((failure, item))
        # of two such ranks either may have been the first
        return (
            _build(diagnosis.job, *unusual_exceptions[0], out_of_step)
            if len(unusual_exceptions) == 1
            else None
        )
    return None


def _build(
    job: JobErrors,
    failure: WorkerError,
    item: HandledException,
    out_of_step: OutOfStep,
) -> HandledFault:
    exception = item.exception
    handled = replace(
        failure,
        exception=exception,
        message=format_exception(exception),
        code="",
        category="",
        signal="",
        exit_code=None,
        sent_signals=(),
        caused_by=None,
        expired=None,
        in_flight=False,
        timestamp_ns=item.timestamp_ns or failure.timestamp_ns,
    )
    handled = replace(handled, fingerprint=compute_fingerprint(handled))
    # by this exception, not by what the process printed later
    (judged,) = classify_failures(replace(job, failures=(replace(handled, log_tail=""),)))
    is_recent = item.calls_since is None or item.calls_since <= _MAX_CALLS_DIVERGED
    return HandledFault(
        replace(judged, failure=handled),
        failure,
        out_of_step.ranks[failure.rank or 0],
        out_of_step.has_majority and is_recent and _is_active(failure, item),
    )


def _choose(
    failure: WorkerError, usual: Collection[tuple[str, str, int]], out_of_step: OutOfStep
) -> HandledException | None:
    """Return the exception after which a rank was out of step, or None if there is none.

    If a function handled exceptions and still runs, choose the first: the exceptions of its retries
    may follow from that one. Otherwise choose the last exception that another function than its
    handler raised: a function that handles its own missing file, and returns, leaves no step
    undone.
    """
    unusual = [item for item in _list_own_exceptions(failure) if _identify(item) not in usual]
    if out_of_step.is_behind:
        unusual = [
            item
            for item in unusual
            if item.calls_since is None or item.calls_since <= _MAX_CALLS_BEHIND
        ]
    active = [item for item in unusual if _is_active(failure, item)]
    left = [item for item in unusual if len(item.exception.frames) > 1]
    return next(iter(active or left[-1:]), None)


def _list_own_exceptions(failure: WorkerError) -> list[HandledException]:
    """Return the handled exceptions that aren't about a peer; without any,
    those printed in a frame that runs on.
    """
    handled = list(failure.handled_exceptions)
    if not handled:
        printed = (
            HandledException(None, exception) for exception in find_printed_tries(failure.printed)
        )
        handled = [item for item in printed if _is_active(failure, item)]
    return [
        item for item in handled if is_own_fault(item.exception) and not _is_from_collective(item)
    ]


def _is_from_collective(item: HandledException) -> bool:
    frames = (
        frame for link in find_causes(item.exception).informative_causes for frame in link.frames
    )
    return any(is_process_group_code(frame.file) for frame in frames)


def _is_active(failure: WorkerError, item: HandledException) -> bool:
    """Whether the function that handled an exception runs on:
    the rank's failure came from within it.
    """
    handler = item.exception.frames[:1]
    return any((frame.file, frame.function) in _list_functions(failure) for frame in handler)


def _list_functions(failure: WorkerError) -> set[tuple[str, str]]:
    links = iter_exceptions(failure.exception) if failure.exception is not None else ()
    frames = [frame for link in links for frame in link.frames]
    frames += [
        frame
        for dump in get_stack_dumps(failure)
        for frame in parse_frames(THREAD_HEADER.split(dump)[-1])
    ]
    return {(frame.file, frame.function) for frame in frames}


def _identify(item: HandledException) -> tuple[str, str, int]:
    raised_at = item.exception.frames[-1:]
    return (
        item.exception.type,
        *((raised_at[0].file, raised_at[0].line) if raised_at else ("", 0)),
    )
