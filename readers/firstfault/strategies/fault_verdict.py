"""The verdict on a fault: a process that failed by itself, or a node that ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from firstfault.evidence import faults
from firstfault.evidence.classification import OF_A_FIRST_TRY, ClassifiedFailure, FailureClass, left_no_reason
from firstfault.evidence.diagnosis import ENDS_OF_NODES, Diagnosis, FirstFault, are_unlisted
from firstfault.evidence.watchdogs import may_have_waited_for, tells_of_a_wait
from firstfault.exceptions.ending_exception import find_ending_exception
from firstfault.exceptions.printed_tracebacks import find_printed_exception
from firstfault.exceptions.stack_position import find_crash_position, locate_main_thread
from firstfault.model import JobErrors, Reason, Suspect, Verdict, WorkerError
from firstfault.strategies.headlines import headline_of, who
from firstfault.strategies.reasons import MAX_SUSPECTS, NAME, about_clocks, count_of, failures_of
from firstfault.strategies.verdicts import verdict_for

_MS = 1_000_000
_OF_OTHERS = {
    FailureClass.CONSEQUENCE: ("other failed", "others failed", " because of it: stopped, or without its peer"),
    FailureClass.UNCLEAR: ("other", "others", " may be cause or consequence"),
}
"""How a sentence counts the other failures of a class: one, several, and what they are."""


def on_fault(diagnosis: Diagnosis, found: FirstFault) -> Verdict:
    """Return the verdict that the first fault is the root cause."""
    first, classified = found.first, diagnosis.classified
    # unopened ranks have the first fault only if every opened one with it is in `same`
    opened = sum(judged.failure.fingerprint == first.failure.fingerprint for judged in classified)
    more = len(diagnosis.job.unopened_like(first.failure.fingerprint)) if opened == len(found.same) else 0
    raising = faults.stopped_raising(first, classified)
    are_raising = set(map(id, raising))
    likely = [item for item in faults.stopped_unwinding(first, classified) if id(item) not in are_raising]
    are_raising |= set(map(id, likely))
    near = [item for item in faults.stopped_near(first, classified) if id(item) not in are_raising]
    earlier = _earlier_candidates(diagnosis, found)
    doubts = _doubts(diagnosis, found)
    why = [Reason(f"{who(first.failure)} {first.why}", (first.failure,))]
    if len(found.same) + more > 1:
        why.append(Reason(f"{len(found.same) + more} failed in the same way", failures_of(found.same)))
    why += [Reason(_after(diagnosis, first, other), (other.failure,)) for other in found.others[:3]]
    why += _about_stopped(first, raising, near)
    if likely:
        why.append(Reason(f"stopped where that exception passes by: {len(likely)} more", failures_of(likely)))
    why += _about_victims(diagnosis, [item for item in classified if id(item) not in are_raising])
    if named := diagnosis.accusations.of(first):
        ranks = {None, first.failure.rank}
        accusers = (item for item in classified if item is not first and item.pointer and item.pointer.rank in ranks)
        why.append(Reason(f"{named} of the others {'names' if named == 1 else 'name'} it", failures_of(accusers)))
    why += doubts
    contenders = [first, *found.rivals]
    timeless = failures_of(item for item in contenders if item.failure.timestamp_ns is None)
    if timeless and found.rivals:
        text = f"{len(timeless)} of the {len(contenders)} that may be first have no recorded time"
        why.append(Reason(text, timeless))
    why += about_clocks(diagnosis)
    has_printed = any(judged.why == faults.AFTER_A_PRINTED_ERROR for judged in classified)
    stood = may_have_waited_for(diagnosis, found.same)
    is_one = not (found.others or earlier or near or likely or raising or doubts or has_printed or stood)
    verdict = build_root_verdict(
        diagnosis.job,
        first,
        why,
        _confidence(found, is_sure=is_one and diagnosis.job.coverage.complete),
        failures_of((*found.same, *raising)) if len(found.same) + len(raising) + more > 1 else (),
    )
    others = [*found.others, *earlier][:MAX_SUSPECTS]
    suspects = [Suspect(_after(diagnosis, first, other), other.failure.rank, other.node) for other in others]
    suspects += [Suspect(item.why, item.rank, item.node or None) for item in stood]
    is_all = 0 < first.failure.place.world_size <= len(verdict.ranks) + len(likely)
    probably = f", and probably {'all' if is_all else f'{len(likely)} more'}" if likely else ""
    headline = headline_of(first.failure, verdict.ranks, probably)
    return replace(verdict, headline=headline, suspects=tuple(suspects[:MAX_SUSPECTS]))


def build_root_verdict(
    job: JobErrors,
    root: ClassifiedFailure,
    why: Iterable[Reason],
    confidence: str,
    same: Sequence[WorkerError] = (),
) -> Verdict:
    """Return the verdict with the root's more precise category, unless its writer claims a specific one."""
    verdict = verdict_for(job, root.failure, strategy=NAME, why=why, confidence=confidence, same=same)
    keeps = root.failure.recoverable or root.failure.category not in {"", "user_code", "exit", "stopped"}
    # only an agent's own report makes a node preempted or lost, never a text
    keeps = keeps or root.category in {"preemption", "node_lost"}
    return replace(verdict, category=root.category) if root.category and not keeps else verdict


