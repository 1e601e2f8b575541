"""The default strategy, ``evidence``: an ordered table of rules. The first
rule that applies decides.

What a failure shows counts more than its time: rank 17's CUDA error is the root cause, although
ranks 0 to 15 reported their lost connections earlier.

To add a rule for a new cause, edit three files:

1. Here: a function that takes the `Diagnosis` and returns a verdict, or None if the rule doesn't
   apply, and its row in `RULES`. The position of the row decides: rules above it win. Build the
   verdict with `build_fault_verdict` (a process has a fault), `build_candidates_verdict` (ranks
   that all other failures imply), `build_candidate_verdict` (one such rank or node),
   `build_elimination_verdict` (the only failure left) or `build_unknown_cause_verdict` (several).
2. ``tests/readers/test_rules.py``: a pair of cases in `CASES`, at the position of the rule in
   `RULES`: one that needs the rule, and one that it must not touch.
3. ``docs/guides/strategies.md``: run ``python tools/describe_fields.py``, which writes that table.

A rule that needs a new fact about the failures gets it from a function in `firstfault.evidence`:
`hangs` for ranks that didn't do what their peers did, `diagnosis` for what failures report about
other ranks and nodes. If only the meaning of an error text is new, add a signature to
``evidence/signatures.toml`` instead of a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from firstfault.evidence.classification import MISMATCH, ClassifiedFailure, FailureClass
from firstfault.evidence.diagnosis import (
    NODE_END_CLASSES,
    Candidate,
    Diagnosis,
    diagnose,
)
from firstfault.evidence.faults import came_after_long_wait, find_faults
from firstfault.evidence.handled import find_handled_fault
from firstfault.evidence.hangs import (
    find_early_returns,
    find_mismatched_wait,
    find_mixed_calls,
    find_ranks_left_behind,
    find_size_mismatch,
    find_stragglers,
    find_unfinished_collective,
)
from firstfault.evidence.unreported import (
    find_blamed_nodes,
    find_broadcast_cause,
    find_lost_documents,
    find_ranks_with_relayed_errors,
    find_terminated_nodes,
    find_unreported_nodes,
)
from firstfault.model import (
    DocumentsNeeded,
    JobErrors,
    Reason,
    RestartKind,
    Scope,
    Suspect,
    Verdict,
    Writer,
)
from firstfault.model.failure import OF_LOGS
from firstfault.strategies.fault_verdict import build_fault_verdict, build_root_verdict
from firstfault.strategies.headlines import MAX_HEADLINE_CHARS, NO_PROGRESS, name_process
from firstfault.strategies.inferred_verdict import (
    build_candidate_verdict,
    build_candidates_verdict,
    build_elimination_verdict,
    build_raised_in_hang_verdict,
)
from firstfault.strategies.reasons import (
    MAX_SUSPECTS,
    add_hang_begin,
    describe_positions,
    get_failures,
    get_time_sort_key,
    to_suspects,
)
from firstfault.strategies.registry import needs_documents, takes_diagnosis
from firstfault.strategies.teardown_verdict import build_teardown_verdict
from firstfault.strategies.unknown_verdict import build_unknown_cause_verdict
from firstfault.utils.text import counted, duration, one_line

CONFIDENCES_ASCENDING = ("low", "medium", "high")
_MAX_RANKS_READ_PER_REASON = 16
"""How many ranks' documents of a large cascade are read, for each reason to read them."""
_MAX_BLAMED_NODES_READ = 5
"""Number of blamed nodes of a large cascade from which all documents are read."""
_NS_PER_SECOND = 1_000_000_000
_MAX_PLAIN_SECONDS = 600
"""Longer times are printed in minutes or hours."""
_MIN_STALL_SECONDS = 30
"""A job that was terminated after at least this time without progress may have been
terminated because of it.
"""
_MAX_STEP_RETRIES_SPAN_NS = 30 * 60 * _NS_PER_SECOND
"""Longest time between the first and the last exception of a program that tries again:
three timeouts of NCCL.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of `RULES`."""

    name: str
    """The `rule` of its verdicts."""
    decide: Callable[[Diagnosis], Verdict | None]
    """Returns the verdict, or None if the rule doesn't apply."""
    max_confidence: str
    root_cause: str
    """Ends the sentence "The root cause is" in docs/guides/strategies.md."""


