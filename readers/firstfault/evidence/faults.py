"""Which failures are faults of their own, and which of these were too late to be the root cause."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from firstfault.evidence.classification import (
    MISMATCH,
    ClassifiedFailure,
    FailureClass,
    names_a_peer,
    prints_a_peers_error,
)
from firstfault.evidence.first_fault import first_fault
from firstfault.evidence.hangs import hung
from firstfault.evidence.progress import progress_by_group, waited_ns, without_messages
from firstfault.model import Subject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault.evidence.diagnosis import Diagnosis
    from firstfault.model import WorkerError

_GROUP = "torch/distributed/"
_BEGIN = "init_process_group"
_SYNCHRONOUS = "gloo:"
"""Begins the operations of a backend whose collectives fail in the call."""
_WHY = "raised an exception after a collective of its own had failed"
AFTER_A_PRINTED_ERROR = "raised an exception after it had printed a peer's error"
"""Why a rank counts as a victim whose log alone tells of a peer's error: other things in a log may look like one."""
_LONG_WAIT_NS = 60_000_000_000
"""Shorter than any timeout of NCCL's in use, longer than clocks are wrong."""


def with_faults(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis with its faults, in which ranks that failed after a peer's error are victims."""
    diagnosis = _without_retries(diagnosis)
    waits, before = diagnosis.waits, diagnosis.clocks.before
    faults = tuple(judged for judged in diagnosis.classified if _is_fault(judged, waits, diagnosis))
    # what such a rank waited for happened before any rank failed by itself
    if any(all(before(wait.failure, fault.failure) for fault in faults) for wait in waits):
        return replace(diagnosis, late=faults)
    return replace(diagnosis, faults=faults, first=first_fault(faults, diagnosis.clocks, diagnosis.accusations))


def _is_fault(judged: ClassifiedFailure, waits: Sequence[ClassifiedFailure], diagnosis: Diagnosis) -> bool:
    """Whether a failure is a fault of its own.

    An exit that may be cause or consequence is one too, if the agents broadcast it. An exception that was still inside
    the task function when its process was stopped is not one if another rank may have timed out before it was raised.
    """
    # either end of a message may have another size than the others
    may_be = is_unclear_exit(judged) and judged.signature != MISMATCH
    if judged.failure_class > FailureClass.EXTERNAL and not (may_be and diagnosis.accusations.times_broadcast(judged)):
        return False
    return not judged.in_flight or all(diagnosis.clocks.before(judged.failure, wait.failure) for wait in waits)


def is_unclear_exit(judged: ClassifiedFailure) -> bool:
    """Whether a worker exited by itself, did not wait, and nothing tells why."""
    failure = judged.failure
    is_exit = failure.exception is None and failure.subject is Subject.WORKER and not failure.stopped_by_agent
    return judged.failure_class is FailureClass.UNCLEAR and is_exit and not failure.is_silent and not judged.waited


def came_after_a_long_wait(diagnosis: Diagnosis) -> bool:
    """Whether most ranks had waited in a collective for long before any fault was recorded.

    A watchdog prints how long its rank had waited. A fault that came at the end of that time is not its reason: ranks
    that an abort has unblocked may raise anything.
    """
    faults = diagnosis.faults
    waits = [(judged.failure, waited_ns(judged.failure)) for judged in diagnosis.waits]
    long = [(failure, waited) for failure, waited in waits if waited >= _LONG_WAIT_NS and failure.timestamp_ns]
    if not long or len(long) * 2 < len(diagnosis.workers) or any(item.failure.timestamp_ns is None for item in faults):
        return False
    began = max((failure.timestamp_ns or 0) - waited for failure, waited in long)
    return all((item.failure.timestamp_ns or 0) - began > min(waited for _, waited in long) // 2 for item in faults)


def _without_retries(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis in which ranks that failed after a peer's error are victims, if there is another cause.

    They retried, or a handler failed. The other cause is a fault of another rank that may have been earlier, or a rank
    for which most of the others waited.
    """
    counts = _counts(diagnosis)
    met = ((judged, _met_a_peers_error(judged, counts)) for judged in diagnosis.classified)
    late = {id(judged): why for judged, why in met if why}
    roots = [judged for judged in diagnosis.classified if judged.failure_class <= FailureClass.EXTERNAL]
    own = [judged for judged in roots if id(judged) not in late]
    if own:
        # a fault that certainly came later explains nothing, and ranks with the same fault have one cause
        first = diagnosis.clocks.contenders(_failures(own))
        earliest = [by for by, is_first in zip(own, first, strict=True) if is_first] or own
        prints = {by.failure.fingerprint for by in own} - {""}
        late = {
            id(item): late[id(item)]
            for item in roots
            if id(item) in late
            and item.failure.fingerprint not in prints
            and not all(diagnosis.clocks.before(item.failure, by.failure) for by in earliest)
        }
    changed = tuple(
        replace(judged, failure_class=FailureClass.CONSEQUENCE, why=late[id(judged)], waited=not own)
        if id(judged) in late
        else judged
        for judged in diagnosis.classified
    )
    others = replace(diagnosis, classified=changed)
    return others if own or (len(late) * 2 > len(changed) and hung(others)) else diagnosis


def _counts(diagnosis: Diagnosis) -> dict[str, int]:
    """Return for each group how many of its collectives all members have called whose flight recorder was read."""
    recorded, _ = progress_by_group(_failures(diagnosis.workers))
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
