"""Verdicts of the strategy ``evidence`` where no failure is a fault of its own: the others imply the root cause."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from firstfault.evidence.accusations import names_it
from firstfault.evidence.classification import ClassifiedFailure, FailureClass
from firstfault.evidence.failure_message import message_of
from firstfault.exceptions.fingerprint import fingerprint_of
from firstfault.exceptions.stack_position import where_it_stood
from firstfault.model import Reason, Scope, Suspect, Verdict
from firstfault.strategies._verdict import (
    MAX_SUSPECTS,
    NAME,
    about_clocks,
    count_of,
    failures_of,
    first_few,
    listed,
    sources_of,
    undetermined,
    verdict_for,
    victims_of,
    who,
    with_category,
)
from firstfault.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from firstfault.evidence.diagnosis import Candidate, Diagnosis
    from firstfault.evidence.text_classification import Pointer
    from firstfault.model import JobErrors, WorkerError

_MAX_NAMED = 5
"""Ranks, and nodes, that are suspects only because others name them."""
_HEADLINES = {
    "hang": ("hang", "USER:Hang"),
    "user_code": ("collective mismatch", "USER:CollectiveMismatch"),
    "exit": ("returned early", "USER:ReturnedEarly"),
    "network": ("no progress", "SYSTEM:Network"),
    "node_lost": ("node lost", "SYSTEM:NodeLost"),
    "preemption": ("terminated", "SYSTEM:Preemption"),
}
"""The headline's first word and the code of an inferred root cause, by category."""


def on_candidates(diagnosis: Diagnosis, candidates: Sequence[Candidate]) -> Verdict | None:
    """Return the verdict that the candidates with the most reasons are the root cause; None: there are none.

    Several are the root cause together if they have the same reason: they diverged from the others together. Otherwise
    they are suspects.
    """
    found = _heaviest(_placed(candidates, diagnosis.job), diagnosis)
    if not found:
        return None
    if len(found) == 1:
        return on_candidate(diagnosis, found[0])
    if len({item.why for item in found}) == 1 and all(item.failure for item in found):
        return _on_all(diagnosis, found)
    return not_known(diagnosis, found)


