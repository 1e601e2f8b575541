"""Ranks that had met a peer's error before they raised another exception: a retry loop, or a handler that failed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from firstfault.evidence.classification import ClassifiedFailure, FailureClass, names_a_peer
from firstfault.evidence.hangs import hung
from firstfault.evidence.progress import progress_by_group
from firstfault.model import Subject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault.evidence.diagnosis import Diagnosis

__all__ = ["without_retries"]

_GROUP = "torch/distributed/"
_BEGIN = "init_process_group"
_SYNCHRONOUS = "gloo:"
"""Begins the operations of a backend whose collectives fail in the call."""
_WHY = "raised an exception after a collective of its own had failed"


def without_retries(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis in which ranks that failed after a peer's error are victims, if there is another cause.

    That is a fault of another rank that may have been earlier, or a rank for which most of the others waited.
    """
    counts = _counts(diagnosis.classified)
    late = [judged for judged in diagnosis.classified if _had_met_a_peers_error(judged, counts)]
    own = [
        judged
        for judged in diagnosis.classified
        if judged.failure_class <= FailureClass.EXTERNAL and not any(judged is item for item in late)
    ]
    if own:
        # a fault that certainly came later explains nothing
        late = [item for item in late if not all(diagnosis.clocks.before(item.failure, by.failure) for by in own)]
    changed = tuple(
        replace(judged, failure_class=FailureClass.CONSEQUENCE, why=_WHY, waited=not own)
        if any(judged is item for item in late)
        else judged
        for judged in diagnosis.classified
    )
    if not own and (len(late) * 2 <= len(changed) or not hung(changed)):
        return diagnosis
    return replace(diagnosis, classified=changed)


def _counts(classified: Sequence[ClassifiedFailure]) -> dict[str, int]:
    """Return for each group how many of its collectives all members have called whose flight recorder was read."""
    workers = [judged.failure for judged in classified if judged.failure.subject is Subject.WORKER]
    recorded, _ = progress_by_group(workers)
    return {group: min(progress.enqueued for progress in members.values()) for group, members in recorded.items()}


def _had_met_a_peers_error(judged: ClassifiedFailure, counts: dict[str, int]) -> bool:
    """Whether a rank raised while it handled a peer's error, after it printed one, or after a collective that failed.

    A collective to which not all members came has failed.
    """
    exception = judged.failure.exception
    if judged.failure_class > FailureClass.OWN_EXIT or exception is None:
        return False
    if exception.causes and names_a_peer(f"{exception.causes[-1].type}: {exception.causes[-1].message}"):
        return True
    begins = any(frame.function == _BEGIN for frame in exception.frames)
    if exception.frames and _GROUP in exception.frames[-1].file and not begins:
        return False
    has_printed = not judged.specific and names_a_peer(judged.failure.log_tail)
    return has_printed or any(
        progress.last_operation.startswith(_SYNCHRONOUS) and progress.enqueued > counts.get(progress.group, 0)
        for progress in judged.failure.collectives
    )
