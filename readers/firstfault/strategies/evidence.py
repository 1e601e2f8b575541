"""The default strategy: what each failure says about itself and about others counts more than its time."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from firstfault.evidence.classification import MISMATCH, ClassifiedFailure, FailureClass, left_no_reason
from firstfault.evidence.diagnosis import diagnose
from firstfault.evidence.failure_message import message_of
from firstfault.evidence.progress import waited_ns
from firstfault.evidence.retries import AFTER_A_PRINTED_ERROR, without_retries
from firstfault.evidence.stopped_alike import place_of_raise, stopped_near, stopped_raising
from firstfault.evidence.unreported import is_unlisted
from firstfault.exceptions.fingerprint import normalized
from firstfault.exceptions.stack_position import where_it_stood
from firstfault.model import Reason, Subject, Suspect, Verdict
from firstfault.strategies._inference import infer_root
from firstfault.strategies._reasons import MAX_SUSPECTS, NAME, about_clocks, count_of, failures_of, with_category
from firstfault.strategies._registry import Reads, reads, takes_diagnosis
from firstfault.strategies._verdict import verdict_for, who

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault.evidence.accusations import Accusations
    from firstfault.evidence.clocks import Clocks
    from firstfault.evidence.diagnosis import Diagnosis
    from firstfault.model import JobErrors

__all__ = ["evidence"]

_MS = 1_000_000
_ROOTS = {FailureClass.OWN_FAULT, FailureClass.OWN_EXIT, FailureClass.LOST, FailureClass.EXTERNAL}
_LONG_AFTER_NS = 10_000 * _MS
"""An accusation that is this much older than a fault is not about that fault."""
_RANK = re.compile(r"\branks?\W{1,4}(\d{1,6})\b", re.IGNORECASE)
_LONG_WAIT_NS = 60_000 * _MS
"""Shorter than any timeout of NCCL's in use, longer than clocks are wrong."""
_MAX_OF_INTEREST = 16
"""Ranks whose documents are opened for each reason in a large cascade."""
_MAX_NODES = 5
"""Accused nodes whose ranks' documents are opened in a large cascade."""


def _of_interest(job: JobErrors) -> set[int]:
    """Return the ranks whose documents have to be opened: the verdict's, and those that others name."""
    if not job.failures:
        return set()
    diagnosis = diagnose(job)
    accusations, verdict = diagnosis.accusations, evidence(job, diagnosis)
    ranks = {rank for rank, _ in accusations.ranks.most_common(_MAX_OF_INTEREST)}
    ranks |= {cause.rank for cause, _ in accusations.broadcast.most_common(_MAX_OF_INTEREST) if cause.rank is not None}
    ranks |= {suspect.rank for suspect in verdict.suspects if suspect.rank is not None}
    ranks |= set(verdict.ranks[:_MAX_OF_INTEREST])
    nodes = {node for node, _ in accusations.nodes.most_common(_MAX_NODES)} | {verdict.node}
    nodes |= {suspect.node for suspect in verdict.suspects}
    return ranks | {rank for entry in job.roster if entry.place.node in nodes for rank in entry.ranks}


