"""Find failures that another attempt would only repeat, because they depend on nothing outside of
the program, and say why that isn't known of the rest, in words for the row Retry of a report.

The list is positive: a failure that isn't in ``certain_bugs.toml`` may be temporary, for all that
is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from firstfault.evidence.signatures import Pattern
from firstfault.evidence.texts import is_unexplained_write
from firstfault.exceptions.ending_exception import find_ending_exception
from firstfault.exceptions.exceptions_in_text import (
    CAUSE_SENTENCE,
    CONTEXT_SENTENCE,
    add_remote_cause,
    get_short_name,
)
from firstfault.exceptions.first_cause import iter_exceptions
from firstfault.model import ExceptionInfo, Scope, Verdict, WorkerError
from firstfault.model.failure import ABOUT_CATEGORIES
from firstfault.utils.toml import parse_toml

_USAGE_EXIT_CODE = 2
"""The exit code of argparse and click after a bad command line."""
_NO_MODULE_EXIT_CODE = 1
"""The exit code of ``python -m`` without the module."""
_USAGE_CHARS_READ = 2_000
"""At the end of the output: earlier lines may be from another process that the program started."""
_CONTAINERS = {"ExceptionGroup", "BaseExceptionGroup"}
_CANCELLED = "CancelledError"
"""A task group cancels its other tasks when one of them fails."""


@dataclass(frozen=True, slots=True)
class _Bug:
    types: frozenset[str]
    pattern: Pattern | None
    reason: str
    advice: str
    """What to do, or empty for the general advice for the category."""

    def fits(self, exception: ExceptionInfo) -> bool:
        if exception.type not in self.types:
            return False
        return self.pattern is None or self.pattern.search(exception.message) is not None


@cache
def _read_table() -> dict[str, Any]:
    return parse_toml(Path(__file__).with_name("certain_bugs.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class MissingProgram:
    """A program that Python didn't find."""

    name: str
    """A script's path, or the name of the module after ``-m``."""
    is_module: bool
    reason: str
    """Why another attempt would fail again."""


@cache
def _list_missing_programs() -> tuple[tuple[int, Pattern, str, bool], ...]:
    """Return the exit codes of Python if a script or a module doesn't exist, and its lines."""
    script, module = (_read_table()[name] for name in ("missing_script", "missing_module"))
    return (
        (_USAGE_EXIT_CODE, Pattern(script["pattern"]), script["reason"], False),
        (_NO_MODULE_EXIT_CODE, Pattern(module["pattern"]), module["reason"], True),
    )


def find_missing_program(failure: WorkerError) -> MissingProgram | None:
    """Return the program that Python didn't find, or None for any other failure.

    Whether the program exists depends on the node's files: if a folder wasn't mounted on the
    node, another attempt may find the program.
    """
    if failure.exception is not None:
        return None
    tail = failure.printed[-_USAGE_CHARS_READ:]
    for code, pattern, reason, is_module in _list_missing_programs():
        match = pattern.search(tail) if failure.exit_code == code else None
        if match is not None:
            return MissingProgram(match["name"], is_module, reason)
    return None


def explain_missing_program(failure: WorkerError, ranks: int) -> str:
    """Return a sentence that a job's program doesn't exist, or "" if that isn't certain.

    Args:
        failure: the root cause.
        ranks: the number of ranks with this failure. On one node it's certain with the first rank;
            on several, each may have other files.
    """
    place = failure.place
    is_everywhere = place.group_world_size == 1 or 0 < place.world_size <= ranks
    program = find_missing_program(failure) if is_everywhere else None
    return program.reason if program is not None else ""


@cache
def _load() -> tuple[tuple[_Bug, ...], Pattern, str]:
    """Return the bugs, the pattern of a refused command line, and the reason for that."""
    table = _read_table()
    bugs = (
        _Bug(
            frozenset(row["types"]),
            Pattern(row["pattern"]) if "pattern" in row else None,
            row["reason"],
            row.get("advice", ""),
        )
        for row in table["bug"]
    )
    return tuple(bugs), Pattern(table["usage"]["pattern"]), table["usage"]["reason"]


def find_certain_bug(failure: WorkerError) -> str:
    """Return why a process would fail again, wherever and whenever it runs, or an empty string if
    that isn't certain.

    Every exception of the chain must be such a bug. A TypeError in the handler of a lost
    connection, or an exception that was raised in place of a TypeError, may be gone in the next
    attempt.
    """
    exception = find_ending_exception(failure)
    while exception is not None and exception.type == "SystemExit":
        if not exception.causes:
            return _find_usage_error(failure, exception.message)
        # `except TypeError: sys.exit(1)`
        exception = replace(exception.causes[0], causes=exception.causes[1:])
    if exception is None:
        return _find_usage_error(failure, str(failure.exit_code))
    if get_short_name(exception) == _CANCELLED:
        return ""  # from outside, whatever was being handled at that moment
    reasons = [_explain(link) for link in _list_failures(exception)]
    return reasons[-1] if reasons and all(reasons) else ""


