"""Why it isn't known whether a retry would help, in words for the row Retry of a report."""

from __future__ import annotations

from firstfault.evidence.texts import is_unexplained_write
from firstfault.model import Scope, Verdict, WorkerError
from firstfault.model.failure import ABOUT_CATEGORIES

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
