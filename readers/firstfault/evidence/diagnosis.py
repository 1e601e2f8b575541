"""The diagnosis of an attempt: classes of all failures, clocks, blamed ranks,
and missing documents.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from firstfault import model
from firstfault.evidence.classification import (
    ClassifiedFailure,
    FailureClass,
    classify_failures,
    find_ranks_with_checkpoint_error,
)
from firstfault.evidence.clocks import Clocks
from firstfault.evidence.texts import PATTERNS, Pointer, has_reached_end
from firstfault.exceptions.exceptions_in_text import get_short_name
from firstfault.exceptions.first_cause import find_first_cause
from firstfault.layout import ErrorKey
from firstfault.utils.text import one_line

NODE_END_CLASSES = {FailureClass.NODE_LOST, FailureClass.EXTERNAL}
MAX_ERROR_CHARACTERS = 200
"""Maximum length of another rank's error in a sentence."""
MAX_CULPRITS = 3
"""If more ranks than this qualify, they hardly have one fault, and none is blamed."""


@dataclass(frozen=True, slots=True)
class BlameCounts:
    """Number of failures that blame each rank and node."""

    ranks: Counter[int] = field(default_factory=Counter)
    nodes: Counter[str] = field(default_factory=Counter)
    broadcast: Counter[model.CausedBy] = field(default_factory=Counter)
    """Number of agents and workers stopped because of each broadcast failure,
    without its document's name.
    """
    broadcast_of: Counter[int | str] = field(default_factory=Counter)
    """The same by the failure's rank, or by its node if it has no rank."""

    def of(self, judged: ClassifiedFailure) -> int:
        """Return the number of failures that blame this failure's process or node."""
        rank, node = judged.failure.rank, judged.failure.node
        return (self.ranks[rank] if rank is not None else 0) + self.nodes[node]

    def times_broadcast(self, judged: ClassifiedFailure) -> int:
        """Return the number of processes stopped because of it;
        agents broadcast the first failure that they notice.
        """
        rank, node = judged.failure.rank, judged.failure.node
        return (self.broadcast_of[rank] if rank is not None else 0) + self.broadcast_of[node]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rank or node that is probably the root cause although it reported no fault."""

    why: str
    rank: int | None = None
    node: str = ""
    failure: model.WorkerError | None = None
    """Its agent's document about stopping it; None: none."""
    category: str = "hang"
    """`headline` in model/categories.toml has the headline's words; "no report" without an entry.
    """
    weight: int = 1
    """Number of independent reasons."""
    is_shared: bool = False
    """Whether all these candidates together are the root cause, each in its own group of ranks."""
    is_reported: bool = False
    """Whether a report of the ranks that waited lists it as missing,
    like all others of that report.
    """
    is_sure: bool = True
    """Whether the progress of all possible culprits is known."""


@dataclass(frozen=True, slots=True)
class FirstFault:
    """The fault that came first, or that may have."""

    first: ClassifiedFailure
    same: tuple[ClassifiedFailure, ...]
    """All failures with this fault, including `first`."""
    others: tuple[ClassifiedFailure, ...]
    """Failures with different faults."""
    rivals: tuple[ClassifiedFailure, ...]
    """Different faults that may have been first: their order is unknown."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All knowledge about an attempt's failures, from which a strategy picks the root cause.

    diagnose        classifies each failure, bounds the clocks, counts blame
    find_faults     reclassifies ranks that failed because of a peer, or gave up waiting for one, as
                    victims; then it orders the possible faults (`faults`, `first`), or moves all of
                    them to `late`
                    after a timeout
    rules           each rule of the strategy reads the result; nothing changes any more
    """

    job: model.JobErrors
    classified: tuple[ClassifiedFailure, ...]
    """One for each of `JobErrors.failures`, in the same order."""
    clocks: Clocks
    """Bounds for the difference between any two failures' times."""
    blame_counts: BlameCounts
    """How often each rank and node is blamed."""
    faults: tuple[ClassifiedFailure, ...] = ()
    """The faults that may be the root cause; set by `find_faults`."""
    first: FirstFault | None = None
    """The first of `faults`."""
    late: tuple[ClassifiedFailure, ...] = ()
    """Faults that can't be the root cause because a rank had timed out before;
    set by `find_faults`.
    """

    @property
    def workers(self) -> list[ClassifiedFailure]:
        """The failures of workers."""
        return [
            judged for judged in self.classified if judged.failure.subject is model.Subject.WORKER
        ]

    @property
    def waits(self) -> list[ClassifiedFailure]:
        """The failures of ranks that timed out waiting."""
        return [judged for judged in self.classified if judged.waited]

    @property
    def unclear(self) -> list[ClassifiedFailure]:
        """Failures that may be cause or consequence,
        except on nodes with an agent that lost its peers.
        """
        lost_peers = {
            item.failure.node
            for item in self.classified
            if item.failure.subject is model.Subject.AGENT
        }
        found = (item for item in self.classified if item.failure_class is FailureClass.UNCLEAR)
        return [item for item in found if item.failure.node not in lost_peers]

    @property
    def exits(self) -> list[ClassifiedFailure]:
        """Failures of `unclear` that neither waited nor were stopped because of a timeout."""
        has_waits = bool(self.waits)
        return [
            item
            for item in self.unclear
            if not item.waited and not (has_waits and item.failure.stopped_by_agent)
        ]