# --- the strategy ---------------------------------------------------------------------------------


def _find_ranks_to_read(job: JobErrors) -> set[int]:
    """Return the suspects and the blamed ranks in a sample of a large cascade:
    their documents are needed, too.
    """
    if not job.failures:
        return set()
    diagnosis = diagnose(job)
    blame_counts = diagnosis.blame_counts
    verdict = evidence(job, diagnosis)
    ranks: set[int | None] = {
        rank for rank, _ in blame_counts.ranks.most_common(_MAX_RANKS_READ_PER_REASON)
    }
    ranks |= {
        cause.rank for cause, _ in blame_counts.broadcast.most_common(_MAX_RANKS_READ_PER_REASON)
    }
    ranks |= {
        *verdict.ranks[:_MAX_RANKS_READ_PER_REASON],
        *(suspect.rank for suspect in verdict.suspects),
    }
    nodes: set[str | None] = {
        node for node, _ in blame_counts.nodes.most_common(_MAX_BLAMED_NODES_READ)
    }
    nodes |= {verdict.node, *(suspect.node for suspect in verdict.suspects)}
    ranks_of_nodes = {
        rank for entry in job.roster if entry.place.node in nodes for rank in entry.ranks
    }
    return {rank for rank in ranks if rank is not None} | ranks_of_nodes


@takes_diagnosis
@needs_documents(DocumentsNeeded.SAMPLE, _find_ranks_to_read)
def evidence(job: JobErrors, diagnosis: Diagnosis | None = None) -> Verdict:
    """Pick the failure that explains all others.

    A process that was stopped, or that reports a lost peer, is a victim, whatever its time. Times
    decide only as far as the clocks are known.
    """
    return apply_rules(find_faults(diagnosis or diagnose(job)))


def apply_rules(diagnosis: Diagnosis, rules: Sequence[Rule] = ()) -> Verdict:
    """Return the verdict of the first rule that applies.

    Args:
        diagnosis: with its faults, as `find_faults` returns it.
        rules: the rules to try; by default `RULES`.
    """
    verdicts = (
        (rule, verdict)
        for rule in rules or RULES
        if (verdict := rule.decide(diagnosis)) is not None
    )
    rule, verdict = next(verdicts)
    if verdict.scope is Scope.UNDETERMINED:
        # A program that tries again leaves the failures of its last try, with several possible
        # stragglers. The exceptions of its first try are known, too, and may single out one of
        # them.
        rule, verdict = next(
            (item for item in verdicts if item[0].decide is _judge_original_failures),
            (rule, verdict),
        )
    late_faults = [fault for fault in diagnosis.late if fault.failure is not verdict.root]
    confidence = min(verdict.confidence, rule.max_confidence, key=CONFIDENCES_ASCENDING.index)
    verdict = add_hang_begin(replace(verdict, rule=rule.name, confidence=confidence), diagnosis)
    return _add_suspects(verdict, late_faults, ", later")


def _add_suspects(verdict: Verdict, faults: Iterable[ClassifiedFailure], when: str = "") -> Verdict:
    return replace(verdict, suspects=(*verdict.suspects, *to_suspects(faults, when))[:MAX_SUSPECTS])


# --- a process had a fault, or a node ended -------------------------------------------------------


def _judge_long_wait(diagnosis: Diagnosis) -> Verdict | None:
    # Ranks 0 to 2 waited ten minutes for rank 3; while the job was torn down, rank 4 raised in a
    # clean-up. Rank 4's exception is a fault, but it came after the hang.
    if not diagnosis.faults or not came_after_long_wait(diagnosis):
        return None
    verdict = build_candidates_verdict(diagnosis, find_stragglers(diagnosis))
    if (
        verdict is None
        or not verdict.ranks
        or any(fault.failure.rank in verdict.ranks for fault in diagnosis.faults)
    ):
        return None
    return _add_suspects(verdict, diagnosis.faults)


def _judge_lost_node(diagnosis: Diagnosis) -> Verdict | None:
    fault = diagnosis.first
    is_lost = fault is not None and fault.first.failure_class is FailureClass.NODE_LOST
    return build_fault_verdict(diagnosis, fault) if fault is not None and is_lost else None


