"""Verdicts of the strategy ``evidence`` on failures that are faults of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.evidence.classification import ClassifiedFailure, FailureClass, left_no_reason
from firstfault.evidence.faults import AFTER_A_PRINTED_ERROR, is_unclear_exit
from firstfault.evidence.first_fault import ENDS_OF_NODES
from firstfault.evidence.stopped_alike import place_of_raise, stopped_near, stopped_raising
from firstfault.evidence.unreported import is_unlisted
from firstfault.exceptions.stack_position import where_it_stood
from firstfault.model import Reason, Suspect, Verdict
from firstfault.strategies._verdict import (
    MAX_SUSPECTS,
    NAME,
    about_clocks,
    count_of,
    failures_of,
    verdict_for,
    who,
    with_category,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault.evidence.diagnosis import Diagnosis
    from firstfault.evidence.first_fault import FirstFault

_MS = 1_000_000
_OF_OTHERS = {
    FailureClass.CONSEQUENCE: ("other failed", "others failed", " because of it: stopped, or without its peer"),
    FailureClass.UNCLEAR: ("other", "others", " may be cause or consequence"),
}
"""How a sentence counts the other failures of a class: one, several, and what they are."""


def on_fault(diagnosis: Diagnosis, found: FirstFault) -> Verdict:
    """Return the verdict that the first fault is the root cause."""
    first, classified = found.first, diagnosis.classified
    more = _unopened_alike(found, diagnosis)
    raising = stopped_raising(first, classified)
    are_raising = set(map(id, raising))
    near = [item for item in stopped_near(first, classified) if id(item) not in are_raising]
    earlier = _earlier_candidates(diagnosis, found)
    doubts = _doubts(diagnosis, found)
    why = [Reason(f"{who(first.failure)} {first.why}", (first.failure,))]
    if len(found.same) + more > 1:
        why.append(Reason(f"{len(found.same) + more} failed in the same way", failures_of(found.same)))
    why += [Reason(_after(diagnosis, first, other), (other.failure,)) for other in found.others[:3]]
    why += _about_stopped(raising, near)
    why += _about_victims(diagnosis, [item for item in classified if id(item) not in are_raising])
    why += [*_about_accusers(diagnosis, first), *doubts, *_timeless([first, *found.rivals]), *about_clocks(diagnosis)]
    has_printed = any(judged.why == AFTER_A_PRINTED_ERROR for judged in classified)
    is_one = not (found.others or earlier or near or raising or doubts or has_printed)
    verdict = verdict_for(
        diagnosis.job,
        first.failure,
        strategy=NAME,
        why=why,
        confidence=_confidence(found, is_sure=is_one and diagnosis.job.coverage.complete),
        same=failures_of((*found.same, *raising)) if len(found.same) + len(raising) + more > 1 else (),
        suspects=[
            Suspect(_after(diagnosis, first, other), other.failure.rank, other.failure.node or None)
            for other in [*found.others, *earlier][:MAX_SUSPECTS]
        ],
    )
    return with_category(verdict, first)


def _confidence(found: FirstFault, *, is_sure: bool) -> str:
    first, is_unclear = found.first, found.first.failure_class is FailureClass.UNCLEAR
    if is_unclear and first.failure.signal:
        return "low"
    if found.rivals:
        return "low" if any(rival.failure_class is first.failure_class for rival in found.rivals) else "medium"
    return "medium" if not is_sure or is_unclear or first.in_flight or left_no_reason(first.failure) else "high"


def _doubts(diagnosis: Diagnosis, found: FirstFault) -> list[Reason]:
    """Return the reasons for which the first fault itself is doubtful."""
    first, doubts = found.first, []
    if all(is_unlisted(diagnosis.job, fault.failure) for fault in found.same):
        doubts.append(Reason("the agent of its pod reported its pod's failures without this one", (first.failure,)))
    if len(diagnosis.classified) > 1 and _may_follow_an_error(first):
        doubts.append(Reason("an exit that gives no reason may follow any error, a peer's too", (first.failure,)))
    return doubts


def _may_follow_an_error(first: ClassifiedFailure) -> bool:
    """Whether an exit may be what the program makes of any error, a peer's too: with success, or with no text."""
    failure = first.failure
    if first.failure_class is not FailureClass.OWN_EXIT or failure.signal:
        return False
    if failure.exception is None:
        return not failure.log_tail.strip()
    return failure.exception.type == "SystemExit" and failure.exception.message in {"", "0", "None"}