def diagnose(job: model.JobErrors) -> Diagnosis:
    """Classify the failures of the judged round. Pure: the same job gives the same diagnosis."""
    classified = classify_failures(job)
    clocks = Clocks(job)
    classified = _set_aside_finished_ranks(classified, clocks)
    return Diagnosis(job, classified, clocks, _count_blame(job, classified))


def _set_aside_finished_ranks(
    classified: tuple[ClassifiedFailure, ...], clocks: Clocks
) -> tuple[ClassifiedFailure, ...]:
    """Return the failures, of which the end of a program is none if another rank's own failure
    came before it, or no other rank was further than this one.

    Such an end leaves a document because its peers may still need the rank.
    """
    ends = [item for item in classified if has_reached_end(item.failure)]
    others = [item for item in classified if not has_reached_end(item.failure)]
    own = [item.failure for item in others if item.failure_class <= FailureClass.OWN_EXIT]
    finished = {
        id(item)
        for item in ends
        if any(clocks.before(failure, item.failure) for failure in own)
        or (own and not _is_needed(item.failure, [other.failure for other in others]))
    }
    why = "had run to its end"
    return tuple(
        replace(item, failure_class=FailureClass.FINISHED, why=why)
        if id(item) in finished
        else item
        for item in classified
    )


def _is_needed(finished: model.WorkerError, others: Iterable[model.WorkerError]) -> bool:
    """Whether another rank may have waited for a finished one: it had called a collective that
    this one hadn't, or its collectives aren't known.
    """
    called = {item.group: item.enqueued for item in finished.collectives}
    return not called or any(
        not other.collectives
        or any(item.enqueued > called.get(item.group, 0) for item in other.collectives)
        for other in others
    )


def describe_blame(count: int) -> str:
    """Return "1 failure names it", "3 failures name it"."""
    return "1 failure names it" if count == 1 else f"{count} failures name it"


def _count_blame(job: model.JobErrors, classified: Iterable[ClassifiedFailure]) -> BlameCounts:
    """Count how often each rank and node is blamed; a failure that names itself doesn't count."""
    # an address shared by several nodes identifies none
    nodes_at: dict[str, set[str]] = defaultdict(set)
    for place in job.places:
        for name in (place.ip, place.host, place.host.partition(".")[0], place.node):
            if name and place.node:
                nodes_at[name].add(place.node)
    blame_counts = BlameCounts()
    told = [entry.first_failure for entry in job.roster] + [
        judged.failure.caused_by for judged in classified
    ]
    causes = [replace(cause, document="") for cause in told if cause is not None]
    blame_counts.broadcast.update(causes)
    blame_counts.broadcast_of.update(
        cause.node if cause.rank is None else cause.rank for cause in causes
    )
    for judged in classified:
        if judged.pointer is None:
            continue
        rank = judged.pointer.rank
        node = _find_named_node(judged.pointer, nodes_at)
        if rank is not None and rank != judged.failure.rank:
            blame_counts.ranks[rank] += 1
        if node and node != judged.failure.node:
            blame_counts.nodes[node] += 1
    return blame_counts


def _find_named_node(pointer: Pointer, nodes_at: dict[str, set[str]]) -> str:
    # a dual-stack socket writes an IPv4 address as "::ffff:10.0.0.1"
    for name in (pointer.ip.removeprefix("::ffff:"), pointer.host, pointer.host.partition(".")[0]):
        if len(nodes := nodes_at.get(name, set())) == 1:
            return next(iter(nodes))
    return ""