def _judge_terminated_node(diagnosis: Diagnosis) -> Verdict | None:
    if fault := diagnosis.first:
        is_external = fault.first.failure_class is FailureClass.EXTERNAL
        return (
            _add_preceding_stall(build_fault_verdict(diagnosis, fault), diagnosis.job)
            if is_external
            else None
        )
    # a terminated agent may leave no document, but its workers' documents name that as the reason
    # of their SIGTERM
    nodes = [] if diagnosis.waits else find_terminated_nodes(diagnosis.job)
    return (
        _add_preceding_stall(build_candidate_verdict(diagnosis, nodes[0]), diagnosis.job)
        if nodes
        else None
    )


def _add_preceding_stall(verdict: Verdict, job: JobErrors) -> Verdict:
    """Add the stall during which a job was terminated: a person or a time limit ended a hang.

    The agents' last snapshots show where the ranks were. Without snapshots a printed stall has a
    record.
    """
    stall = job.last_stall
    seconds = job.progress.idle_seconds
    positions_text = describe_positions(job.failures)
    if stall is not None and stall.timestamp_ns is not None and verdict.timestamp_ns is not None:
        seconds = max(verdict.timestamp_ns - stall.timestamp_ns, 0) / _NS_PER_SECOND
        positions_text = positions_text or stall.headline
    elif seconds < _MIN_STALL_SECONDS:
        return verdict
    if not positions_text:
        return verdict
    what, _, text = verdict.headline.partition(": ")
    took = (
        f"{seconds:.0f} s"
        if seconds < _MAX_PLAIN_SECONDS
        else duration(int(seconds * _NS_PER_SECOND))
    )
    sentence = f"{NO_PROGRESS} {took}: {positions_text}"
    headline = one_line(
        f"{what}: {sentence}, {text}" if text else f"{what}: {sentence}", MAX_HEADLINE_CHARS
    )
    return replace(
        verdict,
        headline=headline,
        why=(*verdict.why, sentence),
        sources=(*verdict.sources, ()),
    )


def _judge_own_fault(diagnosis: Diagnosis, *, is_only: bool = True) -> Verdict | None:
    fault = diagnosis.first
    if (
        fault is None
        or fault.first.failure_class in NODE_END_CLASSES
        or is_only is bool(fault.others or fault.rivals)
    ):
        return None
    return build_fault_verdict(diagnosis, fault)


# --- no process had a fault: the failures imply the root cause ------------------------------------


def _blame(
    find_candidates: Callable[[Diagnosis], list[Candidate]],
) -> Callable[[Diagnosis], Verdict | None]:
    """Return the function of a rule that blames the ranks or nodes found by `find_candidates`."""
    return lambda diagnosis: build_candidates_verdict(diagnosis, find_candidates(diagnosis))


def _judge_raised_in_hang(diagnosis: Diagnosis) -> Verdict | None:
    # Rank 3 raised, and cleaned up for longer than the collective's timeout before the exception
    # left the task function. By their times, ranks 0 to 2 failed first.
    if not any(item.failure_class is FailureClass.OWN_FAULT for item in diagnosis.classified):
        return None
    finders = (find_size_mismatch, find_stragglers, find_ranks_left_behind, find_early_returns)
    candidates = (find(diagnosis) for find in finders)
    return build_raised_in_hang_verdict(diagnosis, next(filter(None, candidates), []))


def _judge_out_of_step(diagnosis: Diagnosis) -> Verdict | None:
    # Rank 2 handled its exception and called the step again, while its peers called the next
    # collective.
    handled = find_handled_fault(diagnosis)
    if handled is None:
        return None
    job, root = diagnosis.job, handled.judged.failure
    failures = tuple(root if failure is handled.original else failure for failure in job.failures)
    why = [
        Reason(
            f"{name_process(root)} {handled.judged.why}, which its program handled before it"
            " continued",
            (root,),
        ),
        Reason(f"it was out of step with its peers: {handled.out_of_step}", (root,)),
    ]
    if diagnosis.waits:
        why.append(
            Reason(
                f"{counted(len(diagnosis.waits), 'rank')} timed out waiting",
                get_failures(diagnosis.waits),
            )
        )
    confidence = "medium" if handled.is_sure else "low"
    return build_root_verdict(replace(job, failures=failures), handled.judged, why, confidence)