def on_candidate(diagnosis: Diagnosis, found: Candidate) -> Verdict:
    """Return the verdict that a candidate is the root cause."""
    job, classified = diagnosis.job, diagnosis.classified
    waiting = {judged.failure.fingerprint for judged in diagnosis.waits}
    waited = len(diagnosis.waits) + sum(map(len, map(job.unopened_like, waiting)))
    why = [
        Reason(f"{_name(found)}: {found.why}", _witnesses(found, classified)),
        Reason("no rank raised an error of its own", first_few(classified)),
    ]
    if waited:
        why.append(Reason(f"{waited} timed out waiting", failures_of(diagnosis.waits)))
    what, code = _HEADLINES.get(found.category, ("no report", "USER:NoReport"))
    sentence = f"{what}, {_name(found)}: {found.why}"
    return replace(
        undetermined(job, NAME),
        scope=_scope_of(found),
        ranks=() if found.rank is None else (found.rank,),
        node=found.node or None,
        code=code,
        category=found.category,
        fingerprint=_fingerprint(found, code),
        headline=one_line(sentence, 160),
        message="\n".join([sentence, *_stack_of(found.failure)]),
        # a node that has not reported may still do so
        confidence="medium" if job.settled or found.failure is not None else "low",
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
    nodes = {item.node for item in found}
    why = re.sub(r"\bit (?=[a-z])", "each ", found[0].why)
    sentence = f"{_HEADLINES[found[0].category][0]}, ranks {listed(ranks)}: {why}"
    return replace(
        verdict,
        scope=Scope.RANKS,
        ranks=ranks,
        node=nodes.pop() if len(nodes) == 1 else None,
        headline=one_line(sentence, 160),
        message="\n".join([sentence, *_stack_of(failures[0])]),
        confidence="low",
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
    return with_category(
        verdict_for(diagnosis.job, raised.failure, strategy=NAME, why=why, confidence="medium"), raised
    )


def on_remaining(
    diagnosis: Diagnosis, remaining: Sequence[ClassifiedFailure], suspects: Iterable[Suspect] = ()
) -> Verdict | None:
    """Return the verdict that the only failure that is not certainly a consequence is the root cause.

    Args:
        diagnosis: of the job.
        remaining: one failure, or several with the same fault; empty: there is none, and None is returned.
        suspects: other possible root causes.
    """
    if not remaining:
        return None
    remaining = sorted(remaining, key=by_time)
    first = remaining[0]
    others = (judged for judged in diagnosis.classified if not any(judged is item for item in remaining))
    why = [
        Reason(f"{who(first.failure)} {first.why}", (first.failure,)),
        Reason("no other rank shows a fault of its own", first_few(others)),
        *about_clocks(diagnosis),
    ]
    # ranks that fail alike in a way that may be a consequence may all be victims of one that left nothing
    is_sure = diagnosis.job.coverage.complete and len(remaining) == 1
    is_sure = is_sure and not first.waited and first.failure_class is FailureClass.UNCLEAR
    verdict = verdict_for(
        diagnosis.job,
        first.failure,
        strategy=NAME,
        why=why,
        confidence="medium" if is_sure else "low",
        same=[item.failure for item in remaining] if len(remaining) > 1 else (),
        suspects=suspects,
    )
    return with_category(verdict, first)


def by_time(judged: ClassifiedFailure) -> tuple[object, ...]:
    """Return the sort key of failures by their recorded times; those without one come last."""
    return judged.failure.timestamp_ns or 1 << 62, judged.failure.rank or 0, repr(judged.failure)


def not_known(diagnosis: Diagnosis, found: Sequence[Candidate] = ()) -> Verdict:
    """Return the verdict that the root cause is not known; `found` are ranks and nodes that may be it."""
    job, classified = diagnosis.job, diagnosis.classified
    suspects = [Suspect(item.why, item.rank, item.node or None) for item in found]
    suspects += [
        Suspect(f"{who(item.failure)} {item.why}", item.failure.rank, item.node)
        for item in sorted(diagnosis.exits, key=lambda item: (item.failure.rank or 0, item.failure.node, item.why))
    ]
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
        headline=one_line(f"undetermined: {_alike(job) or _expired(job)}{hint}", 160),
        message=first.failure.message,
        why=tuple(reason.text for reason in why),
        sources=sources_of(why),
        suspects=tuple(suspects),
        victims=victims_of(job, None),
    )


def _placed(candidates: Sequence[Candidate], job: JobErrors) -> list[Candidate]:
    """Return the candidates with their nodes: a rank that others named may have left no document."""
    nodes = {rank: entry.place.node for entry in job.roster for rank in entry.ranks}
    return [
        item if item.node or item.rank is None else replace(item, node=nodes.get(item.rank, "")) for item in candidates
    ]


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
    named = [item for item in classified if item.pointer is not None and _names(item.pointer, found)]
    return first_few(caused or own or named)


def _names(pointer: Pointer, found: Candidate) -> bool:
    if pointer.rank is not None and pointer.rank == found.rank:
        return True
    return bool(found.node) and found.node in {pointer.host, pointer.host.partition(".")[0]}


def _fingerprint(found: Candidate, code: str) -> str:
    """Return the fingerprint of the frame that a rank hung in, to compare attempts; empty: not known."""
    stood = where_it_stood(found.failure).frame if found.failure is not None else ""
    if found.failure is None or not stood:
        return ""
    return fingerprint_of(replace(found.failure, exception=None, signal="", exit_code=None, code=code, message=stood))


def _scope_of(found: Candidate) -> Scope:
    if found.rank is not None:
        return Scope.RANK
    return Scope.EXTERNAL if found.category == "preemption" else Scope.NODE


def _stack_of(failure: WorkerError | None) -> list[str]:
    return [dump.text for dump in failure.stack_dumps if dump.rank == failure.rank] if failure is not None else []


def _name(found: Candidate) -> str:
    if found.rank is None:
        return found.node
    return f"rank {found.rank} on {found.node}" if found.node else f"rank {found.rank}"


def _accused(diagnosis: Diagnosis) -> list[Suspect]:
    """Return the ranks and nodes that failures name most often."""
    entries = sorted(diagnosis.job.roster, key=lambda entry: entry.place.node)
    at = {rank: entry.place.node for entry in entries for rank in entry.ranks}
    # a stable order, whatever was read first
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
