"""The best explained root cause: what each failure says about itself and about others, before what its clock says."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from firstfault.evidence.classification import ClassifiedFailure, FailureClass
from firstfault.evidence.diagnosis import diagnose
from firstfault.evidence.hangs import hung
from firstfault.evidence.unreported import lost_documents, silent_nodes_of, told_of, told_to_go
from firstfault.exceptions.fingerprint import fingerprint_of
from firstfault.exceptions.stack_position import where_it_stood
from firstfault.model import Reason, Scope, Subject, Suspect, Verdict, Writer
from firstfault.strategies._registry import Reads, reads, takes_diagnosis
from firstfault.strategies._verdict import sources_of, undetermined, verdict_for, victims_of, who
from firstfault.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from firstfault.evidence.accusations import Accusations
    from firstfault.evidence.clocks import Clocks
    from firstfault.evidence.diagnosis import Diagnosis
    from firstfault.evidence.inferred_root import InferredRoot
    from firstfault.evidence.texts import Pointer
    from firstfault.model import JobErrors, WorkerError

__all__ = ["evidence"]

_NAME = "evidence"
_MS = 1_000_000
_ROOTS = {FailureClass.OWN_FAULT, FailureClass.OWN_EXIT, FailureClass.LOST, FailureClass.EXTERNAL}
_LONG_AFTER_NS = 10_000 * _MS
"""A fault that comes so much later than an accusation is not what was seen."""
_MAX_SUSPECTS = 10
_MAX_OF_INTEREST = 16
"""Ranks whose documents are opened because of one reason, of a large cascade."""
_MAX_NAMED = 5
"""Ranks, and nodes, that are suspects for nothing but that others name them."""
_MAX_LOOKED_AT = 8
"""Failures that a sentence about all of them leads to."""
_OF_SILENCE = {
    "hang": ("hang", "USER:Hang"),
    "node_lost": ("node lost", "SYSTEM:NodeLost"),
    "preemption": ("told to go", "SYSTEM:Preemption"),
}
"""Headline and code of somebody who said nothing, by category."""


def _of_interest(job: JobErrors) -> set[int]:
    """The ranks whose documents have to be opened: whom the verdict is about, and whom others name."""
    if not job.failures:
        return set()
    diagnosis = diagnose(job)
    accusations, verdict = diagnosis.accusations, evidence(job, diagnosis)
    ranks = {rank for rank, _ in accusations.ranks.most_common(_MAX_OF_INTEREST)}
    ranks |= {cause.rank for cause, _ in accusations.told.most_common(_MAX_OF_INTEREST) if cause.rank is not None}
    ranks |= {suspect.rank for suspect in verdict.suspects if suspect.rank is not None}
    ranks |= set(verdict.ranks[:_MAX_OF_INTEREST])
    nodes = {node for node, _ in accusations.nodes.most_common(_MAX_NAMED)} | {verdict.node}
    nodes |= {suspect.node for suspect in verdict.suspects}
    return ranks | {rank for entry in job.roster if entry.place.node in nodes for rank in entry.ranks}


@takes_diagnosis
@reads(Reads.GROUPS, _of_interest)
def evidence(job: JobErrors, diagnosis: Diagnosis | None = None) -> Verdict:
    """Pick the failure that explains the others.

    In order: those who failed by themselves, the first of them if several did; a node that is gone; whoever the others
    waited for; else what can be read in both ways, or undetermined with suspects. Who was stopped, or names a peer that
    is gone, is a victim, whatever its time. Times decide only as far as clocks can be trusted.
    """
    diagnosis = diagnosis or diagnose(job)
    roots = _roots(diagnosis)
    if not roots:
        return _nobody_by_itself(job, diagnosis)
    if _gave_up_before_all(diagnosis, roots):
        # what they waited for had happened before any rank failed by itself
        verdict = _nobody_by_itself(job, diagnosis)
        suspects = [Suspect(f"{who(root.failure)} {root.why}, later", root.failure.rank, root.node) for root in roots]
        return replace(verdict, suspects=(*verdict.suspects, *suspects)[:_MAX_SUSPECTS])
    return _by_themselves(job, roots, diagnosis)


# --- somebody failed by itself --------------------------------------------------------------------------------------


def _roots(diagnosis: Diagnosis) -> list[ClassifiedFailure]:
    """Return those who failed by themselves.

    Also a death that can be read in both ways, if it is what the agents were told of. Not an exception that had not
    left its task function when its process was stopped, if others may have waited in vain before it was raised.
    """
    waits = [judged for judged in diagnosis.classified if judged.waited]
    roots = []
    for judged in diagnosis.classified:
        is_told_death = _is_unclear_death(judged) and diagnosis.accusations.told_times(judged) > 0
        if judged.failure_class not in _ROOTS and not is_told_death:
            continue
        if judged.in_flight and any(not diagnosis.clocks.before(judged.failure, wait.failure) for wait in waits):
            continue
        roots.append(judged)
    return roots


def _is_unclear_death(judged: ClassifiedFailure) -> bool:
    failure = judged.failure
    is_death = failure.exception is None and failure.subject is Subject.WORKER and not failure.stopped_by_agent
    return judged.failure_class is FailureClass.UNCLEAR and is_death and not judged.waited


def _gave_up_before_all(diagnosis: Diagnosis, roots: Sequence[ClassifiedFailure]) -> bool:
    """Whether a rank's wait certainly timed out before any of `roots` failed."""
    return any(
        judged.waited and all(diagnosis.clocks.before(judged.failure, root.failure) for root in roots)
        for judged in diagnosis.classified
    )