def _about_stopped(raising: Sequence[ClassifiedFailure], near: Sequence[ClassifiedFailure]) -> list[Reason]:
    """Return the reasons about ranks that were stopped where the root cause was raised."""
    found = []
    if raising:
        were = "was" if len(raising) == 1 else "were"
        text = f"{len(raising)} more {were} stopped while an exception raised at the same line was on its way out"
        found.append(Reason(text, failures_of(raising)))
    if near:
        at = place_of_raise(near[0].failure) or where_it_stood(near[0].failure).frame
        text = f"{who(near[0].failure)} was stopped at {at} without waiting for a peer, and may have been about to fail"
        more = f"; so may {len(near) - 1} more" if len(near) > 1 else ""
        found.append(Reason(text + more, failures_of(near)))
    return found


def _about_victims(diagnosis: Diagnosis, classified: Sequence[ClassifiedFailure]) -> list[Reason]:
    found = []
    for failure_class, (one, several, text) in _OF_OTHERS.items():
        if count := count_of(classified, diagnosis.job, failure_class):
            these = (judged for judged in classified if judged.failure_class is failure_class)
            found.append(Reason(f"{count} {one if count == 1 else several}{text}", failures_of(these)))
    return found


def _about_accusers(diagnosis: Diagnosis, first: ClassifiedFailure) -> list[Reason]:
    named, ranks = diagnosis.accusations.of(first), {None, first.failure.rank}
    accusers = [item for item in diagnosis.classified if item.pointer is not None and item.pointer.rank in ranks]
    text = f"{named} of the others {'names' if named == 1 else 'name'} it"
    return [Reason(text, failures_of(item for item in accusers if item is not first))] if named else []


def _timeless(contenders: Sequence[ClassifiedFailure]) -> list[Reason]:
    timeless = [contender for contender in contenders if contender.failure.timestamp_ns is None]
    if not timeless or len(contenders) == 1:
        return []
    text = f"{len(timeless)} of the {len(contenders)} that may be first have no recorded time"
    return [Reason(text, failures_of(timeless))]


def _earlier_candidates(diagnosis: Diagnosis, found: FirstFault) -> list[ClassifiedFailure]:
    """Return the failures that may have happened before the root cause: they lower the confidence.

    Exits without a reason; if the root cause is a lost or terminated node, also ranks that timed out waiting.
    """
    first, known = found.first, {*map(id, found.same), *map(id, found.others)}
    earlier = [
        judged
        for judged in diagnosis.classified
        if (is_unclear_exit(judged) or (judged.waited and first.failure_class in ENDS_OF_NODES))
        and id(judged) not in known
        and not diagnosis.clocks.before(first.failure, judged.failure)
    ]
    return sorted(earlier, key=lambda item: (item.failure.rank or 0, item.failure.node, repr(item.failure)))


def _after(diagnosis: Diagnosis, first: ClassifiedFailure, other: ClassifiedFailure) -> str:
    gap = diagnosis.clocks.gap_ns(first.failure, other.failure)
    when = f"at least {gap / _MS:.0f} ms later" if gap else "at about the same time, as far as the clocks tell"
    return f"{who(other.failure)} {other.why} too, {when}"


def _unopened_alike(found: FirstFault, diagnosis: Diagnosis) -> int:
    """Return how many unopened ranks have the first fault; 0 if an opened one with that fault is not in `same`."""
    fingerprint = found.first.failure.fingerprint
    opened = sum(judged.failure.fingerprint == fingerprint for judged in diagnosis.classified)
    return len(diagnosis.job.unopened_like(fingerprint)) if opened == len(found.same) else 0
