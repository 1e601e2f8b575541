"""From single documents to one picture of an attempt: which round counts, who is one and the same, who is missing.

Pure functions; the rules are those of the case table in docs/design.md.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from firstfault.exceptions.fingerprint import fingerprint_of
from firstfault.layout.keys import ErrorKey, unique_number
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

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from firstfault.model import ExceptionInfo, Place, Unopened

__all__ = ["Snapshot", "Unreadable", "assemble", "digest_of", "name_hash"]

_MAX_NAMED = 5
_DIGEST_BITS = 128


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A document that exists and could not be used."""

    name: str
    reason: str

    @property
    def round(self) -> int | None:
        """The round its name claims, None if the name says nothing."""
        key = ErrorKey.parse(self.name)
        return None if key is None else key.round


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one look at the storage brought."""

    documents: tuple[WorkerError, ...] = ()
    seals: tuple[Seal, ...] = ()
    roster: tuple[NodePresence, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    foreign: tuple[str, ...] = ()
    """Names of files that are no documents."""
    notes: tuple[str, ...] = field(default=())
    """Sentences about what was not looked at: with any of them, not everything was."""
    unopened: tuple[Unopened, ...] = ()
    """What was listed of the round that is judged, and not opened because documents alike were."""
    unopened_history: int = 0
    """How many documents of earlier rounds, and lives, were not opened."""
    listed: Container[str] = frozenset()
    """Names of documents, those that were not opened too."""


def assemble(snapshot: Snapshot, *, expected_nodes: int | None = None, settled: bool = True) -> JobErrors:
    """Return the picture of an attempt.

    Args:
        snapshot: what was found, in any order; the result does not depend on it.
        expected_nodes: overrides what roster and documents say about the number of nodes.
        settled: whether every node had reported when the reader stopped waiting.
    """
    withdrawn = _withdrawn(snapshot)
    snapshot = _without(snapshot, withdrawn)
    round_ = _judged_round(snapshot)
    newest = _newest_incarnations(snapshot, round_)
    current: list[WorkerError] = []
    history: list[WorkerError] = []
    for document in snapshot.documents:
        target = current if _is_current(document, round_, newest) else history
        target.append(document)
    roster = tuple(
        sorted(
            of_newest_incarnations([entry for entry in snapshot.roster if entry.place.round == round_], newest),
            key=lambda entry: (
                _or_last(entry.place.group_rank),
                entry.phase.value,
                entry.place.incarnation,
                entry.place.node,
                entry.timestamp_ns or 0,
            ),
        )
    )
    unreadable = sorted(
        (item for item in snapshot.unreadable if item.round is None or item.round >= round_),
        key=lambda item: (item.name, item.reason),
    )
    failures = _in_order(_merged(current))
    return JobErrors(
        failures=failures,
        history=_in_order(_merged(history)),
        roster=roster,
        seals=tuple(sorted(snapshot.seals, key=lambda seal: (-seal.count, seal.name))),
        coverage=_coverage(snapshot, failures, _without_receipts(roster, withdrawn), unreadable, expected_nodes),
        round=round_,
        attempt=max((failure.place.attempt for failure in failures), default=0),
        settled=settled,
        digest=digest_of(failures, snapshot.unopened),
        document_count=sum(len(failure.documents) for failure in failures)
        + sum(group.count for group in snapshot.unopened),
        unopened=snapshot.unopened,
    )


def digest_of(failures: Iterable[WorkerError], unopened: Iterable[Unopened] = ()) -> str:
    """Return a digest over the names of all documents that `failures` rest on, and of those that were not opened.

    A sum, so that it depends neither on their order nor on which of them were opened.
    """
    names = {document.name for failure in failures for document in failure.documents}
    total = sum(map(name_hash, names)) + sum(group.names_hash for group in unopened)
    return f"{total % (1 << _DIGEST_BITS):0{_DIGEST_BITS // 4}x}"


def name_hash(name: str) -> int:
    """Return what a document's name adds to the digest: its uuid, or a hash of a name that has none."""
    number = unique_number(name)
    if number is not None:
        return number
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[: _DIGEST_BITS // 8], "big")


# --- which documents say something ----------------------------------------------------------------------------------


def _withdrawn(snapshot: Snapshot) -> frozenset[str]:
    """Names of the documents that say nothing: the exception in flight was handled by the user's code after all.

    A receipt says so, or the node does by saying that its workers finished.
    """
    names = {receipt.name for entry in snapshot.roster for receipt in entry.receipts if receipt.withdrawn}
    finished = {_life(entry.place) for entry in snapshot.roster if entry.phase is Phase.SUCCEEDED}
    for document in snapshot.documents:
        if document.in_flight and _life(document.place) in finished:
            names |= _names(document)
    return frozenset(names)


def _without(snapshot: Snapshot, withdrawn: frozenset[str]) -> Snapshot:
    """Leave out withdrawn documents, also those that could not be read: nothing is missing with them."""
    return replace(
        snapshot,
        documents=tuple(document for document in snapshot.documents if withdrawn.isdisjoint(_names(document))),
        unreadable=tuple(item for item in snapshot.unreadable if item.name not in withdrawn),
    )


def _without_receipts(roster: Iterable[NodePresence], withdrawn: frozenset[str]) -> list[NodePresence]:
    """Leave out what became of withdrawn documents: whether they are there or lost is no news."""
    return [
        replace(entry, receipts=tuple(receipt for receipt in entry.receipts if receipt.name not in withdrawn))
        for entry in roster
    ]


def _life(place: Place) -> tuple[object, ...]:
    return (node_key(place.node, place.group_rank), place.round, place.incarnation)


def _names(document: WorkerError) -> set[str]:
    return {ref.name for ref in document.documents}


# --- which documents count ------------------------------------------------------------------------------------------


def _judged_round(snapshot: Snapshot) -> int:
    """The last round that has a roster entry or a document; a later roster turns a document into history."""
    rounds = [entry.place.round for entry in snapshot.roster]
    rounds += [document.place.round for document in snapshot.documents if document.writer is not Writer.STOCK]
    # not the names of unreadable documents: a name is a hint, and must not turn what was read into history
    return max(rounds, default=0)


def _newest_incarnations(snapshot: Snapshot, round_: int) -> dict[NodeKey, int]:
    newest: dict[NodeKey, int] = defaultdict(int)
    places = [entry.place for entry in snapshot.roster]
    places += [document.place for document in snapshot.documents if document.writer is not Writer.STOCK]
    for place in places:
        if place.round == round_:
            key = node_key(place.node, place.group_rank)
            newest[key] = max(newest[key], place.incarnation)
    return newest


def _is_current(document: WorkerError, round_: int, newest: dict[NodeKey, int]) -> bool:
    if document.writer is Writer.STOCK:
        return True  # says nothing about rounds
    place = document.place
    if place.round != round_:
        return False
    if not place.incarnation:
        return True  # of a life that nobody numbered
    if place.group_rank is None:
        lives = [life for (node, _), life in newest.items() if node == place.node]
        return place.incarnation >= max(lives, default=0)
    return place.incarnation >= newest.get(node_key(place.node, place.group_rank), 0)


# --- one worker, heard twice ----------------------------------------------------------------------------------------


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
    # the node belongs to it: a document that claims another node's rank is not that worker's
    place = document.place
    life = (place.round, place.incarnation)
    return ("worker", document.node, life, document.rank, place.pid if document.rank is None else None)


def _merge(group: Sequence[WorkerError]) -> WorkerError:
    """One failure out of what several documents say: the worker's own word first, then what its agent saw."""
    if len(group) == 1:
        (only,) = group
        return only if only.fingerprint else replace(only, fingerprint=fingerprint_of(only))
    ordered = sorted(group, key=lambda item: (_AUTHORITY[item.writer], item.in_flight, _time_order(item)))
    own = _own_words(ordered)
    merged = _what_was_meant(own)
    earliest = min(own, key=_time_order)
    merged = replace(merged, **{name: getattr(earliest, name) for name in _CLOCK})
    for other in ordered:
        added = _what_it_adds(merged, other)
        merged = replace(merged, **added) if added else merged
    return replace(
        merged,
        in_flight=merged.in_flight and not any(map(_is_final, group)),
        documents=tuple(sorted((ref for item in group for ref in item.documents), key=lambda ref: ref.name)),
        fingerprint=merged.fingerprint or fingerprint_of(merged),
    )


def _own_words(ordered: Sequence[WorkerError]) -> list[WorkerError]:
    """What one process said about the exception that ended it: while in flight, by time, then when it had left.

    The most credible document alone, if none was written in flight.
    """
    final = next((item for item in ordered if _is_final(item)), None)
    in_flight = sorted((item for item in ordered if item.in_flight), key=_time_order)
    process = final or next(iter(in_flight), None)
    words = [item for item in in_flight if process is not None and _same_process(item, process)]
    if not words:
        return [ordered[0]]
    return words if final is None else [*words, final]


def _is_final(document: WorkerError) -> bool:
    """Whether it knows how the task function ended: the worker's own word afterwards, or what torch kept of it."""
    return not document.in_flight and (document.writer is Writer.WORKER or document.exception is not None)


def _same_process(one: WorkerError, other: WorkerError) -> bool:
    pids = {one.place.pid, other.place.pid}
    return len(pids) == 1 or 0 in pids


def _what_was_meant(words: Sequence[WorkerError]) -> WorkerError:
    """The last word about the first exception: it has the most frames, and what came later is the clean-up's own."""
    spoken = [(word, word.exception) for word in words if word.exception is not None]
    about_it = [word for word, exception in spoken if _holds(exception, spoken[0][1])]
    return (about_it or words)[-1]


def _holds(later: ExceptionInfo, earlier: ExceptionInfo) -> bool:
    """Whether `later` is the same exception, or was raised from it.

    What was merely raised while `earlier` was on its way out, in a clean-up or by a signal, says less than it does.
    """
    meant = itertools.takewhile(lambda found: found.relation == "cause", later.causes)
    return any((found.type, found.message) == (earlier.type, earlier.message) for found in (later, *meant))


def _what_it_adds(merged: WorkerError, other: WorkerError) -> dict[str, Any]:
    return {name: getattr(other, name) for name in _FILLED if getattr(merged, name) in _NOTHING}


_CLOCK = ("timestamp_ns", "monotonic_ns", "boot_id", "upload_delay_ns")
"""What belongs to one moment: all of it is the earliest word's."""
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
)
"""What a document may know that one which counts more does not."""
_NOTHING = (None, "", (), Resources())
_AUTHORITY = {Writer.WORKER: 0, Writer.AGENT: 1, Writer.RECORDER: 2, Writer.STOCK: 3}


