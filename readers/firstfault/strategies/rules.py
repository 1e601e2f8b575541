"""The default strategy ``evidence``: what each failure tells about itself and about others counts more than its time.

Its rules are tried in their order, and the first that finds something decides. Each rule is a function of the
`Diagnosis` that returns a verdict, or None if it does not apply. What the evidence shows is computed in
`firstfault.evidence`; verdicts are built in `fault_verdict`, `inferred_verdict` and `unknown_verdict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from firstfault.evidence.classification import MISMATCH, ClassifiedFailure, FailureClass
from firstfault.evidence.diagnosis import (
    ENDS_OF_NODES,
    Candidate,
    Diagnosis,
    accused_nodes,
    broadcast_root,
    diagnose,
    lost_documents,
    nodes_without_report,
    spread_errors,
    terminated_nodes,
)
from firstfault.evidence.faults import came_after_a_long_wait, with_faults
from firstfault.evidence.hangs import (
    all_in_one_collective,
    called_differently,
    hung,
    left_behind,
    mismatched,
    returned_early,
    waited_apart,
)
from firstfault.model import DocumentsNeeded, JobErrors, RestartKind, Scope, Suspect, Verdict, Writer
from firstfault.strategies.fault_verdict import on_fault
from firstfault.strategies.headlines import HEADLINE
from firstfault.strategies.inferred_verdict import on_candidate, on_candidates, on_raised, on_remaining
from firstfault.strategies.reasons import MAX_SUSPECTS, by_time, suspects_of
from firstfault.strategies.running import needs_documents, takes_diagnosis
from firstfault.strategies.unknown_verdict import not_known
from firstfault.utils.text import duration, one_line

CONFIDENCES = ("low", "medium", "high")
_MAX_OF_INTEREST = 16
"""Ranks whose documents are opened for each reason in a large cascade."""
_TRIES_NS = 30 * 60 * 1_000_000_000
"""Longest time between the first and the last exception of a rank that tries again: three timeouts of NCCL."""
_MAX_NODES = 5
"""Accused nodes whose ranks' documents are opened in a large cascade."""


def _find_ranks_to_read(job: JobErrors) -> set[int]:
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
@needs_documents(DocumentsNeeded.SAMPLE, _find_ranks_to_read)
def evidence(job: JobErrors, diagnosis: Diagnosis | None = None) -> Verdict:
    """Pick the failure that explains the others.

    The rules are in `RULES`. A process that was stopped, or names a peer that is gone, is a victim whatever its
    time. Times decide only as far as the clocks are known.
    """
    return judge(with_faults(diagnosis or diagnose(job)))


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    name: str
    """As verdicts carry it."""
    decide: Callable[[Diagnosis], Verdict | None]
    confidence: str
    """The highest that a verdict of this rule has."""
    finds: str
    """For people: ends the sentence "The root cause is …"."""


def judge(diagnosis: Diagnosis, rules: Sequence[Rule] = ()) -> Verdict:
    """Return the verdict of the first rule that applies, with its name. Faults that came too late are suspects.

    `diagnosis` has its faults; without `rules`, `RULES` are tried.
    """
    decided = ((rule, verdict) for rule in rules or RULES if (verdict := rule.decide(diagnosis)) is not None)
    rule, verdict = next(decided)
    if verdict.scope is Scope.UNDETERMINED:  # of several ranks of a last try, a first one may tell
        rule, verdict = next((later for later in decided if later[0].decide is _handled), (rule, verdict))
    late = [fault for fault in diagnosis.late if fault.failure is not verdict.root]
    confidence = min(verdict.confidence, rule.confidence, key=CONFIDENCES.index)
    return _with_suspects(replace(verdict, rule=rule.name, confidence=confidence), late, ", later")


def _with_suspects(verdict: Verdict, faults: Iterable[ClassifiedFailure], when: str = "") -> Verdict:
    return replace(verdict, suspects=(*verdict.suspects, *suspects_of(faults, when))[:MAX_SUSPECTS])


