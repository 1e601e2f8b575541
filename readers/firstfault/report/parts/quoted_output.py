"""What a report quotes: messages, stacks and logs of processes."""

from __future__ import annotations

from firstfault.exceptions.stack_position import format_stack_dump, locate_main_thread
from firstfault.model import Scope, Verdict, WorkerError
from firstfault.report.data import Report
from firstfault.report.states import State
from firstfault.utils.text import printable

_MAX_LINE_CHARACTERS = 200
"""Characters of one line of a stack or log."""
_MAX_SUSPECTS = 5
"""Failures that may be the root cause and have their stack and log shown."""


def message_text(verdict: Verdict) -> str:
    """Return the verdict's text; for a hang without the stack at its end,
    which `stack_lines` returns.

    If nothing of an attempt could be read, its text is its notes, which every form shows elsewhere.
    """
    text = verdict.message.strip()
    # every form shows the notes where it lists what isn't known
    if verdict.root is None and text == "\n".join(verdict.coverage.notes):
        return "no error document could be read"
    own = _find_own_stack(verdict.root).strip() if verdict.root is not None else ""
    return text.removesuffix(own).rstrip() if own else text


def stack_lines(failure: WorkerError) -> list[str]:
    """Return a process's stack when it was stopped, as a person reads it;
    empty if it has a traceback.
    """
    if failure.exception is not None and failure.exception.frames:
        return []
    return _list_lines(format_stack_dump(_find_own_stack(failure)))


def _find_own_stack(failure: WorkerError) -> str:
    place = failure.place
    own = [dump.text for dump in failure.stack_dumps if place.pid and dump.pid == place.pid]
    own += [
        dump.text
        for dump in failure.stack_dumps
        if place.rank is not None and dump.rank == place.rank
    ]
    return next(iter(own), "")


def log_lines(failure: WorkerError) -> list[str]:
    """Return a process's last stderr lines, as a terminal would show them."""
    return _list_lines(failure.log_tail)


def _list_lines(text: str) -> list[str]:
    """Return the lines that aren't empty; of a progress bar's line what is after
    the last carriage return.
    """
    lines = (printable(line.rstrip("\r").rpartition("\r")[2]).rstrip() for line in text.split("\n"))
    return [
        line if len(line) <= _MAX_LINE_CHARACTERS else line[: _MAX_LINE_CHARACTERS - 3] + "..."
        for line in lines
        if line
    ]


def quoted_failures(report: Report) -> list[WorkerError]:
    """Return the failures with a stack or log to show: the root cause, or a few that may be it,
    and suspects' stacks.

    If the root cause is undetermined, one stopped process for each place where some were stopped is
    shown, too.
    """
    verdict, events = report.verdict, report.cascade.events
    if verdict.root is not None or verdict.scope is not Scope.UNDETERMINED:
        suspects = [
            event.failure
            for event in events
            if event.state is State.SUSPECT and _find_own_stack(event.failure)
        ]
        return [
            *([verdict.root] if verdict.root is not None else []),
            *suspects[: _MAX_SUSPECTS - 1],
        ]
    mays = {State.SUSPECT, State.UNCLEAR}
    may_be = [event.failure for event in events if event.state in mays]
    # ranks that were stopped at the same line have similar stacks: keep one for each line
    places = {
        locate_main_thread(event.failure).frame: event.failure
        for event in events
        if _find_own_stack(event.failure)
    }
    return [
        *may_be[:_MAX_SUSPECTS],
        *(failure for failure in places.values() if failure not in may_be),
    ][: 2 * _MAX_SUSPECTS]
