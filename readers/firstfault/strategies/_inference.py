"""The strategy ``evidence`` where no failure is a fault of its own: the root cause is inferred from the others."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from firstfault.evidence.accusations import names_it
from firstfault.evidence.classification import MISMATCH, ClassifiedFailure, FailureClass
from firstfault.evidence.failure_message import message_of
from firstfault.evidence.hangs import all_in_one_collective, hung, left_behind, mismatched, returned_early
from firstfault.evidence.unreported import broadcast_root, lost_documents, nodes_without_report, terminated_nodes
from firstfault.exceptions.fingerprint import fingerprint_of
from firstfault.exceptions.stack_position import where_it_stood
from firstfault.model import Reason, Scope, Subject, Suspect, Verdict, Writer
from firstfault.strategies._reasons import (
    MAX_SUSPECTS,
    NAME,
    about_clocks,
    count_of,
    failures_of,
    first_few,
    with_category,
)
from firstfault.strategies._verdict import listed, sources_of, undetermined, verdict_for, victims_of, who
from firstfault.text import one_line, redact

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from firstfault.evidence.accusations import Accusations
    from firstfault.evidence.diagnosis import Diagnosis
    from firstfault.evidence.inferred_root import InferredRoot
    from firstfault.evidence.text_classification import Pointer
    from firstfault.model import JobErrors, WorkerError

__all__ = ["infer_root"]

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


def infer_root(job: JobErrors, diagnosis: Diagnosis) -> Verdict:
    """Return the verdict on a job of which no failure is a fault of its own."""
    classified, accusations = diagnosis.classified, diagnosis.accusations
    unclear = [judged for judged in classified if judged.failure_class is FailureClass.UNCLEAR]
    waited = any(judged.waited for judged in classified)
    # only look for a hang if some rank timed out waiting: without one, the ranks stand where they were stopped;
    # and only then is the failure that the agents noticed first no evidence
    inferred = terminated_nodes(job)[:1] if not waited else []
    inferred = inferred or broadcast_root(job, accusations, waited=waited)
    if waited:
        found = hung(classified) or all_in_one_collective(classified)
    else:
        found = left_behind(classified) or returned_early(classified)
    found = mismatched(classified) or found
    hanging = _placed(found, job)
    inferred = inferred or _heaviest(hanging or nodes_without_report(job, accusations, waited=waited), accusations)
    # a rank that waited is no suspect; one that aborted or exited is, unless its node's agent reports that its peers
    # had gone, or it was stopped because others had timed out
    lost_peers = {judged.failure.node for judged in classified if judged.failure.subject is Subject.AGENT}
    exits = [
        judged
        for judged in unclear
        if not judged.waited
        and judged.failure.node not in lost_peers
        and not (waited and judged.failure.stopped_by_agent)
    ]
    unclear = exits or [judged for judged in unclear if judged.failure.node not in lost_peers]
    lost = lost_documents(job, classified, accusations) if not inferred else []
    if len(inferred) == 1 or (not inferred and not exits and len(lost) == 1):
        root = (inferred or lost)[0]
        raised = _raised_by(root, classified) if root in hanging else None
        return _raised_verdict(job, root, raised, diagnosis) if raised else _inferred_verdict(job, root, classified)
    if _have_one_reason(inferred):
        return _verdict_on_all(job, inferred, classified)
    remaining = [] if inferred or lost else _remaining(classified, unclear)
    if remaining:
        return _by_elimination(job, remaining, diagnosis)
    suspects = [Suspect(item.why, item.rank, item.node or None) for item in inferred or lost]
    suspects += sorted(
        (Suspect(f"{who(item.failure)} {item.why}", item.failure.rank, item.node) for item in exits),
        key=lambda suspect: (suspect.rank or 0, suspect.node or "", suspect.why),
    )
    suspects = suspects[:MAX_SUSPECTS] or _accused(job, accusations)
    return _undetermined(job, diagnosis, suspects)


def _raised_by(hanging: InferredRoot, classified: Sequence[ClassifiedFailure]) -> ClassifiedFailure | None:
    """Return the exception of its own that a rank left for which the others waited; None if there is none.

    It is recorded when it leaves the task function, or when the agent stops the rank: after the others' timeout, if the
    rank cleaned up for longer than that.
    """
    own = (judged for judged in classified if judged.failure_class is FailureClass.OWN_FAULT)
    return next(
        (item for item in own if item.failure.rank == hanging.rank and item.failure.exception is not None), None
    )


def _raised_verdict(job: JobErrors, hanging: InferredRoot, raised: ClassifiedFailure, diagnosis: Diagnosis) -> Verdict:
    """Return the verdict that an exception is the root cause, while whose clean-up the others timed out."""
    when = "was still handling it when it was stopped" if raised.in_flight else "the others timed out waiting for it"
    why = [
        Reason(f"{who(raised.failure)} {raised.why}, and {when}", (raised.failure,)),
        Reason(f"{_name(hanging)}: {hanging.why}", (raised.failure,)),
        *about_clocks(job, diagnosis.clocks),
    ]
    verdict = verdict_for(job, raised.failure, strategy=NAME, rule="raised-in-hang", why=why, confidence="medium")
    return with_category(verdict, raised)


def _placed(inferred: Sequence[InferredRoot], job: JobErrors) -> list[InferredRoot]:
    """Return the candidates with their nodes: a rank that others named may have left no document."""
    nodes = {rank: entry.place.node for entry in job.roster for rank in entry.ranks}
    return [
        item if item.node or item.rank is None else replace(item, node=nodes.get(item.rank, "")) for item in inferred
    ]


def _remaining(
    classified: Sequence[ClassifiedFailure], unclear: Sequence[ClassifiedFailure]
) -> list[ClassifiedFailure]:
    """Return the only possible root cause: one failure, or the failures of several ranks with the same fault."""
    prints = {judged.failure.fingerprint for judged in unclear}
    if (len(unclear) == 1 and not unclear[0].waited) or (
        len(prints) == 1 and prints != {""} and not any(item.waited or item.failure.is_silent for item in unclear)
    ):
        return sorted(unclear, key=lambda item: (item.failure.timestamp_ns or 1 << 62, item.failure.rank or 0))
    if unclear and all(item.failure.writer is Writer.STOCK for item in classified):
        # stock error files hold a launcher's summary each, and only their times tell them apart
        return sorted(unclear, key=lambda item: (item.failure.timestamp_ns or 1 << 62, repr(item.failure)))[:1]
    # a single failure is the root cause even if it names a peer
    alone = len(classified) == 1 and (
        classified[0].failure.place.world_size == 1 or classified[0].failure.writer is Writer.STOCK
    )
    return list(classified) if alone else []


def _by_elimination(job: JobErrors, found: Sequence[ClassifiedFailure], diagnosis: Diagnosis) -> Verdict:
    first = found[0]
    others = (judged for judged in diagnosis.classified if not any(judged is item for item in found))
    why = [
        Reason(f"{who(first.failure)} {first.why}", (first.failure,)),
        Reason("no other rank shows a fault of its own", first_few(others)),
        *about_clocks(job, diagnosis.clocks),
    ]
    # ranks that fail alike in a way that may be a consequence may all be victims of one that left nothing
    is_sure = job.coverage.complete and not first.waited and first.failure_class is FailureClass.UNCLEAR
    is_sure = is_sure and len(found) == 1
    same = [item.failure for item in found] if len(found) > 1 else ()
    may_differ = [item for item in diagnosis.classified if item is not first and first.signature == MISMATCH]
    is_sure = is_sure and not may_differ
    verdict = verdict_for(
        job,
        first.failure,
        strategy=NAME,
        rule="mismatch" if may_differ else "by-elimination",
        why=why,
        confidence="medium" if is_sure else "low",
        same=same,
        suspects=[
            Suspect("it may have passed the other size", item.failure.rank, item.failure.node)
            for item in may_differ[:MAX_SUSPECTS]
        ],
    )
    return with_category(verdict, first)


def _heaviest(inferred: Sequence[InferredRoot], accusations: Accusations) -> list[InferredRoot]:
    """Return the candidates with the most reasons."""

    def weight(item: InferredRoot) -> int:
        named = accusations.ranks[item.rank] if item.rank is not None else 0
        return item.weight + (named > 0)

    most = max((weight(item) for item in inferred), default=0)
    return [item for item in inferred if weight(item) == most]


def _inferred_verdict(job: JobErrors, inferred: InferredRoot, classified: Sequence[ClassifiedFailure]) -> Verdict:
    waiting = {judged.failure.fingerprint for judged in classified if judged.waited}
    waited = sum(judged.waited for judged in classified) + sum(map(len, map(job.unopened_like, waiting)))
    why = [
        Reason(f"{_name(inferred)}: {inferred.why}", _witnesses(inferred, classified)),
        Reason("no rank raised an error of its own", first_few(classified)),
    ]
    if waited:
        waiters = (judged for judged in classified if judged.waited)
        why.append(Reason(f"{waited} timed out waiting", failures_of(waiters)))
    what, code = _HEADLINES.get(inferred.category, ("no report", "USER:NoReport"))
    sentence = f"{what}, {_name(inferred)}: {inferred.why}"
    return replace(
        undetermined(job, NAME),
        scope=_scope_of(inferred),
        ranks=() if inferred.rank is None else (inferred.rank,),
        node=inferred.node or None,
        code=code,
        category=inferred.category,
        fingerprint=_fingerprint(inferred, code),
        headline=one_line(sentence, 160),
        message="\n".join([sentence, *_stack_of(inferred.failure)]),
        # a node that has not reported may still do so
        confidence=inferred.confidence if job.settled or inferred.failure is not None else "low",
        rule=inferred.rule,
        why=tuple(reason.text for reason in why),
        sources=sources_of(why),
        root=inferred.failure,
        victims=victims_of(job, inferred.failure),
    )


def _have_one_reason(inferred: Sequence[InferredRoot]) -> bool:
    """Whether several ranks are candidates for the same reason: they diverged from the others together."""
    return len(inferred) > 1 and len({item.why for item in inferred}) == 1 and all(item.failure for item in inferred)


def _verdict_on_all(
    job: JobErrors, inferred: Sequence[InferredRoot], classified: Sequence[ClassifiedFailure]
) -> Verdict:
    """Return the verdict that several ranks together are the root cause."""
    verdict = _inferred_verdict(job, inferred[0], classified)
    failures = [item.failure for item in inferred if item.failure is not None]
    ranks = tuple(failure.rank for failure in failures if failure.rank is not None)
    nodes = {item.node for item in inferred}
    why = re.sub(r"\bit (?=[a-z])", "each ", inferred[0].why)
    sentence = f"{_HEADLINES[inferred[0].category][0]}, ranks {listed(ranks)}: {why}"
    return replace(
        verdict,
        scope=Scope.RANKS,
        ranks=ranks,
        node=nodes.pop() if len(nodes) == 1 else None,
        headline=one_line(sentence, 160),
        message="\n".join([sentence, *_stack_of(failures[0])]),
        confidence="low",
        why=(sentence, *verdict.why[1:]),
        victims=victims_of(job, failures[0], failures),
    )


def _witnesses(inferred: InferredRoot, classified: Sequence[ClassifiedFailure]) -> tuple[WorkerError, ...]:
    """Return the failures that are evidence: its agent's, those it caused, those of its node, or those that name it."""
    if inferred.failure is not None:
        return (inferred.failure,)
    key = (inferred.rank, inferred.node)
    causes = ((judged, judged.failure.caused_by) for judged in classified)
    caused = [item for item, cause in causes if cause is not None and (cause.rank, cause.node) == key]
    own = [judged for judged in classified if inferred.rank is None and judged.failure.node == inferred.node]
    named = [item for item in classified if item.pointer is not None and _names(item.pointer, inferred)]
    return first_few(caused or own or named)


