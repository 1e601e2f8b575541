"""The verdict on a root cause that other failures imply: the rank they waited for, or the only failure left."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from firstfault.evidence.classification import ClassifiedFailure, FailureClass
from firstfault.evidence.diagnosis import Candidate, Diagnosis
from firstfault.exceptions.fingerprint import compute_fingerprint
from firstfault.exceptions.stack_dumps import get_stack_dumps
from firstfault.exceptions.stack_position import locate_main_thread
from firstfault.model import Reason, Scope, Suspect, Verdict, WorkerError
from firstfault.model.failure import FROM_OUTSIDE, RECORDED_ONLY
from firstfault.strategies.fault_verdict import build_root_verdict
from firstfault.strategies.headlines import HEADLINE, listed, who
from firstfault.strategies.reasons import NAME, about_clocks, by_time, failures_of, first_few
from firstfault.strategies.unknown_verdict import not_known
from firstfault.strategies.verdicts import sources_of, undetermined, victims_of
from firstfault.utils.text import one_line

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
        message="\n".join([sentence, *(get_stack_dumps(found.failure) if found.failure is not None else ())]),
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
        message="\n".join([sentence, *get_stack_dumps(failures[0])]),
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
    return build_root_verdict(diagnosis.job, raised, why, "medium")


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
    verdict = build_root_verdict(diagnosis.job, first, why, "medium" if is_sure else "low", same)
    return replace(verdict, suspects=tuple(suspects))


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
    if found.failure is None or not (stood := locate_main_thread(found.failure).frame):
        return ""
    return compute_fingerprint(
        replace(found.failure, exception=None, signal="", exit_code=None, code=code, message=stood)
    )


def _name(found: Candidate) -> str:
    if found.rank is None:
        return found.node
    return f"rank {found.rank} on {found.node}" if found.node else f"rank {found.rank}"
