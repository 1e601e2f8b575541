"""Ranks that had met a peer's error before they raised another exception: a retry loop, or a handler that failed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from firstfault.evidence.classification import ClassifiedFailure, FailureClass, names_a_peer, prints_a_peers_error
from firstfault.evidence.hangs import hung
from firstfault.evidence.progress import progress_by_group, without_messages
from firstfault.model import Subject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault.evidence.diagnosis import Diagnosis
    from firstfault.model import WorkerError

__all__ = ["AFTER_A_PRINTED_ERROR", "without_retries"]

_GROUP = "torch/distributed/"
_BEGIN = "init_process_group"
_SYNCHRONOUS = "gloo:"
"""Begins the operations of a backend whose collectives fail in the call."""
_WHY = "raised an exception after a collective of its own had failed"
AFTER_A_PRINTED_ERROR = "raised an exception after it had printed a peer's error"
"""Why a rank counts as a victim whose log alone tells of a peer's error: other things in a log may look like one."""


def without_retries(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis in which ranks that failed after a peer's error are victims, if there is another cause.

    That is a fault of another rank that may have been earlier, or a rank for which most of the others waited.
    """
    counts = _counts(diagnosis.classified)
    met = ((judged, _met_a_peers_error(judged, counts)) for judged in diagnosis.classified)
    late = {id(judged): why for judged, why in met if why}
    roots = [judged for judged in diagnosis.classified if judged.failure_class <= FailureClass.EXTERNAL]
    own = [judged for judged in roots if id(judged) not in late]
    if own:
        # a fault that certainly came later explains nothing, and ranks with the same fault have one cause
        earliest = [by for by, first in zip(own, diagnosis.clocks.contenders(_failures(own)), strict=True) if first]
        prints = {by.failure.fingerprint for by in own} - {""}
        late = {
            id(item): late[id(item)]
            for item in roots
            if id(item) in late
            and item.failure.fingerprint not in prints
            and not all(diagnosis.clocks.before(item.failure, by.failure) for by in earliest or own)
        }
    changed = tuple(
        replace(judged, failure_class=FailureClass.CONSEQUENCE, why=late[id(judged)], waited=not own)
        if id(judged) in late
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


def _failures(classified: Sequence[ClassifiedFailure]) -> list[WorkerError]:
    return [judged.failure for judged in classified]


def _met_a_peers_error(judged: ClassifiedFailure, counts: dict[str, int]) -> str:
    """Return why a rank counts as one that had met a peer's error before it raised; empty: it does not.

    It handled that error, or had called a collective to which not all members came, or had printed one.
    """
    exception = judged.failure.exception
    if judged.failure_class > FailureClass.OWN_EXIT or exception is None:
        return ""
    if exception.causes and names_a_peer(f"{exception.causes[-1].type}: {exception.causes[-1].message}"):
        return _WHY
    begins = any(frame.function == _BEGIN for frame in exception.frames)
    if exception.frames and _GROUP in exception.frames[-1].file and not begins:
        return ""
    if any(
        progress.last_operation.startswith(_SYNCHRONOUS) and progress.enqueued > counts.get(progress.group, 0)
        for progress in map(without_messages, judged.failure.collectives)
    ):
        return _WHY
    has_printed = not judged.specific and prints_a_peers_error(judged.failure.log_tail)
    return AFTER_A_PRINTED_ERROR if has_printed else ""