def _long_wait(diagnosis: Diagnosis) -> Verdict | None:
    if not diagnosis.faults or not came_after_a_long_wait(diagnosis):
        return None
    verdict = on_candidates(diagnosis, hung(diagnosis))
    if verdict is None or not verdict.ranks or any(fault.failure.rank in verdict.ranks for fault in diagnosis.faults):
        return None
    return _with_suspects(verdict, diagnosis.faults)


def _lost_node(diagnosis: Diagnosis) -> Verdict | None:
    found = diagnosis.first
    return on_fault(diagnosis, found) if found and found.first.failure_class is FailureClass.LOST else None


def _terminated_node(diagnosis: Diagnosis) -> Verdict | None:
    if found := diagnosis.first:
        is_external = found.first.failure_class is FailureClass.EXTERNAL
        return _with_stall(on_fault(diagnosis, found), diagnosis.job) if is_external else None
    nodes = [] if diagnosis.waits else terminated_nodes(diagnosis.job)
    return _with_stall(on_candidate(diagnosis, nodes[0]), diagnosis.job) if nodes else None


def _with_stall(verdict: Verdict, job: JobErrors) -> Verdict:
    """Say for whom a job waited that was terminated while it stood still: a person or a time limit ended a hang."""
    stall = job.last_stall
    if stall is None or stall.timestamp_ns is None or verdict.timestamp_ns is None:
        return verdict
    seconds = duration(max(verdict.timestamp_ns - stall.timestamp_ns, 0))
    name, _, text = verdict.headline.partition(": ")
    told = f"the job had made no progress for {seconds}: {stall.headline}"
    headline = one_line(f"{name}: {told}; {text}" if text else f"{name}: {told}", HEADLINE)
    return replace(verdict, headline=headline, why=(*verdict.why, told), sources=(*verdict.sources, ()))


def _raised_in_hang(diagnosis: Diagnosis) -> Verdict | None:
    if not any(judged.failure_class is FailureClass.OWN_FAULT for judged in diagnosis.classified):
        return None
    found = (find(diagnosis) for find in (mismatched, hung, left_behind, returned_early))
    return on_raised(diagnosis, next(filter(None, found), []))


def _own_fault(diagnosis: Diagnosis, *, is_alone: bool = True) -> Verdict | None:
    found = diagnosis.first
    if found is None or found.first.failure_class in ENDS_OF_NODES or is_alone is bool(found.others or found.rivals):
        return None
    return on_fault(diagnosis, found)


def _by(find: Callable[[Diagnosis], list[Candidate]]) -> Callable[[Diagnosis], Verdict | None]:
    """Return the rule that the ranks or nodes that `find` returns are the root cause."""
    return lambda diagnosis: on_candidates(diagnosis, find(diagnosis))


def _lost_document(diagnosis: Diagnosis) -> Verdict | None:
    lost = lost_documents(diagnosis)
    if len(lost) == 1 and not diagnosis.exits:
        return on_candidate(diagnosis, lost[0])
    return not_known(diagnosis, lost) if lost else None


def _alike(diagnosis: Diagnosis) -> list[ClassifiedFailure]:
    """Return the only failure that may be the root cause, or those of several ranks with the same fault."""
    unclear = diagnosis.exits or diagnosis.unclear
    prints = {judged.failure.fingerprint for judged in unclear}
    is_one_fault = len(prints) == 1 and prints != {""} and not any(item.failure.is_silent for item in unclear)
    return unclear if (len(unclear) == 1 or is_one_fault) and not any(item.waited for item in unclear) else []


def _mismatch_of_two(diagnosis: Diagnosis) -> Verdict | None:
    found = sorted(_alike(diagnosis), key=by_time)
    others = [item for item in diagnosis.classified if found and item is not found[0]]
    if not others or found[0].signature != MISMATCH:
        return on_candidates(diagnosis, called_differently(diagnosis))
    text = "it may have passed the other size"
    suspects = [Suspect(text, item.failure.rank, item.failure.node) for item in others[:MAX_SUSPECTS]]
    return on_remaining(diagnosis, found, suspects)


def _by_elimination(diagnosis: Diagnosis) -> Verdict | None:
    return on_remaining(diagnosis, _alike(diagnosis))


