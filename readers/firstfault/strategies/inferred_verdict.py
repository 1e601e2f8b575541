"""The verdict on a root cause that other failures imply: the rank they waited for,
or the only failure left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from firstfault.evidence.classification import ClassifiedFailure, FailureClass
from firstfault.evidence.diagnosis import Candidate, Diagnosis
from firstfault.exceptions.fingerprint import compute_fingerprint
from firstfault.exceptions.stack_position import get_stack_dumps, locate_main_thread
from firstfault.model import Reason, Scope, Suspect, Verdict, WorkerError
from firstfault.model.failure import ABOUT_CATEGORIES, FROM_OUTSIDE, RECORDED_ONLY
from firstfault.strategies import reasons
from firstfault.strategies.fault_verdict import build_root_verdict
from firstfault.strategies.headlines import MAX_HEADLINE_CHARS, join_ranks, name_process
from firstfault.strategies.unknown_verdict import build_unknown_cause_verdict
from firstfault.strategies.verdicts import build_undetermined_verdict, build_victims, list_sources
from firstfault.utils.text import counted, one_line


def build_candidates_verdict(
    diagnosis: Diagnosis, candidates: Sequence[Candidate]
) -> Verdict | None:
    """Return the verdict that the candidates with the most reasons are the root cause;
    None without candidates.

    Several candidates with the same reason diverged from their peers together, and are the root
    cause together. With different reasons they are suspects.
    """
    roster = diagnosis.job.roster
    node_by_rank: dict[int | None, str] = {
        rank: entry.place.node for entry in roster for rank in entry.ranks
    }
    # a rank that its peers name may have left no document, so only the roster has its node
    placed = [
        item if item.node else replace(item, node=node_by_rank.get(item.rank, ""))
        for item in candidates
    ]
    heaviest = _find_heaviest_candidates(placed, diagnosis)
    if not heaviest:
        return None
    if len(heaviest) == 1:
        return build_candidate_verdict(diagnosis, heaviest[0])
    is_one_cause = len({item.why for item in heaviest}) == 1 or all(
        item.is_shared for item in heaviest
    )
    is_one_report = all(item.is_reported for item in heaviest)
    if is_one_cause and (is_one_report or all(item.failure for item in heaviest)):
        return _build_shared_verdict(diagnosis, heaviest)
    return build_unknown_cause_verdict(diagnosis, heaviest)


def build_candidate_verdict(diagnosis: Diagnosis, candidate: Candidate) -> Verdict:
    """Return the verdict that a candidate is the root cause. Its reasons assume that no
    rank reported a fault.
    """
    job, classified, failure = diagnosis.job, diagnosis.classified, candidate.failure
    # of a large cascade only some documents were read; the unread ones of a fault are counted like
    # the read ones
    fingerprints = {item.failure.fingerprint for item in diagnosis.waits}
    wait_count = len(diagnosis.waits) + len(job.unopened_like(*fingerprints))
    why = [
        Reason(
            f"{_name_candidate(candidate)}: {candidate.why}", _find_witnesses(candidate, classified)
        ),
        Reason("no rank raised its own error", reasons.sample_failures(classified)),
    ]
    if wait_count:
        why.append(
            Reason(
                f"{counted(wait_count, 'rank')} timed out waiting",
                reasons.get_failures(diagnosis.waits),
            )
        )
    about = ABOUT_CATEGORIES.get(candidate.category, {})
    what = about.get("headline", "no report")
    code = about.get("code", "USER:NoReport")
    sentence = f"{what}, {_name_candidate(candidate)}: {candidate.why}"
    scope = Scope.EXTERNAL if candidate.category in FROM_OUTSIDE else Scope.NODE
    return replace(
        build_undetermined_verdict(job, reasons.STRATEGY_NAME),
        scope=scope if candidate.rank is None else Scope.RANK,
        ranks=() if candidate.rank is None else (candidate.rank,),
        node=candidate.node or None,
        code=code,
        category=candidate.category,
        fingerprint=_fingerprint_position(candidate, code),
        headline=one_line(sentence, MAX_HEADLINE_CHARS),
        message="\n".join([sentence, *(get_stack_dumps(failure) if failure is not None else ())]),
        # while the reader still waits for nodes, a node without a report may be about to send it
        confidence=(
            "medium" if candidate.is_sure and (job.settled or failure is not None) else "low"
        ),
        why=tuple(reason.text for reason in why),
        sources=list_sources(why),
        root=failure,
        victims=build_victims(job, failure),
    )


def _build_shared_verdict(diagnosis: Diagnosis, candidates: Sequence[Candidate]) -> Verdict:
    """Return the verdict that several ranks together are the root cause."""
    verdict = build_candidate_verdict(diagnosis, candidates[0])
    failures = [item.failure for item in candidates if item.failure is not None]
    ranks = tuple(item.rank for item in candidates if item.rank is not None)
    # flight recorder dumps exist of all ranks, so the counts of all ranks were compared
    is_compared = all(failure.code == RECORDED_ONLY for failure in failures)
    is_compared |= all(item.is_reported for item in candidates)
    nodes = {item.node for item in candidates}
    # "it called 39 collectives" becomes "each called 39 collectives"
    reported = candidates[0].why.replace(" waited for it", f" waited for ranks {join_ranks(ranks)}")
    why = re.sub(r"\bit (?=[a-z])", "each ", reported)
    if any(item.why != candidates[0].why for item in candidates):
        why = "; ".join(re.sub(r"^it\b", f"rank {item.rank}", item.why) for item in candidates)
    what = ABOUT_CATEGORIES[candidates[0].category]["headline"]
    sentence = f"{what}, ranks {join_ranks(ranks)}: {why}"
    if reported == why != candidates[0].why:
        sentence = f"{what}: {why}"
    return replace(
        verdict,
        scope=Scope.RANKS,
        ranks=ranks,
        node=(nodes.pop() or None) if len(nodes) == 1 else None,
        headline=one_line(sentence, MAX_HEADLINE_CHARS),
        message="\n".join([sentence, *(get_stack_dumps(failures[0]) if failures else ())]),
        confidence="medium" if all(item.is_sure for item in candidates) and is_compared else "low",
        why=(sentence, *verdict.why[1:]),
        victims=build_victims(diagnosis.job, failures[0] if failures else None, failures),
    )


def build_raised_in_hang_verdict(
    diagnosis: Diagnosis, candidates: Sequence[Candidate]
) -> Verdict | None:
    """Return the verdict that the only candidate's exception is the root cause,
    although its peers timed out first.

    An exception is recorded when it leaves the task function, or when the agent stops the rank. If
    the rank cleans up for longer than the timeout, its peers' timeouts are recorded before. Returns
    None if there are several candidates, or the candidate raised no exception.
    """
    heaviest = _find_heaviest_candidates(candidates, diagnosis)
    if len(heaviest) != 1:
        return None
    faults = (item for item in diagnosis.classified if item.failure_class is FailureClass.OWN_FAULT)
    of_candidate = (item for item in faults if item.failure.rank == heaviest[0].rank)
    raised = next((item for item in of_candidate if item.failure.exception is not None), None)
    if raised is None:
        return None
    when = (
        "was still handling it when it was stopped"
        if raised.in_flight
        else "its peers timed out waiting for it"
    )
    why = [
        Reason(f"{name_process(raised.failure)} {raised.why}, and {when}", (raised.failure,)),
        Reason(f"{_name_candidate(heaviest[0])}: {heaviest[0].why}", (raised.failure,)),
        *reasons.explain_wrong_clocks(diagnosis),
    ]
    return build_root_verdict(diagnosis.job, raised, why, "medium")


def build_elimination_verdict(
    diagnosis: Diagnosis, remaining: Sequence[ClassifiedFailure], suspects: Iterable[Suspect] = ()
) -> Verdict | None:
    """Return the verdict that the only failure that isn't certainly a
    consequence is the root cause.

    `remaining` is one failure, or several with the same fault. Returns None if it is empty.
    """
    if not remaining:
        return None
    remaining = sorted(remaining, key=reasons.get_time_sort_key)
    first = remaining[0]
    remaining_ids = set(map(id, remaining))
    victims = (item for item in diagnosis.classified if id(item) not in remaining_ids)
    why = [
        Reason(f"{name_process(first.failure)} {first.why}", (first.failure,)),
        Reason("no other rank shows its own fault", reasons.sample_failures(victims)),
        *reasons.explain_wrong_clocks(diagnosis),
    ]
    # several ranks that failed in the same unclear way may all be victims of a rank that left
    # nothing
    is_sure = diagnosis.job.coverage.complete and len(remaining) == 1
    is_sure = is_sure and not first.waited and first.failure_class is FailureClass.UNCLEAR
    failed_alike = reasons.get_failures(remaining) if len(remaining) > 1 else ()
    verdict = build_root_verdict(
        diagnosis.job, first, why, "medium" if is_sure else "low", failed_alike
    )
    return replace(verdict, suspects=tuple(suspects))


def _find_heaviest_candidates(
    candidates: Sequence[Candidate], diagnosis: Diagnosis
) -> list[Candidate]:
    """Return the candidates with the most reasons. Being named by other
    failures is one more reason.
    """
    blame_counts = diagnosis.blame_counts.ranks
    # a report that lists several ranks is read as if it named only the first one
    weights = [
        item.weight + (item.is_reported or (item.rank is not None and blame_counts[item.rank] > 0))
        for item in candidates
    ]
    max_weight = max(weights, default=0)
    return [item for item, weight in zip(candidates, weights, strict=True) if weight == max_weight]


def _find_witnesses(
    candidate: Candidate, classified: Sequence[ClassifiedFailure]
) -> tuple[WorkerError, ...]:
    """Return the evidence: the candidate's own failure, failures that it caused, its node's
    failures, or failures that name it.
    """
    if candidate.failure is not None:
        return (candidate.failure,)
    # a rank that left no document is known from the failures that it caused or that name it
    rank, node = candidate.rank, candidate.node
    causes = ((item, item.failure.caused_by) for item in classified)
    caused = [
        item
        for item, cause in causes
        if cause is not None and (cause.rank, cause.node) == (rank, node)
    ]
    own_failures = [item for item in classified if rank is None and item.failure.node == node]
    pointers = [(item, item.pointer) for item in classified if item.pointer is not None]
    naming = [
        item
        for item, pointer in pointers
        if (rank is not None and rank == pointer.rank)
        or (node and node in {pointer.host, pointer.host.partition(".")[0]})
    ]
    return reasons.sample_failures(caused or own_failures or naming)


def _fingerprint_position(candidate: Candidate, code: str) -> str:
    """Return the fingerprint of the frame in which a rank hung, to compare attempts, or an empty
    string if the frame is unknown.
    """
    if candidate.failure is None or not (frame := locate_main_thread(candidate.failure).frame):
        return ""
    failure = replace(
        candidate.failure,
        exception=None,
        signal="",
        exit_code=None,
        code=code,
        message=frame,
    )
    return compute_fingerprint(failure)


def _name_candidate(candidate: Candidate) -> str:
    if candidate.rank is None:
        return candidate.node
    return (
        f"rank {candidate.rank} on {candidate.node}" if candidate.node else f"rank {candidate.rank}"
    )
