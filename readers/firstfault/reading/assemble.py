"""Merges documents into `JobErrors`: selects the judged round, merges documents of one process, counts missing nodes.

Pure functions; docs/reading.md has the rules, as a case table.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from firstfault.exceptions.fingerprint import fingerprint_of
from firstfault.layout.keys import ErrorKey, is_of_entry, unique_number
from firstfault.model import (
    Coverage,
    JobErrors,
    NodePresence,
    Phase,
    Resources,
    Seal,
    Subject,
    WorkerError,
    Writer,
)
from firstfault.model.roster import NodeKey, node_key, node_label, node_order, nodes_reported, of_newest_incarnations
from firstfault.reading.rounds import round_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from firstfault.model import ExceptionInfo, Place, RestartRecord, Unopened
    from firstfault.reading.rounds import JudgedRound

_MAX_NAMED = 5
_DIGEST_BITS = 128


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A document that exists but could not be read."""

    name: str
    reason: str

    @property
    def round(self) -> int | None:
        """The round in its name; None if the name has none."""
        key = ErrorKey.parse(self.name)
        return None if key is None else key.round


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that was read or listed at one time."""

    documents: tuple[WorkerError, ...] = ()
    seals: tuple[Seal, ...] = ()
    roster: tuple[NodePresence, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    foreign: tuple[str, ...] = ()
    """Names of files that are not documents."""
    notes: tuple[str, ...] = field(default=())
    """Sentences about what was not read; any of them makes the coverage incomplete."""
    unopened: tuple[Unopened, ...] = ()
    """Documents of the judged round that were listed, but not opened because similar ones were."""
    unopened_history: int = 0
    """Number of unopened documents of earlier rounds and incarnations."""
    listed: Container[str] = frozenset()
    """Names of all documents, opened or not."""
    stored: frozenset[str] = frozenset()
    """Names of unopened documents that the storage has although their receipts report no upload."""
    restarts: tuple[RestartRecord, ...] = ()
    """Oldest first."""


def assemble(snapshot: Snapshot, *, expected_nodes: int | None = None, settled: bool = True) -> JobErrors:
    """Return the failures, the roster and the coverage of an attempt. The order within `snapshot` does not matter.

    Args:
        snapshot: what was read.
        expected_nodes: overrides the number of nodes in roster and documents.
        settled: whether every node had reported when the reader stopped waiting.
    """
    withdrawn = _withdrawn(snapshot)
    snapshot = _without(snapshot, withdrawn)
    judged = round_of(snapshot.roster, snapshot.documents, snapshot.restarts)
    current: list[WorkerError] = []
    history: list[WorkerError] = []
    for document in snapshot.documents:
        target = current if judged.has(document) else history
        target.append(document)
    roster = tuple(
        sorted(
            of_newest_incarnations(
                [entry for entry in snapshot.roster if entry.place.round == judged.number], judged.newest
            ),
            key=lambda entry: (
                _or_last(entry.place.group_rank),
                entry.phase.value,
                entry.place.incarnation,
                entry.place.node,
                entry.timestamp_ns or 0,
                tuple(receipt.name for receipt in entry.receipts),
            ),
        )
    )
    unreadable = sorted(
        (item for item in snapshot.unreadable if item.round is None or item.round >= judged.number),
        key=lambda item: (item.name, item.reason),
    )
    logs = _logs(snapshot.roster)
    failures = _in_order(_with_logs(_merged(current), logs))
    return JobErrors(
        failures=failures,
        history=_in_order(_with_logs(_merged(history), logs)),
        roster=roster,
        seals=tuple(sorted(snapshot.seals, key=lambda seal: seal.order)),
        coverage=_coverage(
            snapshot, judged, failures, _without_receipts(roster, withdrawn), unreadable, expected_nodes
        ),
        round=judged.number,
        attempt=max((failure.place.attempt for failure in failures), default=0),
        settled=settled,
        digest=digest_of(failures, snapshot.unopened),
        document_count=sum(len(failure.documents) for failure in failures)
        + sum(group.count for group in snapshot.unopened),
        unopened=snapshot.unopened,
        restarts=snapshot.restarts,
    )


def digest_of(failures: Iterable[WorkerError], unopened: Iterable[Unopened] = ()) -> str:
    """Return a digest over the names of all documents, opened or not.

    It is a sum, so it depends neither on their order nor on which of them were opened.
    """
    names = {document.name for failure in failures for document in failure.documents}
    total = sum(map(name_hash, names)) + sum(group.names_hash for group in unopened)
    return f"{total % (1 << _DIGEST_BITS):0{_DIGEST_BITS // 4}x}"


def name_hash(name: str) -> int:
    """Return a document's summand of the digest: the uuid in its name, else a hash of the name."""
    number = unique_number(name)
    if number is not None:
        return number
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[: _DIGEST_BITS // 8], "big")


# --- withdrawn documents --------------------------------------------------------------------------------------------


def _withdrawn(snapshot: Snapshot) -> frozenset[str]:
    """Return the names of documents about an exception in flight that the user's code handled after all.

    A receipt of their own node marks them, or the node's roster entry is of phase succeeded.
    """
    read: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    for document in snapshot.documents:
        for name in _names(document):
            read[name].add(_incarnation(document.place))
    names = {
        receipt.name
        for entry in snapshot.roster
        for receipt in entry.receipts
        if receipt.withdrawn and _may_withdraw(entry.place, receipt.name, read)
    }
    finished = {_incarnation(entry.place) for entry in snapshot.roster if entry.phase is Phase.SUCCEEDED}
    for document in snapshot.documents:
        if document.in_flight and _incarnation(document.place) in finished:
            names |= _names(document)
    return frozenset(names)


def _may_withdraw(entry: Place, name: str, read: Mapping[str, set[tuple[object, ...]]]) -> bool:
    """Whether a document is of the node, the round and the incarnation of a roster entry.

    A document that was not read is judged by its name. firstfault gives every document a key as its name.
    """
    if name in read:
        return read[name] == {_incarnation(entry)}
    key = ErrorKey.parse(name)
    return key is None or is_of_entry(key, entry)


def _without(snapshot: Snapshot, withdrawn: frozenset[str]) -> Snapshot:
    """Return the snapshot without withdrawn documents, readable or not."""
    return replace(
        snapshot,
        documents=tuple(document for document in snapshot.documents if withdrawn.isdisjoint(_names(document))),
        unreadable=tuple(item for item in snapshot.unreadable if item.name not in withdrawn),
    )


def _without_receipts(roster: Iterable[NodePresence], withdrawn: frozenset[str]) -> list[NodePresence]:
    """Return the roster without the receipts of withdrawn documents."""
    if not withdrawn:
        return list(roster)
    return [
        replace(entry, receipts=tuple(receipt for receipt in entry.receipts if receipt.name not in withdrawn))
        for entry in roster
    ]


def _incarnation(place: Place) -> tuple[object, ...]:
    return (node_key(place), place.round, place.incarnation)


def _names(document: WorkerError) -> set[str]:
    return {ref.name for ref in document.documents}


# --- several documents of one process -------------------------------------------------------------------------------


def _merged(documents: Sequence[WorkerError]) -> list[WorkerError]:
    groups: dict[tuple[object, ...], list[WorkerError]] = defaultdict(list)
    for document in documents:
        groups[_identity(document)].append(document)
    return [_merge(group) for group in groups.values()]


def _identity(document: WorkerError) -> tuple[object, ...]:
    if document.writer is Writer.STOCK:
        return ("file", document.documents[0].name if document.documents else id(document))
    if document.subject is Subject.AGENT:
        place = document.place
        return ("agent", document.node, place.group_rank, place.round, place.incarnation)
    # with the node: two nodes may claim the same rank
    place = document.place
    return (
        "worker",
        document.node,
        place.round,
        place.incarnation,
        document.rank,
        # a launcher's own files have no pid
        (place.pid or place.local_rank) if document.rank is None else None,
    )


def _merge(group: Sequence[WorkerError]) -> WorkerError:
    """Return one failure from several documents: the worker's own fields first, then those of its agent."""
    if len(group) == 1:
        (only,) = group
        return only if only.fingerprint else replace(only, fingerprint=fingerprint_of(only))
    ordered = sorted(group, key=lambda item: (_AUTHORITY[item.writer], item.in_flight, _time_order(item)))
    own = _own_documents(ordered)
    merged = _about_first_exception(own)
    earliest = min(own, key=_time_order)
    merged = replace(merged, **{name: getattr(earliest, name) for name in _CLOCK})
    for other in ordered:
        added = _added_fields(merged, other)
        merged = replace(merged, **added) if added else merged
    return replace(
        merged,
        in_flight=merged.in_flight and not any(map(_is_final, group)),
        documents=tuple(sorted((ref for item in group for ref in item.documents), key=lambda ref: ref.name)),
        fingerprint=merged.fingerprint or fingerprint_of(merged),
    )


def _own_documents(ordered: Sequence[WorkerError]) -> list[WorkerError]:
    """Return a process's own documents about its last exception: those in flight by time, then the final one.

    If none was written in flight, return the most credible document alone.
    """
    final = next((item for item in ordered if _is_final(item)), None)
    in_flight = sorted((item for item in ordered if item.in_flight), key=_time_order)
    process = final or next(iter(in_flight), None)
    early = [item for item in in_flight if process is not None and _same_process(item, process)]
    if not early:
        return [ordered[0]]
    return early if final is None else [*early, final]


def _is_final(document: WorkerError) -> bool:
    """Whether it was written after the task function ended, by the worker or from torch's error file."""
    return not document.in_flight and (document.writer is Writer.WORKER or document.exception is not None)


def _same_process(one: WorkerError, other: WorkerError) -> bool:
    pids = {one.place.pid, other.place.pid}
    return len(pids) == 1 or 0 in pids


def _about_first_exception(documents: Sequence[WorkerError]) -> WorkerError:
    """Return the last document about the first exception: it has the most frames."""
    raised = [(document, document.exception) for document in documents if document.exception is not None]
    about_it = [document for document, exception in raised if _holds(exception, raised[0][1])]
    return (about_it or documents)[-1]


def _holds(later: ExceptionInfo, earlier: ExceptionInfo) -> bool:
    """Whether `later` is the same exception, or was raised from it.

    An exception that was merely raised during the handling of `earlier`, in a clean-up or by a signal, is neither.
    """
    causes = itertools.takewhile(lambda found: found.relation == "cause", later.causes)
    return any((found.type, found.message) == (earlier.type, earlier.message) for found in (later, *causes))


def _added_fields(merged: WorkerError, other: WorkerError) -> dict[str, Any]:
    return {name: getattr(other, name) for name in _FILLED if getattr(merged, name) in _NOTHING}


def _logs(roster: Iterable[NodePresence]) -> dict[tuple[object, ...], str]:
    """Return the ends of the workers' logs that their agents put into the roster, by node, round, life and rank."""
    return {(*_incarnation(entry.place), tail.rank): tail.text for entry in roster for tail in entry.log_tails}


def _with_logs(failures: Iterable[WorkerError], logs: Mapping[tuple[object, ...], str]) -> Iterable[WorkerError]:
    """Return the failures; those of workers that have no log get the one in their node's roster entry."""
    for failure in failures:
        log = logs.get((*_incarnation(failure.place), failure.rank), "") if failure.subject is Subject.WORKER else ""
        yield replace(failure, log_tail=log) if log and not failure.log_tail else failure


_CLOCK = ("timestamp_ns", "monotonic_ns", "boot_id", "upload_delay_ns")
"""Fields of one moment; all come from the earliest document."""
_FILLED = (
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
    "collectives",
    "caused_by",
    "expired",
)
"""Fields that a less credible document fills if they are empty."""
_NOTHING = (None, "", (), Resources())
_AUTHORITY = {Writer.WORKER: 0, Writer.AGENT: 1, Writer.RECORDER: 2, Writer.STOCK: 3}


def _in_order(failures: Iterable[WorkerError]) -> tuple[WorkerError, ...]:
    return tuple(sorted(failures, key=_time_order))


def _time_order(failure: WorkerError) -> tuple[object, ...]:
    """Return the sort key: time (missing last), rank, fingerprint, node, message, and the documents' names."""
    missing = failure.timestamp_ns is None
    return (
        missing,
        failure.timestamp_ns or 0,
        _or_last(failure.rank),
        failure.fingerprint or fingerprint_of(failure),
        failure.node,
        failure.message,
        tuple(document.name for document in failure.documents),
    )


def _or_last(rank: int | None) -> int:
    return rank if rank is not None else 1 << 62


# --- coverage -------------------------------------------------------------------------------------------------------


def _coverage(  # noqa: PLR0913, PLR0917 - the parts of a job
    snapshot: Snapshot,
    judged: JudgedRound,
    failures: Sequence[WorkerError],
    roster: Sequence[NodePresence],
    unreadable: Sequence[Unreadable],
    expected_nodes: int | None,
) -> Coverage:
    known = [entry.place.group_world_size for entry in roster]
    known += [failure.place.group_world_size for failure in failures]
    expected = expected_nodes or max(known, default=0) or None
    done = nodes_reported(roster)
    joined = {node_key(entry.place) for entry in roster}
    by_name: dict[str, NodeKey] = {}
    for key in sorted(joined, key=node_order):
        by_name.setdefault(key[0], key)
    reporters = {_reporter(failure, by_name): failure for failure in failures}
    reporters.pop(None, None)
    nodes = {key[1]: key for key in (*sorted(joined | done, key=node_order), *reporters) if key is not None}
    listed = {number for group in snapshot.unopened for number in group.group_ranks}
    by_name_alone = {nodes.get(number, ("", number)) for number in listed}
    reported = set(reporters) | done | by_name_alone
    # without a roster (a copied folder) and for Flyte's own files, a document means that its node is done
    finished = done | {key for key, failure in reporters.items() if not roster or failure.writer is Writer.STOCK}
    silent = sorted(joined - reported, key=node_order)
    notes = [*snapshot.notes, *_unreadable_notes(unreadable), *_foreign_notes(snapshot.foreign)]
    lost = _receipt_notes(snapshot, roster)
    notes += _first_few(lost, "more documents were lost")
    unconfirmed = _unconfirmed_notes(judged, failures)
    notes += _first_few(unconfirmed, "more failures that no roster entry confirms")
    notes += _silent_nodes_notes(silent)
    notes += _unopened_notes(snapshot, failures)
    notes += _newer_notes(snapshot)
    return Coverage(
        expected=expected,
        reported=len(reported),
        unreadable=len(unreadable),
        complete=expected is not None
        and len(finished) >= expected
        and not unreadable
        and not lost
        and not unconfirmed
        and not joined - finished
        and not snapshot.notes,
        notes=tuple(notes),
    )


def _reporter(failure: WorkerError, joined: dict[str, NodeKey]) -> NodeKey | None:
    """Return the node of a failure; None for a file without a node's name if the roster has the nodes."""
    place = failure.place
    node = place.node or failure.worker
    if place.group_rank is None and node:
        # no group rank: take it from the roster, by the node's name
        return joined.get(node, (node, None))
    if place.group_rank is None and joined:
        return None
    return (node or (failure.documents[0].name if failure.documents else ""), place.group_rank)


def _unreadable_notes(unreadable: Sequence[Unreadable]) -> list[str]:
    shown = [f"not readable: {_with_name(item)}" for item in unreadable[:_MAX_NAMED]]
    more = len(unreadable) - _MAX_NAMED
    return [*shown, f"{more} more documents are not readable"] if more > 0 else shown


def _with_name(item: Unreadable) -> str:
    return item.reason if item.reason.startswith(item.name) else f"{item.name}: {item.reason}"


def _foreign_notes(foreign: Sequence[str]) -> list[str]:
    if not foreign:
        return []
    names = ", ".join(foreign[:_MAX_NAMED])
    return [f"{len(foreign)} files in the errors folder are not error documents and were ignored: {names}"]


def _receipt_notes(snapshot: Snapshot, roster: Sequence[NodePresence]) -> list[str]:
    present = set().union(*map(_names, snapshot.documents))
    present |= {item.name for item in snapshot.unreadable}
    # a document that a node handed over has no time in the storage
    refs = (ref for document in snapshot.documents for ref in document.documents)
    stored = snapshot.stored.union(ref.name for ref in refs if ref.last_modified_ns is not None)
    notes = []
    for entry in roster:
        for receipt in entry.receipts:
            who = f"rank {receipt.rank}" if receipt.rank is not None else "the agent"
            where = entry.place.node or entry.place.host
            if receipt.name in stored:
                continue  # the recorder may have uploaded it after its agent's deadline
            if not receipt.durable:
                notes.append(f"the document of {who} on {where} was not uploaded: {receipt.error or 'no reason given'}")
            elif receipt.name not in present and receipt.name not in snapshot.listed:
                notes.append(f"{where} reported the upload of {receipt.name}, but the document is missing")
    return notes


def _unconfirmed_notes(judged: JudgedRound, failures: Iterable[WorkerError]) -> list[str]:
    """Return a note on each failure that only its own document places into the judged round or incarnation."""
    notes = []
    for failure in filter(judged.is_unconfirmed, failures):
        who = f"rank {failure.rank}" if failure.rank is not None else "the agent"
        where = failure.node or "a node without a name"
        said = "a later start of its pod than its roster entries do"
        if judged.is_of_unknown_round(failure):
            said = f"round {failure.place.round}, which no roster entry confirms"
        notes.append(f"the document of {who} on {where} names {said}")
    return notes


def _unopened_notes(snapshot: Snapshot, failures: Sequence[WorkerError]) -> list[str]:
    left = sum(group.count for group in snapshot.unopened)
    opened = sum(len(failure.documents) for failure in failures)
    notes = []
    if left:
        notes.append(f"{opened} of {opened + left} documents were opened; the others are alike by their names")
    if snapshot.unopened_history:
        notes.append(f"{snapshot.unopened_history} documents of earlier rounds were not opened")
    return notes


def _newer_notes(snapshot: Snapshot) -> list[str]:
    """Return the note about files of a newer version; what they share with this one is read, so nothing is missing."""
    files: list[WorkerError | Seal | NodePresence] = [*snapshot.documents, *snapshot.seals, *snapshot.roster]
    newer = sum(item.newer for item in files)
    how = "this version leaves out what it does not know; the version of the pods reads all"
    return [f"a newer version of firstfault wrote {newer} of the files; {how}"] if newer else []


def _silent_nodes_notes(silent: Sequence[NodeKey]) -> list[str]:
    if not silent:
        return []
    names = ", ".join(node_label(key) for key in silent[:_MAX_NAMED])
    return [f"took part but sent no report: {names}{' and others' if len(silent) > _MAX_NAMED else ''}"]


def _first_few(notes: list[str], rest: str) -> list[str]:
    more = len(notes) - _MAX_NAMED
    return [*notes[:_MAX_NAMED], f"{more} {rest}"] if more > 0 else notes