def _judge_lost_document(diagnosis: Diagnosis) -> Verdict | None:
    # The roster shows that a rank failed, but the rank's document wasn't uploaded, or is gone. If
    # another rank exited without a reason, that exit may be the root cause as well.
    lost_documents = find_lost_documents(diagnosis)
    if len(lost_documents) == 1 and not diagnosis.exits:
        return build_candidate_verdict(diagnosis, lost_documents[0])
    return build_unknown_cause_verdict(diagnosis, lost_documents) if lost_documents else None


# --- what remains ---------------------------------------------------------------------------------


def _find_only_unclear_fault(diagnosis: Diagnosis) -> list[ClassifiedFailure]:
    """Return the failures of the only fault that may be the root cause, or an empty list if there
    are several faults or one waited.
    """
    unclear = diagnosis.exits or diagnosis.unclear
    fingerprints = {item.failure.fingerprint for item in unclear}
    has_waited = any(item.waited for item in unclear)
    is_silent = any(item.failure.is_silent for item in unclear)
    is_one_fault = len(fingerprints) == 1 and fingerprints != {""} and not is_silent
    return unclear if (len(unclear) == 1 or is_one_fault) and not has_waited else []


def _judge_mismatch_of_two(diagnosis: Diagnosis) -> Verdict | None:
    unclear = sorted(_find_only_unclear_fault(diagnosis), key=get_time_sort_key)
    peers = [item for item in diagnosis.classified if unclear and item is not unclear[0]]
    if not peers or unclear[0].signature != MISMATCH:
        return build_candidates_verdict(diagnosis, find_mixed_calls(diagnosis))
    # of two ranks with different sizes, nothing shows which one is right
    text = "it may have passed the wrong size"
    suspects = [
        Suspect(text, item.failure.rank, item.failure.node) for item in peers[:MAX_SUSPECTS]
    ]
    return build_elimination_verdict(diagnosis, unclear, suspects)


def _judge_by_elimination(diagnosis: Diagnosis) -> Verdict | None:
    return build_elimination_verdict(diagnosis, _find_only_unclear_fault(diagnosis))


def _judge_stock_file(diagnosis: Diagnosis) -> Verdict | None:
    # Flyte's own error files have a code, a message, a worker's name and a time: without ranks, the
    # time decides
    if any(item.failure.writer is not Writer.STOCK for item in diagnosis.classified):
        return None
    return build_elimination_verdict(
        diagnosis, sorted(diagnosis.unclear, key=get_time_sort_key)[:1]
    )


def _judge_only_failure(diagnosis: Diagnosis) -> Verdict | None:
    failure = diagnosis.classified[0].failure
    # a log that names no rank may be of one process
    is_alone = (
        failure.place.engine == OF_LOGS and failure.rank is None and not failure.place.world_size
    )
    has_no_peer = failure.place.world_size == 1 or failure.writer is Writer.STOCK or is_alone
    is_only = len(diagnosis.classified) == 1 and has_no_peer
    return build_elimination_verdict(diagnosis, diagnosis.classified) if is_only else None


def _judge_original_failures(diagnosis: Diagnosis) -> Verdict | None:
    """Judge the first try of a program that tries again:
    its ranks' first exceptions instead of their last ones.

    Not if the job recovered: after a restart in the same processes, or if the tries were so far
    apart that the program trained in between.
    """
    job = diagnosis.job
    last_times = {failure.rank: failure.timestamp_ns or 0 for failure in job.failures}
    spans = (
        (item, last_times.get(item.rank, 0) - (item.timestamp_ns or 0)) for item in job.handled
    )
    recent = [item for item, span_ns in spans if span_ns < _MAX_STEP_RETRIES_SPAN_NS]
    # a document of the first try ends with that try's output; the last try's document has the
    # complete stderr tail
    stderr_tails = {failure.rank: failure.log_tail for failure in job.failures}
    first_tries = {
        item.rank: replace(item, log_tail=stderr_tails.get(item.rank, ""))
        for item in reversed(recent)
    }
    if not first_tries or any(record.kind is RestartKind.IN_PROCESS for record in job.restarts):
        return None
    failures = tuple(first_tries.get(failure.rank, failure) for failure in job.failures)
    first_diagnosis = find_faults(diagnose(replace(job, failures=failures)))
    fault = first_diagnosis.first
    if fault is None or fault.first.failure is not first_tries.get(fault.first.failure.rank):
        return None
    verdict = build_fault_verdict(first_diagnosis, fault)
    why = "its program handled this, and tried again; the later tries failed because of each other"
    return replace(verdict, why=(*verdict.why, why), sources=(*verdict.sources, ()))


