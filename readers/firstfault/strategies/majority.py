"""The most common fault: the same configuration error everywhere."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from firstfault.model import Reason
from firstfault.strategies._verdict import candidates, verdict_for
from firstfault.strategies.earliest import earliest_of

if TYPE_CHECKING:
    from firstfault.model import JobErrors, Verdict, WorkerError

__all__ = ["majority"]


def majority(job: JobErrors) -> Verdict:
    """Pick the fault that most failures share, by fingerprint; of equally common ones the earliest."""
    field = candidates(job)
    groups: dict[str, list[WorkerError]] = defaultdict(list)
    for failure in field:
        groups[failure.fingerprint].append(failure)
    most = max(len(group) for group in groups.values())
    firsts = {id(earliest_of(group)): group for group in groups.values() if len(group) == most}
    root = earliest_of([failure for failure in field if id(failure) in firsts])
    group = firsts[id(root)]
    why = [Reason(f"{len(group)} of {len(field)} failures have the same fault ({root.what})", tuple(group))]
    if len(firsts) > 1:
        rivals = tuple(earliest_of(group) for group in firsts.values())
        why.append(Reason(f"{len(firsts)} faults are equally common; the earliest was taken", rivals))
    share_is_clear = len(firsts) == 1 and len(group) * 2 > len(field)
    return verdict_for(
        job, root, strategy="majority", why=why, confidence="medium" if share_is_clear else "low", same=group
    )
