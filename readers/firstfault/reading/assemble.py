"""Merge documents into `JobErrors`: select the judged round, merge documents of one process,
count missing nodes.

Pure functions; docs/reference/format.md has the rules. If a roster exists, it decides on the round:
any process with write access to the attempt can write a document of a later round.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from firstfault import model
from firstfault.exceptions.fingerprint import compute_fingerprint
from firstfault.exceptions.flytekit_files import is_output_error
from firstfault.layout import ErrorKey, is_of_entry
from firstfault.model import (
    JobErrors,
    NodePresence,
    Place,
    RestartRecord,
    Subject,
    WorkerError,
    Writer,
)
from firstfault.model.failure import OF_LOGS
from firstfault.model.job import (
    NodeKey,
    node_key,
    node_label,
    node_order,
    nodes_done,
    nodes_reported,
    select_newest_incarnations,
)

_MAX_LISTED_NAMES = 5
_DIGEST_BITS = 128


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A document that exists but could not be read."""

    name: str
    reason: str

    @property
    def round(self) -> int | None:
        """The round in the document's name; None if the name doesn't match the grammar."""
        key = ErrorKey.parse(self.name)
        return None if key is None else key.round


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All files of an attempt, as read or listed at one time."""

    documents: tuple[WorkerError, ...] = ()
    seals: tuple[model.Seal, ...] = ()
    roster: tuple[NodePresence, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    foreign: tuple[str, ...] = ()
    """Names of files that aren't documents."""
    notes: tuple[str, ...] = field(default=())
    """Sentences about unread files; any note makes the coverage incomplete."""
    completion: str = ""
    """See `JobErrors.completion`."""
    unopened: tuple[model.Unopened, ...] = ()
    """Documents of the judged round that weren't opened, because similar documents were."""
    unopened_history: int = 0
    """Number of unopened documents of earlier rounds and incarnations."""
    listed_names: frozenset[str] = frozenset()
    """Names of listed documents, opened or not, that a receipt mentions."""
    stored_names: frozenset[str] = frozenset()
    """Names in `listed_names` with a document in the storage itself, rather than only a copy in a
    node's bundle.
    """
    restarts: tuple[RestartRecord, ...] = ()
    """Oldest first."""
    size: model.JobSize | None = None
    """The same as `JobErrors.size`; so is the next attribute."""
    named_ranks: tuple[int, ...] = ()


def assemble(snapshot: Snapshot, *, expected_nodes: int | None = None) -> JobErrors:
    """Build the failures, the roster and the coverage of an attempt. The order within
    `snapshot` doesn't matter.

    `expected_nodes` overrides the number of nodes in the roster and the documents.
    """
    withdrawn = _find_withdrawn(snapshot)
    handled = [
        document
        for document in snapshot.documents
        if not withdrawn.isdisjoint(_list_names(document))
    ]
    snapshot = replace(
        snapshot,
        documents=tuple(
            document
            for document in snapshot.documents
            if withdrawn.isdisjoint(_list_names(document))
        ),
        unreadable=tuple(item for item in snapshot.unreadable if item.name not in withdrawn),
    )
    judged = find_judged_round(snapshot.roster, snapshot.documents, snapshot.restarts)
    current = [document for document in snapshot.documents if judged.has(document)]
    history = [document for document in snapshot.documents if not judged.has(document)]
    of_round = [entry for entry in snapshot.roster if entry.place.round == judged.number]
    roster = tuple(
        sorted(
            select_newest_incarnations(of_round, judged.newest_incarnations), key=_build_roster_key
        )
    )
    without_receipts = [
        replace(
            entry,
            receipts=tuple(receipt for receipt in entry.receipts if receipt.name not in withdrawn),
        )
        for entry in roster
    ]
    unreadable = [
        item for item in snapshot.unreadable if item.round is None or item.round >= judged.number
    ]
    unreadable.sort(key=lambda item: (item.name, item.reason))
    tails = (
        (_get_incarnation(entry.place), tail)
        for entry in snapshot.roster
        for tail in entry.log_tails
    )
    logs = {(*incarnation, tail.rank): tail.text for incarnation, tail in tails}
    merged = [_place_output_error(failure, roster) for failure in _merge_documents(current)]
    failures = _sort_by_time(_add_log_tails(merged, logs))
    return JobErrors(
        failures=failures,
        history=_sort_by_time(_add_log_tails(_merge_documents(history), logs)),
        handled=_sort_by_time(tuple(document for document in handled if judged.has(document))),
        roster=roster,
        completion=snapshot.completion,
        seals=tuple(sorted(snapshot.seals, key=lambda seal: seal.order)),
        coverage=_build_coverage(
            snapshot,
            judged,
            failures,
            without_receipts,
            unreadable,
            expected_nodes,
        ),
        round=judged.number,
        attempt=max((failure.place.attempt for failure in failures), default=0),
        digest=compute_digest(failures, snapshot.unopened),
        document_count=sum(len(failure.documents) for failure in failures)
        + sum(group.count for group in snapshot.unopened),
        unopened=snapshot.unopened,
        restarts=snapshot.restarts,
        size=snapshot.size,
        named_ranks=snapshot.named_ranks,
    )