RULES = (
    # the work is done
    Rule(
        "teardown",
        build_teardown_verdict,
        "high",
        "no rank: the job had finished, and then failed in its teardown",
    ),
    # a process had a fault, or a node ended
    Rule(
        "long-wait",
        _judge_long_wait,
        "medium",
        "the rank for which most had waited a minute or more before any fault",
    ),
    Rule(
        "lost-node",
        _judge_lost_node,
        "high",
        "a node without a running agent",
    ),
    Rule(
        "terminated-node",
        _judge_terminated_node,
        "high",
        "a node that was terminated",
    ),
    Rule(
        "first-of-several",
        partial(_judge_own_fault, is_only=False),
        "medium",
        "the first of several different faults",
    ),
    Rule(
        "own-fault",
        _judge_own_fault,
        "high",
        "the only fault of its own, or the same on several ranks",
    ),
    # no process had a fault: the failures imply the root cause
    Rule(
        "spread-error",
        _blame(find_ranks_with_relayed_errors),
        "medium",
        "the rank with the error that a checkpoint raised on all ranks",
    ),
    Rule(
        "broadcast",
        _blame(find_broadcast_cause),
        "medium",
        "the rank or node that agents reported to each other",
    ),
    Rule(
        "raised-in-hang",
        _judge_raised_in_hang,
        "medium",
        "the exception in flight when its peers timed out",
    ),
    Rule(
        "out-of-step",
        _judge_out_of_step,
        "medium",
        "the exception that a rank handled before it was out of step with its peers",
    ),
    Rule(
        "mismatch",
        _blame(find_size_mismatch),
        "medium",
        "the rank that passed a different size than its peers",
    ),
    Rule(
        "hang",
        _blame(find_stragglers),
        "medium",
        "the rank that its peers waited for",
    ),
    Rule(
        "no-progress",
        _blame(find_unfinished_collective),
        "low",
        "the only node: all ranks waited in one collective",
    ),
    Rule(
        "left-behind",
        _blame(find_ranks_left_behind),
        "low",
        "the rank that missed a collective after which most failed alike",
    ),
    Rule(
        "returned",
        _blame(find_early_returns),
        "medium",
        "the rank that had ended when all others lost a peer or timed out",
    ),
    Rule(
        "accused-node",
        _blame(find_blamed_nodes),
        "medium",
        "the node that most failures blame, without documents",
    ),
    Rule(
        "node-without-report",
        _blame(find_unreported_nodes),
        "medium",
        "a node that joined and sent no report since",
    ),
    Rule(
        "lost-document",
        _judge_lost_document,
        "medium",
        "a rank that failed, without a document",
    ),
    # what remains
    Rule(
        "mismatch-of-two",
        _judge_mismatch_of_two,
        "low",
        "two that called a collective differently",
    ),
    Rule(
        "waited-apart",
        _blame(find_mismatched_wait),
        "low",
        "the rank that timed out in another operation than all others",
    ),
    Rule(
        "by-elimination",
        _judge_by_elimination,
        "medium",
        "the only failure that is not certainly a consequence",
    ),
    Rule(
        "stock-file",
        _judge_stock_file,
        "medium",
        "the earliest of Flyte's own error files, if that's all there is",
    ),
    Rule(
        "only-failure",
        _judge_only_failure,
        "low",
        "the only failure of a job without peers",
    ),
    Rule(
        "handled",
        _judge_original_failures,
        "low",
        "the first exception that a program handled, which then tried again",
    ),
    Rule(
        "undetermined",
        build_unknown_cause_verdict,
        "low",
        "not known",
    ),
)
"""All rules; the last one always applies."""