def _by_themselves(
    job: JobErrors,
    roots: Sequence[ClassifiedFailure],
    diagnosis: Diagnosis,
) -> Verdict:
    classified, clocks, accusations = diagnosis.classified, diagnosis.clocks, diagnosis.accusations
    roots = _without_accusers(_without_aftermath(roots, clocks), clocks)
    roots = sorted(roots, key=lambda root: _order(root, accusations))
    may_be_first = clocks.contenders([root.failure for root in roots])
    contenders = [root for root, may_be in zip(roots, may_be_first, strict=True) if may_be]
    contenders = contenders or list(roots)  # circular times: nobody is first
    first = contenders[0]
    # the same exception may come late to some; of deaths a signal says too little to be the same but at the same time
    alike = contenders if first.failure_class is FailureClass.OWN_EXIT else roots
    same = [root for root in alike if _is_same(root, first)]
    others = [root for root in roots if not any(root is item for item in same)]
    rivals = [root for root in contenders if not _is_same(root, first)]
    unclear = _doubts(first, roots, diagnosis)
    why = [Reason(f"{who(first.failure)} {first.why}", (first.failure,))]
    more = _unopened_alike(job, same, classified)
    if len(same) + more > 1:
        why.append(Reason(f"{len(same) + more} failed in the same way", _failures(same)))
    why += [Reason(_after(first, other, clocks), (other.failure,)) for other in others[:3]]
    why += _victims_sentence(classified, job)
    named = accusations.of(first)
    if named:
        ranks = {None, first.failure.rank}
        accusers = (item for item in classified if item.pointer is not None and item.pointer.rank in ranks)
        why.append(
            Reason(
                f"{named} of the others {'names' if named == 1 else 'name'} it",
                _failures(item for item in accusers if item is not first),
            )
        )
    why += _timeless([first, *rivals])
    why += _of_clocks(job, clocks)
    verdict = verdict_for(
        job,
        first.failure,
        strategy=_NAME,
        why=why,
        confidence=_confidence(job, first, rivals, others, unclear),
        same=[root.failure for root in same] if len(same) + more > 1 else (),
        suspects=[_suspect(other, clocks, first) for other in [*others, *unclear][:_MAX_SUSPECTS]],
    )
    return _with_category(verdict, first)