# --- ranks and nodes that failed without a readable report ----------------------------------------


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
    found = []
    for entry in job.roster:
        node = entry.place.node
        lost = {
            item.rank: item
            for item in entry.receipts
            if not item.withdrawn and item.name not in present
        }
        for rank in entry.ranks if entry.phase is model.Phase.FAILED else ():
            is_lost = rank in lost or not entry.receipts
            if not is_lost or rank in unopened or (node, rank) in reported:
                continue
            if rank in lost and _parse_fingerprint(lost[rank].name) in of_victims:
                continue
            reason = lost[rank].error if rank in lost else ""
            why = (
                f"its document was not uploaded ({reason})" if reason else "its document is missing"
            )
            found.append(Candidate(why, rank, node, None, "unknown"))
    # many lost documents have one reason, such as an unreachable storage, and most of them belong
    # to victims
    found.sort(key=lambda item: (item.node, item.rank if item.rank is not None else -1))
    if len(found) > MAX_CULPRITS:
        found = [
            item
            for item in found
            if item.rank is not None and diagnosis.blame_counts.ranks[item.rank]
        ]
    return found if len(found) <= MAX_CULPRITS else []


def find_ranks_without_failure(job: model.JobErrors) -> dict[int, str]:
    """Return the ranks without a failure, with their nodes,
    on finished nodes and on nodes that reported failures.

    Ranks without an agent aren't among them.
    """
    known = {failure.rank for failure in job.failures} | {
        rank for group in job.unopened for rank in group.ranks
    }
    failed = [entry for entry in job.roster if entry.phase is model.Phase.FAILED and entry.receipts]
    finished = [
        entry
        for entry in job.roster
        if entry.phase is model.Phase.SUCCEEDED and entry.place.rank is None
    ]
    known |= {receipt.rank for entry in failed for receipt in entry.receipts}
    return {
        rank: entry.place.node
        for entry in failed + finished
        for rank in entry.ranks
        if rank not in known
    }


def _parse_fingerprint(name: str) -> str:
    """Return the fingerprint in a document's name; empty: none."""
    key = ErrorKey.parse(name)
    return key.fingerprint if key is not None else ""


def find_self_ended_ranks(job: model.JobErrors) -> list[model.NodePresence]:
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
    if find_self_ended_ranks(job):
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


def find_spread_errors(diagnosis: Diagnosis) -> list[Candidate]:
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
        f" {one_line(error.message, MAX_ERROR_CHARACTERS)}"
    )
    places = ((rank, by_rank.get(rank)) for rank in ranks)
    return [
        Candidate(why, rank, getattr(failure, "node", ""), failure, "checkpoint")
        for rank, failure in places
    ]


def find_broadcast_cause(diagnosis: Diagnosis) -> list[Candidate]:
    """Return the rank or node with the most broadcast failure, if it left no document.

    If a rank timed out, the first failure noticed may be that timeout, so it doesn't count.
    """
    job, broadcast = diagnosis.job, diagnosis.blame_counts.broadcast
    most = max(broadcast.values(), default=0)
    causes = [cause for cause, count in broadcast.items() if count == most]
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
    told = [
        (failure.caused_by, sent.reason)
        for failure in job.failures
        for sent in failure.sent_signals[:1]
    ]
    told += [(entry.first_failure, entry.first_failure_reason) for entry in job.roster]
    given = Counter(
        reason for cause, reason in told if cause and (cause.rank, cause.node) == (rank, node)
    )
    reason = max(given, key=lambda item: (given[item], item)) if given else ""
    what = reason.partition(" failed: ")[2]
    if diagnosis.waits and (PATTERNS["wait_exception"].fullmatch(what) or not what):
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
    """Return the nodes that joined the round and have sent no report; if some are blamed,
    only these.

    Such a node is lost if it is blamed, or no rank timed out; otherwise it may hang, or its report
    may be late.
    """
    done = {
        entry.place.node for entry in diagnosis.job.roster if entry.phase is not model.Phase.JOINED
    }
    found = []
    for node in sorted(_find_nodes_without_document(diagnosis.job) - done):
        votes = diagnosis.blame_counts.nodes[node]
        named = f", and {describe_blame(votes)}" if votes else ""
        category = "node_lost" if votes or not diagnosis.waits else "unknown"
        why = f"started, then sent no report{named}"
        found.append(Candidate(why, None, node, None, category, weight=1 + bool(votes)))
    return found


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
    there = {failure.node for failure in job.failures}
    there |= {entry.place.node for entry in job.roster if entry.place.group_rank in listed}
    return {entry.place.node for entry in job.roster} - there