def _doubts(diagnosis: Diagnosis, found: FirstFault) -> list[Reason]:
    """Return what speaks against the first fault itself."""
    first, same, has_peers = found.first, failures_of(found.same), len(diagnosis.classified) > 1
    is_printed_only = first.category == "disk_full" and find_ending_exception(first.failure) is None
    is_wait = tells_of_a_wait(first) and (first.failure.exception is None or len(same) > 1)
    doubts = {
        "the agent of its node reported its node's failures without this one": are_unlisted(diagnosis.job, same),
        "an exit that gives no reason may follow any error, a peer's too": has_peers and _may_follow_an_error(first),
        "a clean-up or a checkpoint on a full disk fails so after any error": len(same) > 1 and is_printed_only,
        "its last words tell of a wait, which may be for a peer": has_peers and is_wait,
        "it does not tell why its tries failed": has_peers and faults.gave_up(first.failure),
        "its last try may have failed for another reason": first.why == OF_A_FIRST_TRY,
    }
    return [Reason(text, (first.failure,)) for text, applies in doubts.items() if applies]


def _confidence(found: FirstFault, *, is_sure: bool) -> str:
    first, is_unclear = found.first, found.first.failure_class is FailureClass.UNCLEAR
    if (is_unclear and first.failure.signal) or (faults.gave_up(first.failure) and len(found.same) > 1):
        return "low"
    if found.rivals:
        return "low" if any(rival.failure_class is first.failure_class for rival in found.rivals) else "medium"
    return "medium" if not is_sure or is_unclear or first.in_flight or left_no_reason(first.failure) else "high"


def _may_follow_an_error(first: ClassifiedFailure) -> bool:
    """Whether an exit may be what the program makes of any error, a peer's too: with success, or with no text."""
    failure = first.failure
    if first.failure_class is not FailureClass.OWN_EXIT or failure.signal:
        return False
    if failure.exception is None:
        return not failure.log_tail.strip()
    return failure.exception.type == "SystemExit" and failure.exception.message in {"", "0", "None"}


def _about_stopped(
    first: ClassifiedFailure, raising: Sequence[ClassifiedFailure], near: Sequence[ClassifiedFailure]
) -> list[Reason]:
    """Return the reasons about ranks that were stopped where the root cause was raised."""
    found = []
    if raising:
        were = "was" if len(raising) == 1 else "were"
        text = f"{len(raising)} more {were} stopped while an exception raised at the same line was on its way out"
        if find_crash_position(raising[0].failure):
            text = f"{len(raising)} more crashed at the same line while stopped"
        elif (first.failure.exit_code or 0) > 0 and find_printed_exception(first.failure.printed) is not None:
            text = f"{len(raising)} more printed the same exception, {were} stopped, and ended with the same exit code"
        found.append(Reason(text, failures_of(raising)))
    if near:
        at = faults.place_of_raise(near[0].failure) or locate_main_thread(near[0].failure).frame
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


def _earlier_candidates(diagnosis: Diagnosis, found: FirstFault) -> list[ClassifiedFailure]:
    """Return the failures that may have happened before the root cause: they lower the confidence.

    Exits without a reason; if the root cause is a lost or terminated node, also ranks that timed out waiting.
    """
    first, known = found.first, {*map(id, found.same), *map(id, found.others)}
    earlier = [
        judged
        for judged in diagnosis.classified
        if (faults.is_unclear_exit(judged) or (judged.waited and first.failure_class in ENDS_OF_NODES))
        and id(judged) not in known
        and not diagnosis.clocks.before(first.failure, judged.failure)
    ]
    return sorted(earlier, key=lambda item: (item.failure.rank or 0, item.failure.node, repr(item.failure)))


def _after(diagnosis: Diagnosis, first: ClassifiedFailure, other: ClassifiedFailure) -> str:
    gap = diagnosis.clocks.gap_ns(first.failure, other.failure)
    when = f"at least {gap / _MS:.0f} ms later" if gap else "at about the same time, as far as the clocks tell"
    return f"{who(other.failure)} {other.why} too, {when}"