@takes_diagnosis
@reads(Reads.GROUPS, _of_interest)
def evidence(job: JobErrors, diagnosis: Diagnosis | None = None) -> Verdict:
    """Pick the failure that explains the others.

    In order: a rank or node with a fault of its own, the first if there are several; a node that is gone; a rank that
    the others waited for; else a failure that may be cause or consequence, or undetermined with suspects. A process
    that was stopped, or names a peer that is gone, is a victim whatever its time. Times decide only as far as the
    clocks are known.
    """
    diagnosis = without_retries(diagnosis or diagnose(job))
    roots = _roots(diagnosis)
    if not roots:
        return infer_root(job, diagnosis)
    if _timed_out_before_all(diagnosis, roots):
        # what it waited for happened before any rank failed by itself
        verdict = infer_root(job, diagnosis)
        later = [root for root in roots if root.failure is not verdict.root]
        suspects = [Suspect(f"{who(root.failure)} {root.why}, later", root.failure.rank, root.node) for root in later]
        return replace(verdict, suspects=(*verdict.suspects, *suspects)[:MAX_SUSPECTS])
    if _failed_while_most_waited(diagnosis, roots):
        inferred = infer_root(job, diagnosis)
        if inferred.ranks and not any(root.failure.rank in inferred.ranks for root in roots):
            doubted = [Suspect(f"{who(root.failure)} {root.why}", root.failure.rank, root.node) for root in roots]
            return replace(inferred, suspects=(*inferred.suspects, *doubted)[:MAX_SUSPECTS])
    return _verdict_on(job, roots, diagnosis)