def find_advice_on_bug(failure: WorkerError) -> str:
    """Return what to do about a failure that is certain to repeat, or an empty string for the
    general advice for its category.
    """
    exception = find_ending_exception(failure) if find_certain_bug(failure) else None
    links = list(_list_failures(exception)) if exception is not None else []
    advice = (bug.advice for link in links[-1:] for bug in _load()[0] if bug.fits(link))
    return next(advice, "")


def _list_failures(exception: ExceptionInfo) -> Iterator[ExceptionInfo]:
    """Yield the exceptions of a chain and of groups, without exceptions that only carry others."""
    for link in iter_exceptions(add_remote_cause(exception)):
        is_container = bool(link.members) and get_short_name(link) in _CONTAINERS
        if not is_container and get_short_name(link) != _CANCELLED:
            yield link


def _explain(exception: ExceptionInfo) -> str:
    """Return why this exception would be raised again, or an empty string if that isn't certain."""
    text = exception.message
    # a traceback in the text has its own chain, which could not be read
    if CAUSE_SENTENCE in text or CONTEXT_SENTENCE in text:
        return ""
    reason = next((bug.reason for bug in _load()[0] if bug.fits(exception)), "")
    return reason.replace(
        "{type}", f"{'an' if exception.type.startswith(('A', 'I', 'U')) else 'a'} {exception.type}"
    )


def _find_usage_error(failure: WorkerError, exit_code: str) -> str:
    _, pattern, reason = _load()
    if exit_code != str(_USAGE_EXIT_CODE):
        return ""
    return reason if pattern.search(failure.printed[-_USAGE_CHARS_READ:]) is not None else ""


FINISHED_REASON = "the job had finished, so its results are there"
TIME_LIMIT_REASON = "the attempt reached its time limit"
_UNKNOWN_CAUSE_REASON = "nothing shows whether the same would happen again"
_NO_PROOF_REASON = "maybe temporary, but that isn't proven"
_UNEXPLAINED_WRITE_REASON = (
    "a write failed without a reason: the disk may have been full, or over its quota"
)
_ADVICE_FOR_FLYTE = " (to allow retries, raise a recoverable error)"
CATEGORIES_WITHOUT_CAUSE = {"signal", "hang", "collective", "stopped", "unknown"}
"""Categories that describe how a process ended, not why."""
RETRY_REQUESTS = {"FlyteRecoverableException", "RecoverableError"}
"""Exceptions with which a program requests a retry."""


def explain_unknown(verdict: Verdict, *, is_of_flyte: bool) -> str:
    """Return why it isn't known whether a retry would help; for Flyte 1, with advice."""
    reason = _describe_doubt(verdict)
    return f"{reason}{_ADVICE_FOR_FLYTE}" if is_of_flyte and reason == _NO_PROOF_REASON else reason


def _describe_doubt(verdict: Verdict) -> str:
    if verdict.scope is Scope.UNDETERMINED:
        return _UNKNOWN_CAUSE_REASON
    if verdict.is_at_time_limit:
        return TIME_LIMIT_REASON
    if reason := explain_replaced_request(verdict.root):
        return reason
    if (
        verdict.category == "storage"
        and verdict.root is not None
        and is_unexplained_write(verdict.root)
    ):
        return _UNEXPLAINED_WRITE_REASON
    if verdict.category in CATEGORIES_WITHOUT_CAUSE:
        return _UNKNOWN_CAUSE_REASON
    against = ABOUT_CATEGORIES.get(verdict.category, {}).get("against")
    return f"{against}, but that isn't proven" if against else _NO_PROOF_REASON


def explain_replaced_request(root: WorkerError | None) -> str:
    """Return a sentence if the program replaced an exception that requests a retry, else ""."""
    if root is None or root.exception is None or root.recoverable:
        return ""
    # `except FlyteRecoverableException: raise TrainingError(...)`: the type of the raised exception
    # counts
    raised = root.exception
    outer, *inner = (
        link.type.rsplit(".", 1)[-1] for link in (raised, *raised.causes, *raised.members)
    )
    request = next((name for name in inner if name in RETRY_REQUESTS), None)
    return f"{outer} replaced {request}, and isn't recoverable itself" if request else ""
