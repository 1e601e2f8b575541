"""What a racing error.pb would have shown: the last writer wins. For comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.model import Reason
from firstfault.strategies._verdict import candidates, verdict_for, who

if TYPE_CHECKING:
    from firstfault.model import JobErrors, Verdict, WorkerError

__all__ = ["last_written"]


def last_written(job: JobErrors) -> Verdict:
    """Pick the failure whose document was written last, by the storage's clock, then by its own time."""
    root = max(candidates(job), key=_written)
    why = f"{who(root)} wrote its document last; a single error.pb that all pods write would hold this one"
    return verdict_for(job, root, strategy="last_written", why=[Reason(why, (root,))], confidence="low")


def _written(failure: WorkerError) -> tuple[int, int, int, str, str, str, str]:
    modified = max((document.last_modified_ns or 0 for document in failure.documents), default=0)
    rank = failure.rank if failure.rank is not None else -1
    tie = (failure.node, failure.message, failure.code, failure.fingerprint)
    return (modified, failure.timestamp_ns or 0, rank, *tie)
