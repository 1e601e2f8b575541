"""Verdicts of the strategy ``evidence``: on a fault of a process or node, and on a root cause that the others imply."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

from firstfault.evidence import faults
from firstfault.evidence.classification import OF_A_FIRST_TRY, ClassifiedFailure, FailureClass, left_no_reason
from firstfault.evidence.diagnosis import ENDS_OF_NODES, Candidate, Diagnosis, FirstFault, are_unlisted, names_it
from firstfault.evidence.texts import message_of
from firstfault.evidence.watchdogs import may_have_waited_for, tells_of_a_wait
from firstfault.exceptions.fingerprint import fingerprint_of
from firstfault.exceptions.stack_position import place_of_crash, stacks_of, where_it_stood
from firstfault.exceptions.stderr import exception_of, last_printed
from firstfault.model import JobErrors, Reason, Scope, Suspect, Verdict, WorkerError
from firstfault.model.failure import FROM_OUTSIDE, RECORDED_ONLY
from firstfault.strategies.headlines import HEADLINE, headline_of, listed, who
from firstfault.strategies.verdicts import sources_of, undetermined, verdict_for, victims_of
from firstfault.utils.text import one_line

NAME = "evidence"
MAX_SUSPECTS = 10
_MAX_NAMED = 5
"""Ranks, and nodes, that are suspects only because others name them."""
_FEW = 8
"""Failures that a sentence about all of them refers to."""
_MS = 1_000_000
_HEADLINES = {
    "hang": ("hang", "USER:Hang"),
    "user_code": ("collective mismatch", "USER:CollectiveMismatch"),
    "checkpoint": ("checkpoint failed", "USER:CheckpointException"),
    "exit": ("returned early", "USER:ReturnedEarly"),
    "network": ("no progress", "SYSTEM:Network"),
    "node_lost": ("node lost", "SYSTEM:NodeLost"),
    "preemption": ("terminated", "SYSTEM:Preemption"),
    "interrupted": ("interrupted (SIGINT)", "USER:Interrupted"),
}
"""The headline's first word and the code of an inferred root cause, by category."""
_OF_OTHERS = {
    FailureClass.CONSEQUENCE: ("other failed", "others failed", " because of it: stopped, or without its peer"),
    FailureClass.UNCLEAR: ("other", "others", " may be cause or consequence"),
}
"""How a sentence counts the other failures of a class: one, several, and what they are."""


