"""Ranks and nodes that failed without a readable report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from firstfault import model
from firstfault.evidence.classification import FailureClass, find_ranks_with_checkpoint_error
from firstfault.evidence.diagnosis import MAX_CULPRITS, Candidate, Diagnosis, describe_blame
from firstfault.exceptions.exceptions_in_text import get_short_name
from firstfault.exceptions.first_cause import find_first_cause
from firstfault.layout import ErrorKey
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault.utils.text import one_line

_MAX_ERROR_CHARACTERS = 200
"""Maximum length of another rank's error in a sentence."""


def are_unlisted(job: model.JobErrors, failures: Iterable[model.WorkerError]) -> bool:
    """Whether the agents of these ranks listed their nodes' documents,
    but not all documents of these failures.

    Any process with write access to the attempt's prefix may have written the unlisted documents.
    """
    listed: dict[tuple[str, int | None, int], set[str]] = defaultdict(set)
    for entry in job.roster:
        if entry.phase is model.Phase.FAILED:
            listed[_get_pod(entry.place)].update(receipt.name for receipt in entry.receipts)
    for failure in failures:
        names = listed[_get_pod(failure.place)]
        if (
            failure.place.rank is None
            or not names
            or names >= {document.name for document in failure.documents}
        ):
            return False
    return True


def _get_pod(place: model.Place) -> tuple[str, int | None, int]:
    return place.node, place.group_rank, place.round