def _in_order(failures: Iterable[WorkerError]) -> tuple[WorkerError, ...]:
    return tuple(sorted(failures, key=_time_order))


def _time_order(failure: WorkerError) -> tuple[object, ...]:
    """By recorded time, without one last; then rank, fingerprint, node and message, which no listing order decides.

    The names of its documents put those in order of which all of that is equal.
    """
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


def _coverage(
    snapshot: Snapshot,
    failures: Sequence[WorkerError],
    roster: Sequence[NodePresence],
    unreadable: Sequence[Unreadable],
    expected_nodes: int | None,
) -> Coverage:
    known = [entry.place.group_world_size for entry in roster]
    known += [failure.place.group_world_size for failure in failures]
    expected = expected_nodes or max(known, default=0) or None
    done = nodes_reported(roster)
    joined = {node_key(entry.place.node, entry.place.group_rank) for entry in roster}
    by_name: dict[str, NodeKey] = {}
    for key in sorted(joined, key=node_order):
        by_name.setdefault(key[0], key)
    heard = {_reporter(failure, by_name): failure for failure in failures}
    heard.pop(None, None)
    nodes = {key[1]: key for key in (*sorted(joined | done, key=node_order), *heard) if key is not None}
    listed = {number for group in snapshot.unopened for number in group.group_ranks}
    by_name_alone = {nodes.get(number, ("", number)) for number in listed}
    reported = set(heard) | done | by_name_alone
    # without a roster (a copied folder) documents are all there is; a pod without firstfault says all in its one file
    finished = done | {key for key, failure in heard.items() if not roster or failure.writer is Writer.STOCK}
    silent = sorted(joined - reported, key=node_order)
    notes = [*snapshot.notes, *_unreadable_notes(unreadable), *_foreign_notes(snapshot.foreign)]
    notes += _first_few(_receipt_notes(snapshot, roster), "more documents were lost")
    notes += _silent_nodes_notes(silent)
    notes += _unopened_notes(snapshot, failures)
    lost = any(not receipt.durable for entry in roster for receipt in entry.receipts)
    return Coverage(
        expected=expected,
        reported=len(reported),
        unreadable=len(unreadable),
        complete=expected is not None
        and len(finished) >= expected
        and not unreadable
        and not lost
        and not joined - finished
        and not snapshot.notes,
        notes=tuple(notes),
    )