def _names(pointer: Pointer, inferred: InferredRoot) -> bool:
    if pointer.rank is not None and pointer.rank == inferred.rank:
        return True
    return bool(inferred.node) and inferred.node in {pointer.host, pointer.host.partition(".")[0]}


def _fingerprint(inferred: InferredRoot, code: str) -> str:
    """Return the fingerprint of the frame that a rank hung in, to compare attempts; empty: not known."""
    stood = where_it_stood(inferred.failure).frame if inferred.failure is not None else ""
    if inferred.failure is None or not stood:
        return ""
    return fingerprint_of(
        replace(inferred.failure, exception=None, signal="", exit_code=None, code=code, message=stood)
    )


def _scope_of(inferred: InferredRoot) -> Scope:
    if inferred.rank is not None:
        return Scope.RANK
    return Scope.EXTERNAL if inferred.category == "preemption" else Scope.NODE


def _stack_of(failure: WorkerError | None) -> list[str]:
    if failure is None:
        return []
    return [dump.text for dump in failure.stack_dumps if dump.rank == failure.rank]


def _name(inferred: InferredRoot) -> str:
    if inferred.rank is None:
        return inferred.node
    return f"rank {inferred.rank} on {inferred.node}" if inferred.node else f"rank {inferred.rank}"


def _accused(job: JobErrors, accusations: Accusations) -> list[Suspect]:
    entries = sorted(job.roster, key=lambda entry: entry.place.node)
    nodes = {rank: entry.place.node for entry in entries for rank in entry.ranks}
    # a stable order, whatever was read first
    ranks = sorted(accusations.ranks.items(), key=lambda item: (-item[1], item[0]))[:_MAX_NAMED]
    names = sorted(accusations.nodes.items(), key=lambda item: (-item[1], item[0]))[:_MAX_NAMED]
    found = [Suspect(names_it(count), rank, nodes.get(rank)) for rank, count in ranks]
    return found + [Suspect(names_it(count), None, node) for node, count in names]