def compute_digest(failures: Iterable[WorkerError], unopened: Iterable[model.Unopened] = ()) -> str:
    """Return a digest of the names of all documents, opened or not.

    It is a sum of hashes, so it depends neither on the order nor on the selection of opened
    documents.
    """
    names = {document.name for failure in failures for document in failure.documents}
    total = sum(map(hash_name, names)) + sum(group.names_hash for group in unopened)
    return f"{total % (1 << _DIGEST_BITS):0{_DIGEST_BITS // 4}x}"


def hash_name(name: str) -> int:
    """Return a document's term in the digest: the uuid in its name, or else a hash of the name."""
    key = ErrorKey.parse(name)
    if key is not None:
        return int(key.uuid, 16)
    return int.from_bytes(
        hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[: _DIGEST_BITS // 8], "big"
    )


# --- the judged round -----------------------------------------------------------------------------


def compute_judged_round(
    entries: Collection[int], documents: Iterable[int], restarts: Iterable[RestartRecord]
) -> int:
    """Return the last round with a roster entry; without a roster, the last round with a document.

    After a round with a restart record, the next round needs no roster entry, only a document.
    `entries` and `documents` are round numbers.
    """
    if not entries:
        return max(documents, default=0)
    begun = {
        record.number + 1
        for record in restarts
        if record.restart and record.kind is model.RestartKind.ROUND
    }
    return max(*entries, *(number for number in documents if number in begun), 0)


@dataclass(frozen=True, slots=True)
class JudgedRound:
    """The judged round, and which documents belong to it."""

    number: int
    last_entry: int | None
    """The last round with a roster entry, or None if there is no roster entry."""
    newest_incarnations: dict[NodeKey, int]
    """The newest incarnation of each node in this round, from roster entries, else from documents.
    """
    newest_by_node_name: dict[str, int]
    """The same by the node's name, for documents without a group rank."""
    has_entries: bool
    """Whether the round has a roster entry."""

    def has(self, document: WorkerError) -> bool:
        """Whether a document belongs to the judged round;
        otherwise the node or the job has restarted since.
        """
        place = document.place
        if document.writer is Writer.STOCK or place.round > self.number:
            return True  # Flyte's own files have no round; a later round isn't history
        if place.round != self.number:
            return False
        return not place.incarnation or place.incarnation >= self._find_newest(place, default=0)

    def find_unconfirmed_claim(self, document: WorkerError) -> str:
        """Return the claim that no roster entry confirms, a later round or a newer incarnation, or
        an empty string if there is none.
        """
        place = document.place
        if document.writer is Writer.STOCK:
            return ""
        if self.last_entry is not None and place.round > self.last_entry:
            return f"round {place.round}, which no roster entry confirms"
        if not self.has_entries or place.round != self.number:
            return ""
        is_newer = place.incarnation > self._find_newest(place, default=place.incarnation)
        return "a later start of its pod than its roster entries do" if is_newer else ""

    def _find_newest(self, place: Place, default: int) -> int:
        if place.group_rank is None:
            return self.newest_by_node_name.get(place.node, default)
        # an unreadable roster entry is known only by its file name, which has no node name
        keys = (node_key(place), ("", place.group_rank))
        return max(
            (self.newest_incarnations[key] for key in keys if key in self.newest_incarnations),
            default=default,
        )


def find_judged_round(
    roster: Sequence[NodePresence],
    documents: Iterable[WorkerError],
    restarts: Iterable[RestartRecord],
) -> JudgedRound:
    """Determine the judged round of an attempt."""
    entries = {entry.place.round for entry in roster}
    # only readable documents count: an unreadable document must not turn all readable documents
    # into history
    ours = [document.place for document in documents if document.writer is not Writer.STOCK]
    number = compute_judged_round(entries, (place.round for place in ours), restarts)
    newest_incarnations: dict[NodeKey, int] = defaultdict(int)
    of_name: dict[str, int] = defaultdict(int)
    for place in [entry.place for entry in roster] if number in entries else ours:
        if place.round == number:
            key = node_key(place)
            newest_incarnations[key] = max(newest_incarnations[key], place.incarnation)
            of_name[place.node] = max(of_name[place.node], place.incarnation)
    return JudgedRound(
        number,
        max(entries, default=None),
        dict(newest_incarnations),
        dict(of_name),
        number in entries,
    )


# --- withdrawn documents --------------------------------------------------------------------------


def _find_withdrawn(snapshot: Snapshot) -> frozenset[str]:
    """Return the names of documents about exceptions in flight that the user's
    code handled in the end.

    Either a receipt of the same node marks the document as withdrawn, or the node's roster entry
    has phase succeeded.
    """
    read: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    for document in snapshot.documents:
        for name in _list_names(document):
            read[name].add(_get_incarnation(document.place))

    def is_of(entry: Place, name: str) -> bool:
        """Whether a document has the entry's node, round and incarnation; for an unread document,
        by its name.
        """
        if name in read:
            return read[name] == {_get_incarnation(entry)}
        key = ErrorKey.parse(name)
        return key is None or is_of_entry(key, entry)

    # only the same node and incarnation can withdraw a document: a wrong receipt must not hide a
    # peer's failure
    names = {
        receipt.name
        for entry in snapshot.roster
        for receipt in entry.receipts
        if receipt.withdrawn and is_of(entry.place, receipt.name)
    }
    finished = {
        _get_incarnation(entry.place)
        for entry in snapshot.roster
        if entry.phase is model.Phase.SUCCEEDED
    }
    for document in snapshot.documents:
        if document.in_flight and _get_incarnation(document.place) in finished:
            names |= _list_names(document)
    return frozenset(names)


def _get_incarnation(place: Place) -> tuple[object, ...]:
    return (node_key(place), place.round, place.incarnation)


def _list_names(document: WorkerError) -> set[str]:
    return {ref.name for ref in document.documents}


# --- several documents of one process -------------------------------------------------------------


def _merge_documents(documents: Sequence[WorkerError]) -> list[WorkerError]:
    groups: dict[tuple[object, ...], list[WorkerError]] = defaultdict(list)
    for document in documents:
        groups[_identify_process(document)].append(document)
    return [_merge(group) for group in groups.values()]


def _place_output_error(failure: WorkerError, roster: Sequence[NodePresence]) -> WorkerError:
    """Return a failure with its place if it's about the values that rank 0's function returned.

    The entrypoint's file has no rank, but only the pod that gets rank 0's result converts it, after
    all ranks of all nodes have returned.
    """
    is_of_file = failure.writer is Writer.STOCK and failure.rank is None
    if not is_of_file or not is_output_error(failure.exception):
        return failure
    finished = [entry for entry in roster if entry.phase is model.Phase.SUCCEEDED]
    # an entry with a rank is that of a process without an agent: its own result is converted
    agents = [entry for entry in finished if entry.place.rank is None and entry.ranks]
    first = next((entry for entry in agents if 0 in entry.ranks), None)
    has_failed = any(entry.phase is model.Phase.FAILED for entry in roster)
    if first is None or has_failed or not nodes_done(agents):
        return failure
    size = sum(len(entry.ranks) for entry in agents)
    return replace(failure, place=replace(first.place, rank=0, local_rank=0, world_size=size))


def _identify_process(document: WorkerError) -> tuple[object, ...]:
    place = document.place
    if document.writer is Writer.STOCK:
        return ("file", document.documents[0].name if document.documents else id(document))
    if document.subject is Subject.AGENT:
        return ("agent", document.node, place.group_rank, place.round, place.incarnation)
    # without a rank, fall back to the pid or local rank, then to the file: a launcher's files have
    # neither
    name = document.documents[0].name if document.documents else ""
    process = (place.pid or place.local_rank or name) if document.rank is None else None
    # include the node: two nodes may claim the same rank
    return ("worker", document.node, place.round, place.incarnation, document.rank, process)


def _merge(group: Sequence[WorkerError]) -> WorkerError:
    """Merge the documents about one process: the worker's own fields win over its agent's."""
    if len(group) == 1:
        (only,) = group
        return only if only.fingerprint else replace(only, fingerprint=compute_fingerprint(only))
    ordered = sorted(
        group,
        key=lambda item: (_CREDIBILITY_ORDER[item.writer], item.in_flight, _build_time_key(item)),
    )
    own = _select_own_documents(ordered)
    # the traceback grows while the exception propagates, so the last document about it has the most
    # frames
    raised = [(document, document.exception) for document in own if document.exception is not None]
    about_it = [
        document for document, exception in raised if _contains_exception(exception, raised[0][1])
    ]
    merged = (about_it or own)[-1]
    earliest = min(own, key=_build_time_key)
    # all clock fields from one document: wall and monotonic time must be of the same moment
    merged = replace(merged, **{name: getattr(earliest, name) for name in _CLOCK_FIELDS})
    for other in ordered:
        added: dict[str, Any] = {
            name: getattr(other, name)
            for name in _FILLED_FIELDS
            if getattr(merged, name) in _EMPTY_VALUES
        }
        merged = replace(merged, **added) if added else merged
    return replace(
        merged,
        in_flight=merged.in_flight and not any(map(_is_final_document, group)),
        documents=tuple(
            sorted((ref for item in group for ref in item.documents), key=lambda ref: ref.name)
        ),
        fingerprint=merged.fingerprint or compute_fingerprint(merged),
    )


def _select_own_documents(ordered: Sequence[WorkerError]) -> list[WorkerError]:
    """Return a process's own documents about its last exception: in-flight documents by time,
    then the final document.

    Without an in-flight document, return only the most credible document.
    """
    final = next((item for item in ordered if _is_final_document(item)), None)
    in_flight = sorted((item for item in ordered if item.in_flight), key=_build_time_key)
    process = final or next(iter(in_flight), None)
    earlier_documents = [
        item for item in in_flight if process is not None and _same_process(item, process)
    ]
    if not earlier_documents:
        return [ordered[0]]
    return earlier_documents if final is None else [*earlier_documents, final]


def _is_final_document(document: WorkerError) -> bool:
    """Whether a document was written after the task function ended: by the worker,
    or from torch's error file.
    """
    return not document.in_flight and (
        document.writer is Writer.WORKER or document.exception is not None
    )


def _same_process(first: WorkerError, second: WorkerError) -> bool:
    # 0 means unknown
    pids = {first.place.pid, second.place.pid}
    return len(pids) == 1 or 0 in pids


def _contains_exception(later: model.ExceptionInfo, earlier: model.ExceptionInfo) -> bool:
    """Whether `later` is the exception `earlier`, or was raised from it.

    An exception raised while `earlier` was being handled, in a cleanup or by a signal, doesn't
    count.
    """
    causes = itertools.takewhile(lambda link: link.relation == "cause", later.causes)
    return any(
        (link.type, link.message) == (earlier.type, earlier.message) for link in (later, *causes)
    )


def _add_log_tails(
    failures: Iterable[WorkerError], logs: Mapping[tuple[object, ...], str]
) -> Iterable[WorkerError]:
    """Yield the failures; a worker's failure without a log gets the log tail in
    its node's roster entry.

    `logs`: the log tails by node, round, incarnation and rank.
    """
    for failure in failures:
        log = (
            logs.get((*_get_incarnation(failure.place), failure.rank), "")
            if failure.subject is Subject.WORKER
            else ""
        )
        yield replace(failure, log_tail=log) if log and not failure.log_tail else failure


_CLOCK_FIELDS = ("timestamp_ns", "monotonic_ns", "boot_id", "upload_delay_ns")
"""Fields that belong together; all come from the earliest document."""
_FILLED_FIELDS = (
    "exception",
    "exit_code",
    "signal",
    "sent_signals",
    "log_tail",
    "category",
    "resources",
    "timestamp_ns",
    "stack_dumps",
    "thread_failures",
    "handled_exceptions",
    "collectives",
    "caused_by",
    "expired",
)
"""Fields that are filled from less credible documents if they are empty."""
_EMPTY_VALUES = (None, "", (), model.Resources())
_CREDIBILITY_ORDER = {Writer.WORKER: 0, Writer.AGENT: 1, Writer.RECORDER: 2, Writer.STOCK: 3}


def _sort_by_time(failures: Iterable[WorkerError]) -> tuple[WorkerError, ...]:
    return tuple(sorted(failures, key=_build_time_key))


def _build_time_key(failure: WorkerError) -> tuple[object, ...]:
    """Return the sort key: time (missing last), rank, fingerprint, node, message,
    and the documents' names.
    """
    missing = failure.timestamp_ns is None
    return (
        missing,
        failure.timestamp_ns or 0,
        _sort_none_last(failure.rank),
        failure.fingerprint or compute_fingerprint(failure),
        failure.node,
        failure.message,
        tuple(document.name for document in failure.documents),
    )


def _build_roster_key(entry: NodePresence) -> tuple[object, ...]:
    """Return the sort key: group rank (missing last), phase, incarnation, node, time,
    and the receipts' names.
    """
    place = entry.place
    names = tuple(receipt.name for receipt in entry.receipts)
    by_node = (_sort_none_last(place.group_rank), entry.phase.value, place.incarnation, place.node)
    return (*by_node, entry.timestamp_ns or 0, names)


def _sort_none_last(rank: int | None) -> int:
    return rank if rank is not None else 1 << 62


# --- coverage -------------------------------------------------------------------------------------


def _build_coverage(  # noqa: PLR0913, PLR0917 - the parts of a job
    snapshot: Snapshot,
    judged: JudgedRound,
    failures: Sequence[WorkerError],
    roster: Sequence[NodePresence],
    unreadable: Sequence[Unreadable],
    expected_nodes: int | None,
) -> model.Coverage:
    group_sizes = [entry.place.group_world_size for entry in roster]
    group_sizes += [failure.place.group_world_size for failure in failures]
    expected = expected_nodes or max(group_sizes, default=0) or None
    done = nodes_reported(roster)
    joined = {node_key(entry.place) for entry in roster}
    by_name: dict[str, NodeKey] = {}
    for key in sorted(joined, key=node_order):
        by_name.setdefault(key[0], key)
    reporters = {_find_reporter(failure, by_name): failure for failure in failures}
    reporters.pop(None, None)
    nodes = {
        key[1]: key
        for key in (*sorted(joined | done, key=node_order), *reporters)
        if key is not None
    }
    listed = {number for group in snapshot.unopened for number in group.group_ranks}
    # nodes known only by the names of unopened documents
    by_name_alone = {nodes.get(number, ("", number)) for number in listed}
    reported = set(reporters) | done | by_name_alone
    # a document proves that its node has ended only without a roster (a copied folder), or if Flyte
    # wrote it
    finished = done | {
        key for key, failure in reporters.items() if not roster or failure.writer is Writer.STOCK
    }
    # joined, but neither a final entry nor a document
    # the entry of a log is about the whole job, not about a node
    logs = {node_key(entry.place) for entry in roster if entry.place.engine == OF_LOGS}
    unreported = sorted(joined - reported - logs, key=node_order)
    receipt_notes = _list_receipt_notes(snapshot, roster)
    unconfirmed = [
        f"the document of {_format_rank(failure.rank)} on {failure.node or 'an unnamed node'} names"
        f" {claim}"
        for failure in failures
        if (claim := judged.find_unconfirmed_claim(failure))
    ]
    has_gaps = bool(
        unreadable or receipt_notes or unconfirmed or joined - finished or snapshot.notes
    )
    return model.Coverage(
        expected=expected,
        reported=len(reported),
        unreadable=len(unreadable),
        complete=expected is not None and len(finished) >= expected and not has_gaps,
        notes=tuple(
            _list_notes(snapshot, failures, unreadable, receipt_notes, unconfirmed, unreported)
        ),
    )


def _find_reporter(failure: WorkerError, joined: dict[str, NodeKey]) -> NodeKey | None:
    """Return the node of a failure; None if its file has no node name and the
    roster lists the nodes.
    """
    place = failure.place
    node = place.node or failure.worker
    if place.group_rank is None and node:
        # no group rank: take it from the roster, by the node's name
        return joined.get(node, (node, None))
    if place.group_rank is None and joined:
        return None
    return (node or (failure.documents[0].name if failure.documents else ""), place.group_rank)


def _list_notes(  # noqa: PLR0913, PLR0917 - the parts of a coverage
    snapshot: Snapshot,
    failures: Sequence[WorkerError],
    unreadable: Sequence[Unreadable],
    receipt_notes: Sequence[str],
    unconfirmed: Sequence[str],
    unreported: Sequence[NodeKey],
) -> Iterator[str]:
    yield from snapshot.notes
    reasons = (
        item.reason if item.reason.startswith(item.name) else f"{item.name}: {item.reason}"
        for item in unreadable
    )
    yield from _limit_notes(
        [f"not readable: {reason}" for reason in reasons], "more documents are not readable"
    )
    if snapshot.foreign:
        names = ", ".join(snapshot.foreign[:_MAX_LISTED_NAMES])
        yield (
            f"{len(snapshot.foreign)} files in the errors folder are not error documents and were"
            f" ignored: {names}"
        )
    yield from _limit_notes(receipt_notes, "more documents were lost")
    yield from _limit_notes(unconfirmed, "more failures that no roster entry confirms")
    if unreported:
        names = ", ".join(node_label(key) for key in unreported[:_MAX_LISTED_NAMES])
        yield (
            "took part but sent no report:"
            f" {names}{' and others' if len(unreported) > _MAX_LISTED_NAMES else ''}"
        )
    unopened_count = sum(group.count for group in snapshot.unopened)
    opened = sum(len(failure.documents) for failure in failures)
    if unopened_count:
        total = opened + unopened_count
        yield f"read {opened} of {total} documents (the rest report the same faults)"
    if snapshot.unopened_history:
        yield f"{snapshot.unopened_history} documents of earlier rounds were not opened"
    files: list[WorkerError | model.Seal | NodePresence] = [
        *snapshot.documents,
        *snapshot.seals,
        *snapshot.roster,
    ]
    newer = sum(item.newer for item in files)
    if newer:  # this version reads all fields that it supports, so the coverage stays complete
        how = "this version leaves out what it does not know; the version of the pods reads all"
        yield f"a newer version of firstfault wrote {newer} of the files; {how}"


def _limit_notes(notes: Sequence[str], ending: str) -> list[str]:
    unlisted_count = len(notes) - _MAX_LISTED_NAMES
    return [
        *notes[:_MAX_LISTED_NAMES],
        *([f"{unlisted_count} {ending}"] if unlisted_count > 0 else []),
    ]


def _list_receipt_notes(snapshot: Snapshot, roster: Sequence[NodePresence]) -> list[str]:
    present = set().union(*map(_list_names, snapshot.documents))
    present |= {item.name for item in snapshot.unreadable}
    # only objects in the storage have a modification time; copies in a node's bundle don't
    refs = (ref for document in snapshot.documents for ref in document.documents)
    stored = snapshot.stored_names.union(
        ref.name for ref in refs if ref.last_modified_ns is not None
    )
    notes = []
    for entry in roster:
        for receipt in entry.receipts:
            node_name = entry.place.node or entry.place.host
            if receipt.name in stored:
                continue  # the recorder may have uploaded it after its agent's deadline
            if not receipt.durable:
                why = receipt.error or "no reason given"
                notes.append(
                    f"the document of {_format_rank(receipt.rank)} on {node_name} was not uploaded:"
                    f" {why}"
                )
            elif receipt.name not in present and receipt.name not in snapshot.listed_names:
                notes.append(
                    f"{node_name} reported the upload of {receipt.name}, but the document is"
                    " missing"
                )
    return notes


def _format_rank(rank: int | None) -> str:
    return f"rank {rank}" if rank is not None else "the agent"