# --- on a fault -------------------------------------------------------------------------------------------------------


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
    verdict = _verdict_on(
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


def _doubts(diagnosis: Diagnosis, found: FirstFault) -> list[Reason]:
    """Return what speaks against the first fault itself."""
    first, same, has_peers = found.first, failures_of(found.same), len(diagnosis.classified) > 1
    is_printed_only = first.category == "disk_full" and exception_of(first.failure) is None
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


def _verdict_on(
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
        if place_of_crash(raising[0].failure):
            text = f"{len(raising)} more crashed at the same line while stopped"
        elif (first.failure.exit_code or 0) > 0 and last_printed(first.failure.printed) is not None:
            text = f"{len(raising)} more printed the same exception, {were} stopped, and ended with the same exit code"
        found.append(Reason(text, failures_of(raising)))
    if near:
        at = faults.place_of_raise(near[0].failure) or where_it_stood(near[0].failure).frame
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


# --- on what the others imply -----------------------------------------------------------------------------------------


def on_candidates(diagnosis: Diagnosis, candidates: Sequence[Candidate]) -> Verdict | None:
    """Return the verdict that the candidates with the most reasons are the root cause; None: there are none.

    Several are the root cause together if they have the same reason: they diverged from the others together. Otherwise
    they are suspects.
    """
    nodes: dict[int | None, str] = {rank: entry.place.node for entry in diagnosis.job.roster for rank in entry.ranks}
    # a rank that others named may have left no document
    placed = [item if item.node else replace(item, node=nodes.get(item.rank, "")) for item in candidates]
    found = _heaviest(placed, diagnosis)
    if not found:
        return None
    if len(found) == 1:
        return on_candidate(diagnosis, found[0])
    is_one = len({item.why for item in found}) == 1 or all(item.is_shared for item in found)
    if is_one and all(item.failure for item in found):
        return _on_all(diagnosis, found)
    return not_known(diagnosis, found)


def on_candidate(diagnosis: Diagnosis, found: Candidate) -> Verdict:
    """Return the verdict that a candidate is the root cause."""
    job, classified = diagnosis.job, diagnosis.classified
    waiting = {judged.failure.fingerprint for judged in diagnosis.waits}
    waited = len(diagnosis.waits) + len(job.unopened_like(*waiting))
    why = [
        Reason(f"{_name(found)}: {found.why}", _witnesses(found, classified)),
        Reason("no rank raised an error of its own", first_few(classified)),
    ]
    if waited:
        why.append(Reason(f"{waited} timed out waiting", failures_of(diagnosis.waits)))
    what, code = _HEADLINES.get(found.category, ("no report", "USER:NoReport"))
    sentence = f"{what}, {_name(found)}: {found.why}"
    scope = Scope.EXTERNAL if found.category in FROM_OUTSIDE else Scope.NODE
    return replace(
        undetermined(job, NAME),
        scope=scope if found.rank is None else Scope.RANK,
        ranks=() if found.rank is None else (found.rank,),
        node=found.node or None,
        code=code,
        category=found.category,
        fingerprint=_fingerprint(found, code),
        headline=one_line(sentence, HEADLINE),
        message="\n".join([sentence, *(stacks_of(found.failure) if found.failure is not None else ())]),
        # a node that has not reported may still do so
        confidence="medium" if found.is_sure and (job.settled or found.failure is not None) else "low",
        why=tuple(reason.text for reason in why),
        sources=sources_of(why),
        root=found.failure,
        victims=victims_of(job, found.failure),
    )


def _on_all(diagnosis: Diagnosis, found: Sequence[Candidate]) -> Verdict:
    """Return the verdict that several ranks together are the root cause."""
    verdict = on_candidate(diagnosis, found[0])
    failures = [item.failure for item in found if item.failure is not None]
    ranks = tuple(failure.rank for failure in failures if failure.rank is not None)
    are_dumps = all(failure.code == RECORDED_ONLY for failure in failures)  # of all ranks
    nodes = {item.node for item in found}
    why = re.sub(r"\bit (?=[a-z])", "each ", found[0].why)
    if any(item.why != found[0].why for item in found):
        why = "; ".join(re.sub(r"^it\b", f"rank {item.rank}", item.why) for item in found)
    sentence = f"{_HEADLINES[found[0].category][0]}, ranks {listed(ranks)}: {why}"
    return replace(
        verdict,
        scope=Scope.RANKS,
        ranks=ranks,
        node=nodes.pop() if len(nodes) == 1 else None,
        headline=one_line(sentence, HEADLINE),
        message="\n".join([sentence, *stacks_of(failures[0])]),
        confidence="medium" if all(item.is_sure for item in found) and are_dumps else "low",
        why=(sentence, *verdict.why[1:]),
        victims=victims_of(diagnosis.job, failures[0], failures),
    )


def on_raised(diagnosis: Diagnosis, candidates: Sequence[Candidate]) -> Verdict | None:
    """Return the verdict that the candidate's own exception is the root cause, during whose clean-up others timed out.

    It is recorded when it leaves the task function, or when the agent stops the rank: after the others' timeout, if the
    rank cleaned up for longer than that. None if there is not one candidate, or it left no exception of its own.
    """
    found = _heaviest(candidates, diagnosis)
    own = (
        judged
        for judged in diagnosis.classified
        if len(found) == 1
        and judged.failure_class is FailureClass.OWN_FAULT
        and judged.failure.rank == found[0].rank
        and judged.failure.exception is not None
    )
    raised = next(own, None)
    if raised is None:
        return None
    when = "was still handling it when it was stopped" if raised.in_flight else "the others timed out waiting for it"
    why = [
        Reason(f"{who(raised.failure)} {raised.why}, and {when}", (raised.failure,)),
        Reason(f"{_name(found[0])}: {found[0].why}", (raised.failure,)),
        *about_clocks(diagnosis),
    ]
    return _verdict_on(diagnosis.job, raised, why, "medium")


def on_remaining(
    diagnosis: Diagnosis, remaining: Sequence[ClassifiedFailure], suspects: Iterable[Suspect] = ()
) -> Verdict | None:
    """Return the verdict that the only failure that is not certainly a consequence is the root cause.

    `remaining` is one failure, or several with the same fault; None is returned if it is empty.
    """
    if not remaining:
        return None
    remaining = sorted(remaining, key=by_time)
    first = remaining[0]
    known = set(map(id, remaining))
    others = (judged for judged in diagnosis.classified if id(judged) not in known)
    why = [
        Reason(f"{who(first.failure)} {first.why}", (first.failure,)),
        Reason("no other rank shows a fault of its own", first_few(others)),
        *about_clocks(diagnosis),
    ]
    # ranks that fail alike in a way that may be a consequence may all be victims of one that left nothing
    is_sure = diagnosis.job.coverage.complete and len(remaining) == 1
    is_sure = is_sure and not first.waited and first.failure_class is FailureClass.UNCLEAR
    same = failures_of(remaining) if len(remaining) > 1 else ()
    verdict = _verdict_on(diagnosis.job, first, why, "medium" if is_sure else "low", same)
    return replace(verdict, suspects=tuple(suspects))


def by_time(judged: ClassifiedFailure) -> tuple[object, ...]:
    """Return the sort key of failures by their recorded times; those without one come last."""
    return judged.failure.timestamp_ns or 1 << 62, judged.failure.rank or 0, repr(judged.failure)


def not_known(diagnosis: Diagnosis, found: Sequence[Candidate] = ()) -> Verdict:
    """Return the verdict that the root cause is not known; `found` are ranks and nodes that may be it."""
    job, classified = diagnosis.job, diagnosis.classified
    exits = sorted(diagnosis.exits, key=lambda item: (item.failure.rank or 0, item.failure.node, item.why))
    suspects = [Suspect(item.why, item.rank, item.node or None) for item in found] + suspects_of(exits)
    suspects = suspects[:MAX_SUSPECTS] or _accused(diagnosis)
    first = min(classified, key=lambda judged: (judged.failure_class, *by_time(judged)[:2], judged.failure.message))
    unclear = count_of(classified, job, FailureClass.UNCLEAR)
    count = len(classified) + job.unopened_elsewhere()
    pointing = "point to another process"
    text = f"{unclear} of {count} failures may be cause or consequence" if unclear else f"all failures {pointing}"
    text += f", the others {pointing}" if 0 < unclear < count else ""
    both_ways = failures_of(judged for judged in classified if judged.failure_class is FailureClass.UNCLEAR)
    why = [
        Reason("no rank shows a fault of its own, and none stands out", first_few(classified)),
        Reason(text, both_ways or first_few(classified)),
        *about_clocks(diagnosis),
    ]
    hint = "; suspects: " + ", ".join(item.name for item in suspects[:3]) if suspects else ""
    return replace(
        undetermined(job, NAME),
        code="Undetermined",
        category="hang" if diagnosis.waits else "unknown",
        headline=one_line(f"undetermined: {_silent(job)}{_alike(job) or _expired(job)}{hint}", HEADLINE),
        message=first.failure.message,
        why=tuple(reason.text for reason in why),
        sources=sources_of(why),
        suspects=tuple(suspects),
        victims=victims_of(job, None),
    )


def _heaviest(candidates: Sequence[Candidate], diagnosis: Diagnosis) -> list[Candidate]:
    """Return the candidates with the most reasons; that others name a rank is one more."""
    named = diagnosis.accusations.ranks
    weights = [item.weight + (item.rank is not None and named[item.rank] > 0) for item in candidates]
    most = max(weights, default=0)
    return [item for item, weight in zip(candidates, weights, strict=True) if weight == most]


def _witnesses(found: Candidate, classified: Sequence[ClassifiedFailure]) -> tuple[WorkerError, ...]:
    """Return the failures that are evidence: its agent's, those it caused, those of its node, or those that name it."""
    if found.failure is not None:
        return (found.failure,)
    key = (found.rank, found.node)
    causes = ((judged, judged.failure.caused_by) for judged in classified)
    caused = [item for item, cause in causes if cause is not None and (cause.rank, cause.node) == key]
    own = [judged for judged in classified if found.rank is None and judged.failure.node == found.node]
    pointing = [(item, item.pointer) for item in classified if item.pointer is not None]
    named = [
        item
        for item, pointer in pointing
        if (found.rank is not None and found.rank == pointer.rank)
        or (found.node and found.node in {pointer.host, pointer.host.partition(".")[0]})
    ]
    return first_few(caused or own or named)


def _fingerprint(found: Candidate, code: str) -> str:
    """Return the fingerprint of the frame that a rank hung in, to compare attempts; empty: not known."""
    if found.failure is None or not (stood := where_it_stood(found.failure).frame):
        return ""
    return fingerprint_of(replace(found.failure, exception=None, signal="", exit_code=None, code=code, message=stood))


def _name(found: Candidate) -> str:
    if found.rank is None:
        return found.node
    return f"rank {found.rank} on {found.node}" if found.node else f"rank {found.rank}"


def _accused(diagnosis: Diagnosis) -> list[Suspect]:
    """Return the ranks and nodes that failures name most often, in a stable order."""
    entries = sorted(diagnosis.job.roster, key=lambda entry: entry.place.node)
    at = {rank: entry.place.node for entry in entries for rank in entry.ranks}
    ranks = sorted(diagnosis.accusations.ranks.items(), key=lambda item: (-item[1], item[0]))[:_MAX_NAMED]
    nodes = sorted(diagnosis.accusations.nodes.items(), key=lambda item: (-item[1], item[0]))[:_MAX_NAMED]
    found = [Suspect(names_it(count), rank, at.get(rank)) for rank, count in ranks]
    return found + [Suspect(names_it(count), None, node) for node, count in nodes]


def _alike(job: JobErrors) -> str:
    """Return what all ranks wrote, if it is one thing: "all 4 ranks: RuntimeError: Timed out"; else nothing."""
    ranks = {failure.rank for failure in job.failures if failure.rank is not None}
    world = max((failure.place.world_size for failure in job.failures), default=0)
    if len(ranks) < 2 or job.unopened or len({failure.fingerprint for failure in job.failures}) > 1:  # noqa: PLR2004
        return ""
    first = job.failures[0]
    if first.exception is None or not first.fingerprint:
        return ""
    which = f"all {len(ranks)} ranks" if len(ranks) == world else f"{len(ranks)} ranks"
    found = message_of(first)
    return f"{which}: {found.what}: {found.text}".rstrip(": ")


def _expired(job: JobErrors) -> str:
    """Return which deadline ranks did not keep while they waited for each other."""
    expired = [failure for failure in job.failures if failure.expired is not None]
    if not expired or expired[0].expired is None:
        return "no rank shows a fault of its own"
    ranks = sorted({failure.rank for failure in expired if failure.rank is not None})
    which = f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"
    return f"{expired[0].expired.text} on {which}, in a collective; no rank stands out"


def _silent(job: JobErrors) -> str:
    """Return which nodes left no trace, as those on which firstfault does not run: "no report from node 1; "."""
    places = [failure.place for failure in job.failures] + [entry.place for entry in job.roster]
    expected = job.coverage.expected or 0
    reported = {place.group_rank for place in places if place.group_rank is not None and place.group_rank < expected}
    count = expected - len(reported)
    # a damaged document may state billions of nodes
    first = list(islice((number for number in range(expected) if number not in reported), _FEW))
    return f"no report from node{'s' if count > 1 else ''} {listed(first, count)}; " if count else ""


# --- reasons ----------------------------------------------------------------------------------------------------------


def failures_of(classified: Iterable[ClassifiedFailure]) -> tuple[WorkerError, ...]:
    """Return the failures themselves."""
    return tuple(item.failure for item in classified)


def suspects_of(classified: Iterable[ClassifiedFailure], when: str = "") -> list[Suspect]:
    """Return failures as suspects: "rank 3 on worker-1 was killed by SIGKILL, later"."""
    return [Suspect(f"{who(item.failure)} {item.why}{when}", item.failure.rank, item.node) for item in classified]


def first_few(classified: Iterable[ClassifiedFailure]) -> tuple[WorkerError, ...]:
    """Return as many failures as a sentence about all of them refers to."""
    return failures_of(islice(classified, _FEW))


def about_clocks(diagnosis: Diagnosis) -> list[Reason]:
    """Return a reason for each wrong clock, with failures of its node."""
    return [
        Reason(text, tuple(islice((failure for failure in diagnosis.job.failures if failure.node in nodes), _FEW)))
        for text, nodes in ((text, set(names)) for text, names in diagnosis.clocks.sentences())
    ]


def count_of(classified: Iterable[ClassifiedFailure], job: JobErrors, failure_class: FailureClass) -> int:
    """Return how many failures have this class; an unopened one has the class of the opened ones with its fault."""
    have = [item for item in classified if item.failure_class is failure_class]
    prints = {item.failure.fingerprint for item in have}
    return len(have) + len(job.unopened_like(*prints))
