"""Which ranks and nodes failed without a report that could be read: documents lost, agents gone, nodes unheard."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from firstfault.evidence.classification import FailureClass
from firstfault.evidence.inferred_root import InferredRoot
from firstfault.layout.keys import ErrorKey
from firstfault.model import DIED_UNHEARD, TOLD_TO_GO, TOLD_TO_GO_BY, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault.evidence.accusations import Accusations
    from firstfault.evidence.classification import ClassifiedFailure
    from firstfault.model import JobErrors, Receipt, WorkerError

__all__ = ["lost_documents", "silent_nodes_of", "told_of", "told_to_go"]

_MAY_BE_A_WAIT = {"RuntimeError", "TimeoutError", "DistError", "DistStoreError", "DistNetworkError", "DistBackendError"}
"""Names of exceptions that a wait in vain may end in."""
_MANY = 3
"""More silent ranks than this are not one fault."""


def lost_documents(
    job: JobErrors, classified: Sequence[ClassifiedFailure], accusations: Accusations
) -> list[InferredRoot]:
    """Return the ranks that are known to have failed, of which nothing could be read.

    Not those whose document has a name that says that it was a victim's: its fingerprint is that of others that could
    be read; nor those of which a node with receipts has none: they had not failed. Among many, those that somebody
    names.
    """
    present = {document.name for failure in job.failures for document in failure.documents}
    heard = {(failure.node, failure.rank) for failure in job.failures}
    unopened = {rank for group in job.unopened for rank in group.ranks}
    of_victims = {
        digits
        for judged in classified
        if judged.failure_class >= FailureClass.UNCLEAR
        for digits in _faults_of(judged.failure)
    }
    found = []
    for entry in job.roster:
        if entry.phase is not Phase.FAILED:
            continue
        node = entry.place.node
        lost = {item.rank: item for item in entry.receipts if not item.withdrawn and item.name not in present}
        for rank in entry.ranks:
            is_lost = rank in lost or not entry.receipts
            if not is_lost or rank in unopened or (node, rank) in heard or _is_as_others(lost.get(rank), of_victims):
                continue
            reason = lost[rank].error if rank in lost else ""
            why = f"nothing could be read of it ({reason or 'its document is missing'})"
            found.append(InferredRoot(why, 1 + (accusations.ranks[rank] > 0), rank, node, None, "unknown"))
    found.sort(key=lambda item: (item.node, item.rank if item.rank is not None else -1))
    if len(found) > _MANY:
        found = [item for item in found if item.weight > 1]
    return found if len(found) <= _MANY else []


def _is_as_others(lost: Receipt | None, of_victims: set[str]) -> bool:
    """Whether a document's name says that it tells the same as those of victims."""
    key = ErrorKey.parse(lost.name) if lost is not None else None
    return key is not None and bool(key.fingerprint) and key.fingerprint in of_victims


def _faults_of(failure: WorkerError) -> set[str]:
    """The faults that a failure's documents tell by their names, each of them, and its own."""
    keys = [ErrorKey.parse(document.name) for document in failure.documents]
    return {failure.fingerprint.partition(":")[2], *(key.fingerprint for key in keys if key is not None)}


def told_to_go(job: JobErrors) -> list[InferredRoot]:
    """Return the nodes whose workers were stopped because their agent was told to go, which it does not say itself."""
    workers: Counter[str] = Counter(
        failure.node for failure in job.failures if any(sent.reason == TOLD_TO_GO for sent in failure.sent_signals)
    )
    return [
        InferredRoot(
            f"{count} of its workers were stopped because it was told to go", 2, None, node, None, "preemption"
        )
        for node, count in sorted(workers.items())
    ]


def told_of(job: JobErrors, accusations: Accusations, *, waited: bool) -> list[InferredRoot]:
    """Return whose failure most agents were told of, if no document says that it failed.

    Args:
        job: what was read.
        accusations: who was told of whom.
        waited: whether somebody waited in vain: then the first that is told of may be the first whose time was up.
    """
    most = max(accusations.told.values(), default=0)
    causes = [cause for cause, count in accusations.told.items() if count == most]
    nodes = {entry.place.node for entry in job.roster} | {failure.node for failure in job.failures}
    if len(causes) != 1 or causes[0].node not in nodes:
        return []
    who = (causes[0].rank, causes[0].node)
    # of a node, anything that was heard of it is more than the word of others
    if any(who[0] in group.ranks for group in job.unopened):
        return []
    if any(
        (failure.rank, failure.node) == who or (who[0] is None and failure.node == who[1]) for failure in job.failures
    ):
        return []
    said = Counter(_reasons(job, who))
    reason = max(said, key=lambda item: (said[item], item)) if said else ""
    what = reason.partition(" failed: ")[2]
    if waited and (what in _MAY_BE_A_WAIT or not what):
        return []
    what = what or reason or "no reason was given"
    why = f"its agent told the others of it ({what}), but its own document is missing"
    if what == DIED_UNHEARD:
        why = "its agent died without a word"
    return [InferredRoot(why, 2, who[0], who[1], None, _category_of(who[0], what))]


def _reasons(job: JobErrors, who: tuple[int | None, str]) -> list[str]:
    reasons = [
        sent.reason
        for failure in job.failures
        if failure.caused_by is not None and (failure.caused_by.rank, failure.caused_by.node) == who
        for sent in failure.sent_signals[:1]
    ]
    return reasons + [
        entry.first_failure_reason
        for entry in job.roster
        if entry.first_failure is not None and (entry.first_failure.rank, entry.first_failure.node) == who
    ]


def _category_of(rank: int | None, what: str) -> str:
    """What an agent's word about itself, or about another agent, says of a node; of a rank nobody knows."""
    if rank is not None:
        return "unknown"
    return "node_lost" if what == DIED_UNHEARD else "preemption" if what.startswith(TOLD_TO_GO_BY) else "unknown"


def silent_nodes_of(job: JobErrors, accusations: Accusations, *, waited: bool) -> list[InferredRoot]:
    """Return the nodes that took part and have not been heard of since.

    Lost if others name them, or lost their connections to somebody; where somebody waited in vain, such a node may as
    well hang, or be late with its report. Also one that most name, of whose end nothing but its entry into the roster
    is left.
    """
    joined = {entry.place.node for entry in job.roster}
    done = {entry.place.node for entry in job.roster if entry.phase is not Phase.JOINED}
    listed = {number for group in job.unopened for number in group.group_ranks}
    heard = {failure.node for failure in job.failures}
    heard |= {entry.place.node for entry in job.roster if entry.place.group_rank in listed}
    found = []
    for node in sorted(joined - heard):
        votes = accusations.nodes[node]
        if node not in done:
            named = f", and {votes} name it" if votes else ""
            category = "node_lost" if votes or not waited else "unknown"
            why = f"it took part and was not heard of again{named}"
            found.append(InferredRoot(why, 1 + bool(votes), None, node, None, category))
        elif votes * 2 > accusations.nodes.total() and not _has_receipts_of_ranks(job, node):
            found.append(
                InferredRoot(f"nothing could be read of its end, and {votes} name it", 2, None, node, None, "unknown")
            )
    return found


def _has_receipts_of_ranks(job: JobErrors, node: str) -> bool:
    entries = [entry for entry in job.roster if entry.place.node == node]
    return any(receipt.rank is not None for entry in entries for receipt in entry.receipts)