def _doubts(
    first: ClassifiedFailure,
    roots: Sequence[ClassifiedFailure],
    diagnosis: Diagnosis,
) -> list[ClassifiedFailure]:
    """Return what may have come before the root cause: no reason to take another, but one not to be sure.

    A death without a reason; where a node is gone, or was told to go, also who waited in vain.
    """
    is_end_of_a_node = first.failure_class in {FailureClass.LOST, FailureClass.EXTERNAL}
    found = [
        judged
        for judged in diagnosis.classified
        if (_is_unclear_death(judged) or (judged.waited and is_end_of_a_node))
        and not any(judged is root for root in roots)
        and not diagnosis.clocks.before(first.failure, judged.failure)
    ]
    return sorted(found, key=lambda item: (item.failure.rank or 0, item.failure.node, repr(item.failure)))


def _without_aftermath(roots: Sequence[ClassifiedFailure], clocks: Clocks) -> list[ClassifiedFailure]:
    """Leave out what came of a node's end: its workers' deaths, which its agent did not live to explain."""
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
    """Leave out whoever names a rank that failed by itself and names nobody: it saw that one's fault, not its own.

    Not if it failed long before that one.
    """
    silent: dict[int, list[ClassifiedFailure]] = {}
    for root in roots:
        if root.failure.rank is not None and (root.pointer is None or root.pointer.rank is None):
            silent.setdefault(root.failure.rank, []).append(root)

    def accuses(root: ClassifiedFailure) -> bool:
        rank = root.pointer.rank if root.pointer is not None else None
        accused = silent.get(rank, []) if rank is not None and rank != root.failure.rank else []
        return any(clocks.gap_ns(root.failure, item.failure) < _LONG_AFTER_NS for item in accused)

    return [root for root in roots if not accuses(root)]