def _stock_file(diagnosis: Diagnosis) -> Verdict | None:
    is_stock = all(item.failure.writer is Writer.STOCK for item in diagnosis.classified)
    return on_remaining(diagnosis, sorted(diagnosis.unclear, key=by_time)[:1] if is_stock else ())


def _only_failure(diagnosis: Diagnosis) -> Verdict | None:
    failure = diagnosis.classified[0].failure
    has_no_peer = failure.place.world_size == 1 or failure.writer is Writer.STOCK
    return on_remaining(diagnosis, diagnosis.classified if len(diagnosis.classified) == 1 and has_no_peer else ())


def _handled(diagnosis: Diagnosis) -> Verdict | None:
    """Judge the first try of a program that tries again: its ranks' first exceptions instead of their last ones.

    Not after a restart in the same processes, from which the job had recovered, nor if the tries were so far apart that
    the program trained meanwhile.
    """
    job = diagnosis.job
    last = {failure.rank: failure.timestamp_ns or 0 for failure in job.failures}
    near = (item for item in job.handled if last.get(item.rank, 0) - (item.timestamp_ns or 0) < _TRIES_NS)
    printed = {failure.rank: failure.log_tail for failure in job.failures}  # to the end
    tried = {item.rank: replace(item, log_tail=printed.get(item.rank, "")) for item in reversed(tuple(near))}
    if not tried or any(record.kind is RestartKind.IN_PROCESS for record in job.restarts):
        return None
    failures = tuple(tried.get(failure.rank, failure) for failure in job.failures)
    found = with_faults(diagnose(replace(job, failures=failures)))
    first = found.first
    if first is None or first.first.failure is not tried.get(first.first.failure.rank):
        return None
    verdict = on_fault(found, first)
    why = "its program handled this, and tried again; the later tries failed because of each other"
    return replace(verdict, why=(*verdict.why, why), sources=(*verdict.sources, ()))


RULES = (
    # a process failed by itself, or a node ended
    Rule("long-wait", _long_wait, "medium", "the rank for which most had waited a minute or more before any fault"),
    Rule("lost-node", _lost_node, "high", "a node whose agent is gone"),
    Rule("terminated-node", _terminated_node, "high", "a node that was terminated"),
    Rule("first-of-several", partial(_own_fault, is_alone=False), "medium", "the first of several different faults"),
    Rule("own-fault", _own_fault, "high", "the only fault of its own, or the same one on several ranks"),
    # no process failed by itself: the others imply the root cause
    Rule("spread-error", _by(spread_errors), "medium", "the rank whose error a checkpoint raised on other ranks"),
    Rule("broadcast", _by(broadcast_root), "medium", "the rank or node whose failure agents told each other"),
    Rule("raised-in-hang", _raised_in_hang, "medium", "the exception during whose clean-up the others timed out"),
    Rule("mismatch", _by(mismatched), "medium", "the rank that passed another size than the others"),
    Rule("hang", _by(hung), "medium", "the rank for which the others waited"),
    Rule("no-progress", _by(all_in_one_collective), "low", "the only node: all ranks waited in one collective"),
    Rule("left-behind", _by(left_behind), "low", "the rank that missed a collective after which most failed alike"),
    Rule("returned", _by(returned_early), "medium", "the rank that had ended when all others lost a peer or timed out"),
    Rule("accused-node", _by(accused_nodes), "medium", "the node that most name, and whose documents are missing"),
    Rule("node-without-report", _by(nodes_without_report), "medium", "a node that joined and sent no report since"),
    Rule("lost-document", _lost_document, "medium", "a rank that failed, and whose document is missing"),
    # what remains
    Rule("mismatch-of-two", _mismatch_of_two, "low", "two that called a collective differently"),
    Rule("waited-apart", _by(waited_apart), "low", "the rank that timed out in another operation than all others"),
    Rule("by-elimination", _by_elimination, "medium", "the only failure that is not certainly a consequence"),
    Rule("stock-file", _stock_file, "medium", "the earliest of Flyte's own error files, if there are no others"),
    Rule("only-failure", _only_failure, "low", "the only failure of a job without peers"),
    Rule("handled", _handled, "low", "the first exception that a program handled, which then tried again"),
    Rule("undetermined", not_known, "low", "not known"),
)
"""All rules; the last one always applies."""
