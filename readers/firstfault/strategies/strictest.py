"""Not recoverable if any worker says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.model import Reason
from firstfault.strategies._verdict import candidates, verdict_for, who
from firstfault.strategies.earliest import earliest_of

if TYPE_CHECKING:
    from firstfault.model import JobErrors, Verdict

__all__ = ["strictest"]


def strictest(job: JobErrors) -> Verdict:
    """Pick the earliest failure that is not recoverable; only if all are recoverable, the earliest of all."""
    field = candidates(job)
    strict = [failure for failure in field if not failure.recoverable]
    root = earliest_of(strict or field)
    if strict:
        why = f"{len(strict)} of {len(field)} failures are not recoverable; {who(root)} is the earliest of them"
    else:
        why = f"all {len(field)} failures are recoverable; {who(root)} is the earliest"
    return verdict_for(job, root, strategy="strictest", why=[Reason(why, (root,))], confidence="low")
