"""Merges logs and flight recorders of the same job into what was read of an attempt. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from firstfault.model import Phase, Place, Subject, WorkerError
from firstfault.reading.assemble import Snapshot, find_judged_round


def joined(snapshot: Snapshot, beside: Snapshot) -> Snapshot:
    """Return a snapshot with the collectives of its ranks, and with processes that left no document in it.

    Its own documents are about the same failures, and know more. Nodes that have succeeded get nothing, nor does a
    snapshot if nothing was read. Of `beside`, the snapshot of logs and flight recorders, the last attempt counts.
    """
    judged = find_judged_round(snapshot.roster, snapshot.documents, snapshot.restarts)
    entries = [entry for entry in snapshot.roster if entry.place.round == judged.number]
    places = {rank: entry.place for entry in entries for rank in entry.ranks}
    finished = {rank for entry in entries if entry.phase is Phase.SUCCEEDED for rank in entry.ranks}
    ours = [item for item in snapshot.documents if item.subject is Subject.WORKER and judged.has(item)]
    anyones = next(iter([*(item.place for item in ours), *(entry.place for entry in entries)]), None)
    if anyones is None:
        return snapshot
    found = {rank: item for rank, item in _find_last_by_rank(beside.documents).items() if rank not in finished}
    documents = [_with_collectives(item, found) if judged.has(item) else item for item in snapshot.documents]
    existing = {item.rank for item in ours}.union(*(group.ranks for group in snapshot.unopened))
    documents += [_placed(item, places.get(rank), anyones) for rank, item in found.items() if rank not in existing]
    return replace(
        snapshot,
        documents=tuple(documents),
        unreadable=(*snapshot.unreadable, *beside.unreadable),
        notes=(*snapshot.notes, *beside.notes),
    )


def _find_last_by_rank(documents: Sequence[WorkerError]) -> dict[int, WorkerError]:
    """Return the documents of ranks in the last round."""
    last = max((item.place.round for item in documents), default=0)
    of_last = [item for item in documents if item.place.round == last and item.subject is Subject.WORKER]
    return {item.rank: item for item in of_last if item.rank is not None}


def _with_collectives(document: WorkerError, found: Mapping[int, WorkerError]) -> WorkerError:
    recorded = found.get(document.rank) if document.rank is not None and document.subject is Subject.WORKER else None
    if recorded is None or not recorded.collectives or document.collectives:
        return document
    refs = (*document.documents, *recorded.documents)
    return replace(document, collectives=recorded.collectives, documents=refs)


def _placed(document: WorkerError, own: Place | None, anyones: Place) -> WorkerError:
    """Return a document with its place in the attempt's judged round: `own`, if the roster has the rank."""
    known = own or replace(anyones, node=document.node, group_rank=None, incarnation=0, host="", ip="", machine="")
    of_process = {name: getattr(document.place, name) for name in ("rank", "local_rank", "pid")}
    place = replace(known, **of_process, gpu="", world_size=known.world_size or document.place.world_size)
    return replace(document, place=place, worker=place.node)