def _alike(job: JobErrors) -> str:
    """Return what all ranks said, if they said one thing: "all 4 ranks: RuntimeError: Timed out"; else nothing."""
    ranks = {failure.rank for failure in job.failures if failure.rank is not None}
    world = max((failure.place.world_size for failure in job.failures), default=0)
    if len(ranks) < 2 or job.unopened or len({failure.fingerprint for failure in job.failures}) > 1:  # noqa: PLR2004
        return ""
    first = job.failures[0]
    if first.exception is None or not first.fingerprint:
        return ""
    which = f"all {len(ranks)} ranks" if len(ranks) == world else f"{len(ranks)} ranks"
    said = message_of(first)
    return f"{which}: {said.what}: {redact(said.text)}".rstrip(": ")


def _expired(job: JobErrors) -> str:
    """Return which deadline ranks did not keep while they waited for each other."""
    expired = [failure for failure in job.failures if failure.expired is not None]
    if not expired or expired[0].expired is None:
        return "no rank shows a fault of its own"
    ranks = sorted({failure.rank for failure in expired if failure.rank is not None})
    which = f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"
    return f"{redact(expired[0].expired.text)} on {which}, in a collective; no rank stands out"


def _undetermined(job: JobErrors, diagnosis: Diagnosis, suspects: Iterable[Suspect]) -> Verdict:
    classified, suspects = diagnosis.classified, tuple(suspects)
    first = min(
        classified,
        key=lambda judged: (
            judged.failure_class,
            judged.failure.timestamp_ns or 1 << 62,
            judged.failure.rank or 0,
            judged.failure.message,
        ),
    ).failure
    unclear = count_of(classified, job, FailureClass.UNCLEAR)
    count = len(classified) + job.unopened_elsewhere()
    pointing = "point to another process"
    text = f"{unclear} of {count} failures may be cause or consequence" if unclear else f"all failures {pointing}"
    text += f", the others {pointing}" if 0 < unclear < count else ""
    both_ways = failures_of(judged for judged in classified if judged.failure_class is FailureClass.UNCLEAR)
    why = [
        Reason("no rank shows a fault of its own, and none stands out", first_few(classified)),
        Reason(text, both_ways or first_few(classified)),
        *about_clocks(job, diagnosis.clocks),
    ]
    hint = "; suspects: " + ", ".join(item.name for item in suspects[:3]) if suspects else ""
    return replace(
        undetermined(job, NAME),
        code="Undetermined",
        category="hang" if any(judged.waited for judged in classified) else "unknown",
        headline=one_line(f"undetermined: {_alike(job) or _expired(job)}{hint}", 160),
        message=first.message,
        why=tuple(reason.text for reason in why),
        sources=sources_of(why),
        suspects=suspects,
        victims=victims_of(job, None),
    )