def _reporter(failure: WorkerError, joined: dict[str, NodeKey]) -> NodeKey | None:
    """The node that a document is from; None for a nameless file where the nodes are known."""
    place = failure.place
    node = place.node or failure.worker
    if place.group_rank is None and node:
        # without a rank of its own: the node of that name that took part, if one did
        return joined.get(node, (node, None))
    if place.group_rank is None and joined:
        return None
    return (node or (failure.documents[0].name if failure.documents else ""), place.group_rank)


def _unreadable_notes(unreadable: Sequence[Unreadable]) -> list[str]:
    shown = [f"not readable: {item.name}: {item.reason}" for item in unreadable[:_MAX_NAMED]]
    more = len(unreadable) - _MAX_NAMED
    return [*shown, f"{more} more documents are not readable"] if more > 0 else shown


def _foreign_notes(foreign: Sequence[str]) -> list[str]:
    if not foreign:
        return []
    names = ", ".join(foreign[:_MAX_NAMED])
    return [f"{len(foreign)} files in the errors folder are no error documents and were left alone: {names}"]


def _receipt_notes(snapshot: Snapshot, roster: Sequence[NodePresence]) -> list[str]:
    present = set().union(*map(_names, snapshot.documents))
    present |= {item.name for item in snapshot.unreadable}
    notes = []
    for entry in roster:
        for receipt in entry.receipts:
            who = f"rank {receipt.rank}" if receipt.rank is not None else "the agent"
            where = entry.place.node or entry.place.host
            if not receipt.durable:
                notes.append(f"the document of {who} on {where} was not uploaded: {receipt.error or 'no reason given'}")
            elif receipt.name not in present and receipt.name not in snapshot.listed:
                notes.append(f"{where} says it uploaded {receipt.name}, but it is not there")
    return notes


def _unopened_notes(snapshot: Snapshot, failures: Sequence[WorkerError]) -> list[str]:
    left = sum(group.count for group in snapshot.unopened)
    opened = sum(len(failure.documents) for failure in failures)
    notes = []
    if left:
        notes.append(
            f"{opened} of {opened + left} documents were opened; the names of the others say that they are alike"
        )
    if snapshot.unopened_history:
        notes.append(f"{snapshot.unopened_history} documents of earlier rounds were not opened")
    return notes


def _silent_nodes_notes(silent: Sequence[NodeKey]) -> list[str]:
    if not silent:
        return []
    names = ", ".join(node_label(key) for key in silent[:_MAX_NAMED])
    return [f"took part but sent no report: {names}{' and others' if len(silent) > _MAX_NAMED else ''}"]


def _first_few(notes: list[str], rest: str) -> list[str]:
    more = len(notes) - _MAX_NAMED
    return [*notes[:_MAX_NAMED], f"{more} {rest}"] if more > 0 else notes