def find_lost_documents(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the ranks that failed but have no readable document.

    Documents with a victim's fingerprint in their name don't count, nor do ranks without a receipt
    on a node that has receipts: they didn't fail. Of many ranks, only the blamed ones are returned.
    """
    job = diagnosis.job
    present = {document.name for failure in job.failures for document in failure.documents}
    reported = {(failure.node, failure.rank) for failure in job.failures}
    unopened = {rank for group in job.unopened for rank in group.ranks}
    victims = [
        item.failure for item in diagnosis.classified if item.failure_class >= FailureClass.UNCLEAR
    ]
    of_victims = {failure.fingerprint.partition(":")[2] for failure in victims}
    of_victims |= {
        _parse_fingerprint(document.name) for failure in victims for document in failure.documents
    }
    of_victims.discard("")
    candidates = []
    for entry in job.roster:
        node = entry.place.node
        lost_receipts = {
            item.rank: item
            for item in entry.receipts
            if not item.withdrawn and item.name not in present
        }
        for rank in entry.ranks if entry.phase is model.Phase.FAILED else ():
            is_lost = rank in lost_receipts or not entry.receipts
            if not is_lost or rank in unopened or (node, rank) in reported:
                continue
            if rank in lost_receipts and _parse_fingerprint(lost_receipts[rank].name) in of_victims:
                continue
            reason = lost_receipts[rank].error if rank in lost_receipts else ""
            why = (
                f"its document was not uploaded ({reason})" if reason else "its document is missing"
            )
            candidates.append(Candidate(why, rank, node, None, "unknown"))
    # many lost documents have one reason, such as an unreachable storage, and most of them belong
    # to victims
    candidates.sort(key=lambda item: (item.node, item.rank if item.rank is not None else -1))
    if len(candidates) > MAX_CULPRITS:
        candidates = [
            item
            for item in candidates
            if item.rank is not None and diagnosis.blame_counts.ranks[item.rank]
        ]
    return candidates if len(candidates) <= MAX_CULPRITS else []


def map_unfailed_ranks_to_nodes(job: model.JobErrors) -> dict[int, str]:
    """Return the ranks without a failure, with their nodes,
    on finished nodes and on nodes that reported failures.

    Ranks without an agent aren't among them.
    """
    reported_ranks = {failure.rank for failure in job.failures} | {
        rank for group in job.unopened for rank in group.ranks
    }
    failed = [entry for entry in job.roster if entry.phase is model.Phase.FAILED and entry.receipts]
    finished = [
        entry
        for entry in job.roster
        if entry.phase is model.Phase.SUCCEEDED and entry.place.rank is None
    ]
    reported_ranks |= {receipt.rank for entry in failed for receipt in entry.receipts}
    return {
        rank: entry.place.node
        for entry in failed + finished
        for rank in entry.ranks
        if rank not in reported_ranks
    }


def _parse_fingerprint(name: str) -> str:
    """Return the fingerprint in a document's name, or an empty string if the name has none."""
    key = ErrorKey.parse(name)
    return key.fingerprint if key is not None else ""


def find_agentless_exits(job: model.JobErrors) -> list[model.NodePresence]:
    """Return the entries of ranks without an agent that exited on their own, with any exit code."""
    return [
        entry
        for entry in job.roster
        if entry.phase is model.Phase.SUCCEEDED and entry.place.rank is not None
    ]


def find_terminated_nodes(job: model.JobErrors) -> list[Candidate]:
    """Return the nodes where workers were stopped because the agent was terminated.

    None if ranks ran without an agent: a launcher terminates those as soon as one of them exits.
    """
    if find_agentless_exits(job):
        return []
    reasons = {model.TERMINATED, model.TERMINATED_ALONE}
    workers: Counter[str] = Counter(
        failure.node
        for failure in job.failures
        if any(sent.reason in reasons for sent in failure.sent_signals)
    )
    return [
        Candidate(
            f"{count} of its workers were stopped because it was terminated",
            None,
            node,
            None,
            "preemption",
        )
        for node, count in sorted(workers.items())
    ]


def find_ranks_with_relayed_errors(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the ranks with a checkpoint error that only other ranks raised before
    this rank was stopped.

    An asynchronous checkpoint raises the error where a rank asks for the result; the failed rank
    may ask last.
    """
    by_rank = {
        failure.rank: failure for failure in diagnosis.job.failures if failure.rank is not None
    }
    raised = {
        failure.rank: failure.exception
        for failure in diagnosis.job.failures
        if failure.exception is not None
    }
    errors = {
        rank: exception
        for exception in raised.values()
        for rank in find_ranks_with_checkpoint_error(exception)
    }
    ranks = sorted(errors.keys() - raised.keys())
    if not ranks or len(ranks) > MAX_CULPRITS:
        return []
    error = find_first_cause(errors[ranks[0]])
    why = (
        f"others raised its error: {get_short_name(error)}:"
        f" {one_line(error.message, _MAX_ERROR_CHARACTERS)}"
    )
    places = ((rank, by_rank.get(rank)) for rank in ranks)
    return [
        Candidate(why, rank, getattr(failure, "node", ""), failure, "checkpoint")
        for rank, failure in places
    ]


# The name of an exception that a timed-out wait may raise
_WAIT_EXCEPTION = LazyPattern(r"(?:Runtime|Timeout|Dist(?:Store|Network|Backend)?)Error")


def find_broadcast_cause(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the rank or node with the most broadcast failure, if it left no document.

    If a rank timed out, the first failure noticed may be that timeout, so it doesn't count.
    """
    job, broadcast = diagnosis.job, diagnosis.blame_counts.broadcast
    max_count = max(broadcast.values(), default=0)
    causes = [cause for cause, count in broadcast.items() if count == max_count]
    nodes = {entry.place.node for entry in job.roster} | {failure.node for failure in job.failures}
    # if all expected nodes are known, a broadcast that names an unknown node is wrong
    is_everyone = len(nodes) >= (job.coverage.expected or 0)
    # in a tie, the agents disagree about the first failure
    if len(causes) != 1 or (is_everyone and causes[0].node not in nodes):
        return []
    rank, node = causes[0].rank, causes[0].node
    # a node's own document counts more than what its peers wrote about it
    if any(rank in group.ranks for group in job.unopened):
        return []
    if any(failure.node == node and rank in {None, failure.rank} for failure in job.failures):
        return []
    broadcasts = [
        (failure.caused_by, sent.reason)
        for failure in job.failures
        for sent in failure.sent_signals[:1]
    ]
    broadcasts += [(entry.first_failure, entry.first_failure_reason) for entry in job.roster]
    reasons = Counter(
        reason for cause, reason in broadcasts if cause and (cause.rank, cause.node) == (rank, node)
    )
    reason = max(reasons, key=lambda item: (reasons[item], item)) if reasons else ""
    what = reason.partition(" failed: ")[2]
    if diagnosis.waits and (_WAIT_EXCEPTION.fullmatch(what) or not what):
        return []
    what = what or reason or "no reason was given"
    why = f"its agent broadcast its failure ({what}), but its error document is missing"
    if what == model.DIED_SILENTLY:
        why = "its agent died"
    category = "unknown"
    if rank is None and what == model.DIED_SILENTLY:
        category = "node_lost"
    elif rank is None and what.startswith(model.TERMINATED_BY):
        category = (
            "interrupted" if what.endswith("SIGINT") and job.engine == "plain" else "preemption"
        )
    return [Candidate(why, rank, node, None, category)]


def find_unreported_nodes(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the nodes that joined the round and sent no report, or only the blamed ones of these.

    Such a node is lost if it is blamed, or no rank timed out; otherwise it may hang, or its report
    may be late.
    """
    done = {
        entry.place.node for entry in diagnosis.job.roster if entry.phase is not model.Phase.JOINED
    }
    candidates = []
    for node in sorted(_find_nodes_without_document(diagnosis.job) - done):
        votes = diagnosis.blame_counts.nodes[node]
        named = f", and {describe_blame(votes)}" if votes else ""
        category = "node_lost" if votes or not diagnosis.waits else "unknown"
        why = f"started, then sent no report{named}"
        candidates.append(Candidate(why, None, node, None, category, weight=1 + bool(votes)))
    return candidates


def find_blamed_nodes(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the node that most failures blame,
    if it has reported but its documents are missing.
    """
    job, named = diagnosis.job, diagnosis.blame_counts.nodes
    done = {entry.place.node for entry in job.roster if entry.phase is not model.Phase.JOINED}
    with_receipts = {
        entry.place.node
        for entry in job.roster
        if any(receipt.rank is not None for receipt in entry.receipts)
    }
    return [
        Candidate(
            f"its documents are missing, and {describe_blame(named[node])}",
            None,
            node,
            None,
            "unknown",
        )
        for node in sorted(_find_nodes_without_document(job) & done - with_receipts)
        if named[node] * 2 > named.total()  # a minority of the accusations may be about a victim
    ]


def _find_nodes_without_document(job: model.JobErrors) -> set[str]:
    """Return the nodes that joined the round and left no document."""
    listed = {number for group in job.unopened for number in group.group_ranks}
    documented_nodes = {failure.node for failure in job.failures}
    documented_nodes |= {
        entry.place.node for entry in job.roster if entry.place.group_rank in listed
    }
    return {entry.place.node for entry in job.roster} - documented_nodes