def _order(root: ClassifiedFailure, accusations: Accusations) -> tuple[object, ...]:
    """Among those of whom nobody was certainly first: local evidence, then what others say, then time.

    An exception that names no peer may still come of one, where the program has put its own in place of what it caught:
    it does not stand above a death that the agents told each other of.
    """
    failure = root.failure
    return (
        root.in_flight,
        not root.specific,
        -accusations.told_times(root),
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
    return is_fault and bool(fingerprint) and root.failure.fingerprint == fingerprint


def _after(first: ClassifiedFailure, other: ClassifiedFailure, clocks: Clocks) -> str:
    gap = clocks.gap_ns(first.failure, other.failure)
    when = f"at least {gap / _MS:.0f} ms later" if gap else "at about the same time, as far as the clocks tell"
    return f"{who(other.failure)} {other.why} too, {when}"


def _suspect(other: ClassifiedFailure, clocks: Clocks, first: ClassifiedFailure) -> Suspect:
    return Suspect(_after(first, other, clocks), other.failure.rank, other.failure.node or None)


def _unopened_alike(job: JobErrors, same: Sequence[ClassifiedFailure], classified: Sequence[ClassifiedFailure]) -> int:
    """How many ranks that were not opened failed as `same` did: all of that fault, if all that were opened did."""
    fingerprint = same[0].failure.fingerprint
    opened = sum(judged.failure.fingerprint == fingerprint for judged in classified)
    return len(job.unopened_like(fingerprint)) if opened == len(same) else 0


def _failures(classified: Iterable[ClassifiedFailure]) -> tuple[WorkerError, ...]:
    return tuple(judged.failure for judged in classified)


def _some(classified: Iterable[ClassifiedFailure]) -> tuple[WorkerError, ...]:
    """As many as a sentence about all of them leads to."""
    return _failures(islice(classified, _MAX_LOOKED_AT))


def _of_clocks(job: JobErrors, clocks: Clocks) -> list[Reason]:
    """What is known of wrong clocks, with the failures of those nodes: their documents tell it."""
    return [
        Reason(text, tuple(islice((failure for failure in job.failures if failure.node in nodes), _MAX_LOOKED_AT)))
        for text, nodes in ((text, set(names)) for text, names in clocks.sentences())
    ]


def _victims_sentence(classified: Sequence[ClassifiedFailure], job: JobErrors) -> list[Reason]:
    said = []
    texts = {
        FailureClass.CONSEQUENCE: (
            "other was stopped, or names",
            "others were stopped, or name",
            " a peer that was gone",
        ),
        FailureClass.UNCLEAR: ("other", "others", " can be read in both ways"),
    }
    for failure_class, (one, several, text) in texts.items():
        count = _count(classified, job, failure_class)
        if count:
            these = (judged for judged in classified if judged.failure_class is failure_class)
            said.append(Reason(f"{count} {one if count == 1 else several}{text}", _failures(these)))
    return said


def _count(classified: Iterable[ClassifiedFailure], job: JobErrors, failure_class: FailureClass) -> int:
    """How many failures have this failure_class: those that were not opened as the ones of their fault that were."""
    have = [judged for judged in classified if judged.failure_class is failure_class]
    prints = {judged.failure.fingerprint for judged in have}
    return len(have) + sum(len(job.unopened_like(fingerprint)) for fingerprint in prints)


def _timeless(contenders: Sequence[ClassifiedFailure]) -> list[Reason]:
    timeless = [contender for contender in contenders if contender.failure.timestamp_ns is None]
    if not timeless or len(contenders) == 1:
        return []
    text = f"{len(timeless)} of the {len(contenders)} that may be first carry no time"
    return [Reason(text, _failures(timeless))]


def _confidence(
    job: JobErrors,
    first: ClassifiedFailure,
    rivals: Sequence[ClassifiedFailure],
    others: Sequence[ClassifiedFailure],
    unclear: Sequence[ClassifiedFailure],
) -> str:
    if rivals:
        return "low" if any(rival.failure_class is first.failure_class for rival in rivals) else "medium"
    if not job.coverage.complete or others or unclear or first.in_flight or first.failure_class is FailureClass.UNCLEAR:
        return "medium"
    return "high"


def _with_category(verdict: Verdict, judged: ClassifiedFailure) -> Verdict:
    """Put the more precise category in, unless the job's own word is more than a guess."""
    keeps = judged.failure.recoverable or judged.failure.category not in {"", "user_code"}
    # who comes from outside is known by what an agent says of itself, never by a text
    keeps = keeps or judged.category in {"preemption", "node_lost"}
    return replace(verdict, category=judged.category) if judged.category and not keeps else verdict


# --- nobody did -----------------------------------------------------------------------------------------------------


def _nobody_by_itself(job: JobErrors, diagnosis: Diagnosis) -> Verdict:
    classified, accusations = diagnosis.classified, diagnosis.accusations
    unclear = [judged for judged in classified if judged.failure_class is FailureClass.UNCLEAR]
    waited = any(judged.waited for judged in classified)
    # nobody hangs for whom nobody waited in vain: a process that died by itself stops all the others where they stand;
    # who is noticed first says something only where nobody had to wait
    silent = told_to_go(job)[:1] if not waited else []
    silent = silent or told_of(job, accusations, waited=waited)
    hanging = hung(classified) if waited else []
    silent = silent or _heaviest(hanging or silent_nodes_of(job, accusations, waited=waited), accusations)
    # what waited is no suspect; what aborted or exited is, unless its node's agent says that others had gone before, or
    # it was stopped because others had waited in vain
    left = {judged.failure.node for judged in classified if judged.failure.subject is Subject.AGENT}
    deaths = [
        judged
        for judged in unclear
        if not judged.waited and judged.failure.node not in left and not (waited and judged.failure.stopped_by_agent)
    ]
    unclear = deaths or [judged for judged in unclear if judged.failure.node not in left]
    lost = lost_documents(job, classified, accusations) if not silent else []
    if len(silent) == 1 or (not silent and not deaths and len(lost) == 1):
        return _silent_verdict(job, (silent or lost)[0], classified)
    left_over = [] if silent or lost else _left_over(classified, unclear)
    if left_over:
        return _by_elimination(job, left_over, diagnosis)
    suspects = [Suspect(item.why, item.rank, item.node or None) for item in silent or lost]
    suspects += sorted(
        (Suspect(f"{who(item.failure)} {item.why}", item.failure.rank, item.node) for item in deaths),
        key=lambda suspect: (suspect.rank or 0, suspect.node or "", suspect.why),
    )
    suspects = suspects[:_MAX_SUSPECTS] or _named(job, accusations)
    return _undetermined(job, diagnosis, suspects)


def _left_over(
    classified: Sequence[ClassifiedFailure], unclear: Sequence[ClassifiedFailure]
) -> list[ClassifiedFailure]:
    """Return who is the root cause because nobody else can be: one failure, or one fault of several ranks."""
    prints = {judged.failure.fingerprint for judged in unclear}
    if len(unclear) == 1 or (len(prints) == 1 and prints != {""} and not any(item.waited for item in unclear)):
        return sorted(unclear, key=lambda item: (item.failure.timestamp_ns or 1 << 62, item.failure.rank or 0))
    if unclear and all(item.failure.writer is Writer.STOCK for item in classified):
        # files of Flyte's own hold a launcher's summary each, and their times are all there is to tell them apart
        return sorted(unclear, key=lambda item: (item.failure.timestamp_ns or 1 << 62, repr(item.failure)))[:1]
    # whoever it names, there is nobody else
    alone = len(classified) == 1 and (
        classified[0].failure.place.world_size == 1 or classified[0].failure.writer is Writer.STOCK
    )
    return list(classified) if alone else []


def _by_elimination(job: JobErrors, found: Sequence[ClassifiedFailure], diagnosis: Diagnosis) -> Verdict:
    first = found[0]
    others = (judged for judged in diagnosis.classified if not any(judged is item for item in found))
    why = [
        Reason(f"{who(first.failure)} {first.why}", (first.failure,)),
        Reason("nobody else failed by itself", _some(others)),
        *_of_clocks(job, diagnosis.clocks),
    ]
    is_sure = job.coverage.complete and not first.waited and first.failure_class is FailureClass.UNCLEAR
    same = [item.failure for item in found] if len(found) > 1 else ()
    verdict = verdict_for(
        job, first.failure, strategy=_NAME, why=why, confidence="medium" if is_sure else "low", same=same
    )
    return _with_category(verdict, first)


def _heaviest(silent: Sequence[InferredRoot], accusations: Accusations) -> list[InferredRoot]:
    """Those of whom most speaks."""

    def weight(item: InferredRoot) -> int:
        named = accusations.ranks[item.rank] if item.rank is not None else 0
        return item.weight + (named > 0)

    most = max((weight(item) for item in silent), default=0)
    return [item for item in silent if weight(item) == most]


def _silent_verdict(job: JobErrors, silent: InferredRoot, classified: Sequence[ClassifiedFailure]) -> Verdict:
    waiting = {judged.failure.fingerprint for judged in classified if judged.waited}
    waited = sum(judged.waited for judged in classified) + sum(map(len, map(job.unopened_like, waiting)))
    why = [
        Reason(f"{_name(silent)}: {silent.why}", _witnesses(silent, classified)),
        Reason("nobody raised a fault of its own", _some(classified)),
    ]
    if waited:
        waiters = (judged for judged in classified if judged.waited)
        why.append(Reason(f"{waited} timed out waiting", _failures(waiters)))
    what, code = _OF_SILENCE.get(silent.category, ("no word", "USER:NoWord"))
    sentence = f"{what}, {_name(silent)}: {silent.why}"
    return replace(
        undetermined(job, _NAME),
        scope=_scope_of(silent),
        ranks=() if silent.rank is None else (silent.rank,),
        node=silent.node or None,
        code=code,
        category=silent.category,
        fingerprint=_fingerprint(silent, code),
        headline=one_line(sentence, 160),
        message="\n".join([sentence, *_stack_of(silent.failure)]),
        # who has not reported yet may do so
        confidence="medium" if job.settled or silent.failure is not None else "low",
        why=tuple(reason.text for reason in why),
        sources=sources_of(why),
        root=silent.failure,
        victims=victims_of(job, silent.failure),
    )


def _witnesses(silent: InferredRoot, classified: Sequence[ClassifiedFailure]) -> tuple[WorkerError, ...]:
    """Who tells of somebody who said nothing: its agent, those that were told of it, its node's, or who names it."""
    if silent.failure is not None:
        return (silent.failure,)
    who_failed = (silent.rank, silent.node)
    causes = ((judged, judged.failure.caused_by) for judged in classified)
    told = [item for item, cause in causes if cause is not None and (cause.rank, cause.node) == who_failed]
    own = [judged for judged in classified if silent.rank is None and judged.failure.node == silent.node]
    named = [item for item in classified if item.pointer is not None and _names(item.pointer, silent)]
    return _some(told or own or named)


def _names(pointer: Pointer, silent: InferredRoot) -> bool:
    if pointer.rank is not None and pointer.rank == silent.rank:
        return True
    return bool(silent.node) and silent.node in {pointer.host, pointer.host.partition(".")[0]}


def _fingerprint(silent: InferredRoot, code: str) -> str:
    """Of what a rank hung in, so that the same hang in the next attempt is known again; empty if nobody can say."""
    stood = where_it_stood(silent.failure).frame if silent.failure is not None else ""
    if silent.failure is None or not stood:
        return ""
    return fingerprint_of(replace(silent.failure, exception=None, signal="", exit_code=None, code=code, message=stood))


def _scope_of(silent: InferredRoot) -> Scope:
    if silent.rank is not None:
        return Scope.RANK
    return Scope.EXTERNAL if silent.category == "preemption" else Scope.NODE


def _stack_of(failure: WorkerError | None) -> list[str]:
    if failure is None:
        return []
    return [dump.text for dump in failure.stack_dumps if dump.rank == failure.rank]


def _name(silent: InferredRoot) -> str:
    if silent.rank is None:
        return silent.node
    return f"rank {silent.rank} on {silent.node}" if silent.node else f"rank {silent.rank}"


def _named(job: JobErrors, accusations: Accusations) -> list[Suspect]:
    entries = sorted(job.roster, key=lambda entry: entry.place.node)
    nodes = {rank: entry.place.node for entry in entries for rank in entry.ranks}
    # the most named first, of equals the lowest: not whichever was read first
    ranks = sorted(accusations.ranks.items(), key=lambda item: (-item[1], item[0]))[:_MAX_NAMED]
    names = sorted(accusations.nodes.items(), key=lambda item: (-item[1], item[0]))[:_MAX_NAMED]
    found = [Suspect(f"named by {count}", rank, nodes.get(rank)) for rank, count in ranks]
    return found + [Suspect(f"named by {count}", None, node) for node, count in names]


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
    unclear = _count(classified, job, FailureClass.UNCLEAR)
    count = len(classified) + job.unopened_elsewhere()
    told = f"{unclear} of {count} failures can be read in both ways" if unclear else "all failures name somebody else"
    told += ", the others name somebody else" if 0 < unclear < count else ""
    both_ways = _failures(judged for judged in classified if judged.failure_class is FailureClass.UNCLEAR)
    why = [
        Reason("nobody failed by itself, and nobody stands out", _some(classified)),
        Reason(told, both_ways or _some(classified)),
        *_of_clocks(job, diagnosis.clocks),
    ]
    hint = "; suspects: " + ", ".join(item.name for item in suspects[:3]) if suspects else ""
    return replace(
        undetermined(job, _NAME),
        code="USER:Undetermined",
        category="hang" if any(judged.waited for judged in classified) else "unknown",
        headline=one_line(f"undetermined: nobody failed by itself{hint}", 160),
        message=first.message,
        why=tuple(reason.text for reason in why),
        sources=sources_of(why),
        suspects=suspects,
        victims=victims_of(job, None),
    )