def _failed_while_most_waited(diagnosis: Diagnosis, roots: Sequence[ClassifiedFailure]) -> bool:
    """Whether most ranks had waited in a collective for long before any of `roots` was recorded.

    A watchdog says how long its rank had waited. A fault that came at the end of that time is no reason for it: ranks
    that an abort has unblocked may raise anything.
    """
    workers = sum(judged.failure.subject is Subject.WORKER for judged in diagnosis.classified)
    waits = [(judged.failure, waited_ns(judged.failure)) for judged in diagnosis.classified if judged.waited]
    long = [(failure, waited) for failure, waited in waits if waited >= _LONG_WAIT_NS and failure.timestamp_ns]
    if not long or len(long) * 2 < workers or any(root.failure.timestamp_ns is None for root in roots):
        return False
    began = max((failure.timestamp_ns or 0) - waited for failure, waited in long)
    return all((root.failure.timestamp_ns or 0) - began > min(waited for _, waited in long) // 2 for root in roots)


def _roots(diagnosis: Diagnosis) -> list[ClassifiedFailure]:
    """Return the failures that are faults of their own.

    An exit that may be cause or consequence is one too, if the agents broadcast it. An exception that was still inside
    the task function when its process was stopped is none if another rank may have timed out before it was raised.
    """
    waits = [judged for judged in diagnosis.classified if judged.waited]
    roots = []
    for judged in diagnosis.classified:
        is_broadcast = _is_unclear_exit(judged) and diagnosis.accusations.times_broadcast(judged) > 0
        # either end of a message may have another size than the others
        is_broadcast = is_broadcast and judged.signature != MISMATCH
        if judged.failure_class not in _ROOTS and not is_broadcast:
            continue
        if judged.in_flight and any(not diagnosis.clocks.before(judged.failure, wait.failure) for wait in waits):
            continue
        roots.append(judged)
    return roots


def _is_unclear_exit(judged: ClassifiedFailure) -> bool:
    failure = judged.failure
    is_exit = failure.exception is None and failure.subject is Subject.WORKER and not failure.stopped_by_agent
    is_exit = is_exit and not failure.is_silent
    return judged.failure_class is FailureClass.UNCLEAR and is_exit and not judged.waited


def _timed_out_before_all(diagnosis: Diagnosis, roots: Sequence[ClassifiedFailure]) -> bool:
    """Whether a rank's wait certainly timed out before any of `roots` failed."""
    return any(
        judged.waited and all(diagnosis.clocks.before(judged.failure, root.failure) for root in roots)
        for judged in diagnosis.classified
    )


def _verdict_on(
    job: JobErrors,
    roots: Sequence[ClassifiedFailure],
    diagnosis: Diagnosis,
) -> Verdict:
    classified, clocks, accusations = diagnosis.classified, diagnosis.clocks, diagnosis.accusations
    roots = _without_accusers(_without_aftermath(roots, clocks), clocks)
    roots = sorted(roots, key=lambda root: _order(root, accusations))
    may_be_first = clocks.contenders([root.failure for root in roots])
    contenders = [root for root, may_be in zip(roots, may_be_first, strict=True) if may_be]
    contenders = contenders or list(roots)  # circular times: none is first
    first = contenders[0]
    # ranks may raise the same exception at any time; the same signal is the same fault only at the same time
    alike = contenders if first.failure_class is FailureClass.OWN_EXIT else roots
    same = [root for root in alike if _is_same(root, first)]
    others = [root for root in roots if not any(root is item for item in same)]
    rivals = [root for root in contenders if not _is_same(root, first)]
    unclear = _earlier_candidates(first, roots, diagnosis)
    why = [Reason(f"{who(first.failure)} {first.why}", (first.failure,))]
    more = _unopened_alike(job, same, classified)
    if len(same) + more > 1:
        why.append(Reason(f"{len(same) + more} failed in the same way", failures_of(same)))
    why += [Reason(_after(first, other, clocks), (other.failure,)) for other in others[:3]]
    raising = stopped_raising(first, classified)
    are_raising = {id(item) for item in raising}
    near = [item for item in stopped_near(first, classified) if id(item) not in are_raising]
    why += _about_stopped(raising, near)
    why += _about_victims([item for item in classified if id(item) not in are_raising], job)
    named = accusations.of(first)
    if named:
        ranks = {None, first.failure.rank}
        accusers = (item for item in classified if item.pointer is not None and item.pointer.rank in ranks)
        why.append(
            Reason(
                f"{named} of the others {'names' if named == 1 else 'name'} it",
                failures_of(item for item in accusers if item is not first),
            )
        )
    unlisted = all(is_unlisted(job, root.failure) for root in same)
    if unlisted:
        why.append(Reason("the agent of its pod reported its pod's failures without this one", (first.failure,)))
    is_vague = len(classified) > 1 and _may_follow_an_error(first)
    if is_vague:
        why.append(Reason("an exit that gives no reason may follow any error, a peer's too", (first.failure,)))
    is_vague = is_vague or any(judged.why == AFTER_A_PRINTED_ERROR for judged in classified)
    why += _timeless([first, *rivals])
    why += about_clocks(job, clocks)
    verdict = verdict_for(
        job,
        first.failure,
        strategy=NAME,
        why=why,
        rule=_rule(first, [*others, *rivals]),
        confidence=_confidence(
            job, first, rivals, [*others, *unclear, *near, *raising], is_doubtful=unlisted or is_vague
        ),
        same=[root.failure for root in (*same, *raising)] if len(same) + len(raising) + more > 1 else (),
        suspects=[_suspect(other, clocks, first) for other in [*others, *unclear][:MAX_SUSPECTS]],
    )
    return with_category(verdict, first)


def _rule(first: ClassifiedFailure, others: Sequence[ClassifiedFailure]) -> str:
    ends = {FailureClass.LOST: "lost-node", FailureClass.EXTERNAL: "terminated-node"}
    return ends.get(first.failure_class) or ("first-of-several" if others else "own-fault")


def _about_stopped(raising: Sequence[ClassifiedFailure], near: Sequence[ClassifiedFailure]) -> list[Reason]:
    """Return what is to say about ranks that were stopped where the root cause was raised."""
    said = []
    if raising:
        were = "was" if len(raising) == 1 else "were"
        text = f"{len(raising)} more {were} stopped while an exception raised at the same line was on its way out"
        said.append(Reason(text, failures_of(raising)))
    if near:
        at = place_of_raise(near[0].failure) or where_it_stood(near[0].failure).frame
        text = f"{who(near[0].failure)} was stopped at {at} without waiting for a peer, and may have been about to fail"
        more = f"; so may {len(near) - 1} more" if len(near) > 1 else ""
        said.append(Reason(text + more, failures_of(near)))
    return said


def _earlier_candidates(
    first: ClassifiedFailure,
    roots: Sequence[ClassifiedFailure],
    diagnosis: Diagnosis,
) -> list[ClassifiedFailure]:
    """Return the failures that may have happened before the root cause: they lower the confidence.

    Exits without a reason; if the root cause is a lost or terminated node, also ranks that timed out waiting.
    """
    is_end_of_a_node = first.failure_class in {FailureClass.LOST, FailureClass.EXTERNAL}
    found = [
        judged
        for judged in diagnosis.classified
        if (_is_unclear_exit(judged) or (judged.waited and is_end_of_a_node))
        and not any(judged is root for root in roots)
        and not diagnosis.clocks.before(first.failure, judged.failure)
    ]
    return sorted(found, key=lambda item: (item.failure.rank or 0, item.failure.node, repr(item.failure)))


def _without_aftermath(roots: Sequence[ClassifiedFailure], clocks: Clocks) -> list[ClassifiedFailure]:
    """Leave out exits of a lost or terminated node's workers, unless they certainly were before the node's end."""
    ends: dict[str, list[ClassifiedFailure]] = {}
    for root in roots:
        if root.failure_class in {FailureClass.LOST, FailureClass.EXTERNAL}:
            ends.setdefault(root.failure.node, []).append(root)
    kept = []
    for root in roots:
        gone = [end for end in ends.get(root.failure.node, ()) if end is not root]
        is_exit = root.failure_class is FailureClass.OWN_EXIT and root.failure.subject is Subject.WORKER
        if is_exit and gone and not any(clocks.before(root.failure, end.failure) for end in gone):
            continue
        kept.append(root)
    return kept


def _without_accusers(roots: Sequence[ClassifiedFailure], clocks: Clocks) -> list[ClassifiedFailure]:
    """Leave out failures that name a rank with a fault of its own which names no rank: they report that rank's fault.

    An exception of the program's own names a rank if it repeats what that rank said. A failure stays if it was long
    before that rank's fault.
    """
    accusing_none: dict[int, list[ClassifiedFailure]] = {}
    for root in roots:
        if root.failure.rank is not None and (root.pointer is None or root.pointer.rank is None):
            accusing_none.setdefault(root.failure.rank, []).append(root)

    def accuses(root: ClassifiedFailure) -> bool:
        rank = root.pointer.rank if root.pointer is not None else None
        accused = accusing_none.get(rank, []) if rank is not None and rank != root.failure.rank else []
        accused = accused or [
            item for rank in _named_by(root) for item in accusing_none.get(rank, ()) if _repeats(root, item)
        ]
        return any(clocks.gap_ns(root.failure, item.failure) < _LONG_AFTER_NS for item in accused)

    return [root for root in roots if not accuses(root)]


def _named_by(root: ClassifiedFailure) -> set[int]:
    """Return the other ranks in the text of a failure."""
    ranks = {int(number) for number in _RANK.findall(message_of(root.failure).text)}
    return ranks - {root.failure.rank}


def _repeats(root: ClassifiedFailure, other: ClassifiedFailure) -> bool:
    """Whether the text of a failure holds all that another one says."""
    text, said = message_of(root.failure).text, message_of(other.failure).text
    return said in text and said != text and bool(said)


def _order(root: ClassifiedFailure, accusations: Accusations) -> tuple[object, ...]:
    """Return the sort key of root causes whose order in time is not known: evidence, then accusations, then time.

    An exit that the agents broadcast comes before an exception that names no peer: a program may raise an exception of
    its own in place of a peer's error that it caught.
    """
    failure = root.failure
    return (
        root.in_flight,
        not root.specific,
        -accusations.times_broadcast(root),
        root.failure_class,
        -accusations.of(root),
        failure.timestamp_ns is None,
        failure.timestamp_ns or 0,
        failure.rank if failure.rank is not None else 1 << 62,
        failure.node,
        failure.message,
        failure.code,
        failure.fingerprint,
        tuple(document.name for document in failure.documents),
        repr(failure),
    )


def _is_same(root: ClassifiedFailure, first: ClassifiedFailure) -> bool:
    if root is first:
        return True
    if root.failure_class is FailureClass.EXTERNAL and first.failure_class is FailureClass.EXTERNAL:
        return True
    fingerprint = first.failure.fingerprint
    is_fault = first.failure_class in {FailureClass.OWN_FAULT, FailureClass.OWN_EXIT}
    if not is_fault or not fingerprint or root.failure.fingerprint != fingerprint:
        return False
    # a worker that calls sys.exit does not know what it printed: what it said must agree, too
    said, first_said = message_of(root.failure), message_of(first.failure)
    if said.exception is not root.failure.exception or first_said.exception is not first.failure.exception:
        return (said.what, normalized(said.text)) == (first_said.what, normalized(first_said.text))
    return root.failure.exception is not None or root.signature == first.signature


def _after(first: ClassifiedFailure, other: ClassifiedFailure, clocks: Clocks) -> str:
    gap = clocks.gap_ns(first.failure, other.failure)
    when = f"at least {gap / _MS:.0f} ms later" if gap else "at about the same time, as far as the clocks tell"
    return f"{who(other.failure)} {other.why} too, {when}"


def _suspect(other: ClassifiedFailure, clocks: Clocks, first: ClassifiedFailure) -> Suspect:
    return Suspect(_after(first, other, clocks), other.failure.rank, other.failure.node or None)


def _unopened_alike(job: JobErrors, same: Sequence[ClassifiedFailure], classified: Sequence[ClassifiedFailure]) -> int:
    """Return how many unopened ranks have the fault of `same`; 0 if an opened one with that fault is not in `same`."""
    fingerprint = same[0].failure.fingerprint
    opened = sum(judged.failure.fingerprint == fingerprint for judged in classified)
    return len(job.unopened_like(fingerprint)) if opened == len(same) else 0


def _about_victims(classified: Sequence[ClassifiedFailure], job: JobErrors) -> list[Reason]:
    said = []
    texts = {
        FailureClass.CONSEQUENCE: (
            "other failed",
            "others failed",
            " because of it: stopped, or without its peer",
        ),
        FailureClass.UNCLEAR: ("other", "others", " may be cause or consequence"),
    }
    for failure_class, (one, several, text) in texts.items():
        count = count_of(classified, job, failure_class)
        if count:
            these = (judged for judged in classified if judged.failure_class is failure_class)
            said.append(Reason(f"{count} {one if count == 1 else several}{text}", failures_of(these)))
    return said


def _timeless(contenders: Sequence[ClassifiedFailure]) -> list[Reason]:
    timeless = [contender for contender in contenders if contender.failure.timestamp_ns is None]
    if not timeless or len(contenders) == 1:
        return []
    text = f"{len(timeless)} of the {len(contenders)} that may be first have no recorded time"
    return [Reason(text, failures_of(timeless))]


def _confidence(
    job: JobErrors,
    first: ClassifiedFailure,
    rivals: Sequence[ClassifiedFailure],
    others: Sequence[ClassifiedFailure],
    *,
    is_doubtful: bool,
) -> str:
    if first.failure_class is FailureClass.UNCLEAR and first.failure.signal:
        return "low"
    if rivals:
        return "low" if any(rival.failure_class is first.failure_class for rival in rivals) else "medium"
    if not job.coverage.complete or others or first.in_flight or first.failure_class is FailureClass.UNCLEAR:
        return "medium"
    return "medium" if is_doubtful or left_no_reason(first.failure) else "high"


def _may_follow_an_error(first: ClassifiedFailure) -> bool:
    """Whether an exit may be what the program makes of any error, a peer's too: with success, or with no text."""
    failure = first.failure
    if first.failure_class is not FailureClass.OWN_EXIT or failure.signal:
        return False
    if failure.exception is None:
        return not failure.log_tail.strip()
    return failure.exception.type == "SystemExit" and failure.exception.message in {"", "0", "None"}
