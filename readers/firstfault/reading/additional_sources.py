"""Merge the logs and flight recorder dumps of a job into the snapshot of its
attempt. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from firstfault.model import Phase, Place, Subject, WorkerError
from firstfault.reading.assemble import Snapshot, find_judged_round


def merge_sources(snapshot: Snapshot, additional: Snapshot) -> Snapshot:
    """Add the collectives of `additional` to a snapshot, and its processes that have no document.

    The snapshot's own documents have more details about the same failures, so they stay. Nodes that
    succeeded get no additions, and an empty snapshot stays empty. Logs may cover several rounds:
    only the last round in `additional` counts.
    """
    judged = find_judged_round(snapshot.roster, snapshot.documents, snapshot.restarts)
    entries = [entry for entry in snapshot.roster if entry.place.round == judged.number]
    places = {rank: entry.place for entry in entries for rank in entry.ranks}
    finished = {rank for entry in entries if entry.phase is Phase.SUCCEEDED for rank in entry.ranks}
    ours = [
        item for item in snapshot.documents if item.subject is Subject.WORKER and judged.has(item)
    ]
    # a rank that isn't in the roster gets the round and the job's sizes from any known place
    anyones = next(
        iter([*(item.place for item in ours), *(entry.place for entry in entries)]), None
    )
    if anyones is None:
        return snapshot
    recorded_by_rank = {
        rank: item
        for rank, item in _find_last_by_rank(additional.documents).items()
        if rank not in finished
    }
    documents = [
        _with_collectives(item, recorded_by_rank) if judged.has(item) else item
        for item in snapshot.documents
    ]
    existing = {item.rank for item in ours}.union(*(group.ranks for group in snapshot.unopened))
    new = [(rank, item) for rank, item in recorded_by_rank.items() if rank not in existing]
    documents += [_place_document(item, places.get(rank), anyones) for rank, item in new]
    return replace(
        snapshot,
        documents=tuple(documents),
        unreadable=(*snapshot.unreadable, *additional.unreadable),
        notes=(*snapshot.notes, *additional.notes),
    )


def _find_last_by_rank(documents: Sequence[WorkerError]) -> dict[int, WorkerError]:
    """Return the workers' documents of the last round, by rank."""
    last = max((item.place.round for item in documents), default=0)
    of_last = [
        item for item in documents if item.place.round == last and item.subject is Subject.WORKER
    ]
    return {item.rank: item for item in of_last if item.rank is not None}


def _with_collectives(
    document: WorkerError, recorded_by_rank: Mapping[int, WorkerError]
) -> WorkerError:
    recorded = (
        recorded_by_rank.get(document.rank)
        if document.rank is not None and document.subject is Subject.WORKER
        else None
    )
    if recorded is None or not recorded.collectives or document.collectives:
        return document
    refs = (*document.documents, *recorded.documents)
    return replace(document, collectives=recorded.collectives, documents=refs)


def _place_document(document: WorkerError, own: Place | None, anyones: Place) -> WorkerError:
    """Move a document to the judged round, to `own`, the rank's place in the roster, if known."""
    known = own or replace(
        anyones,
        node=document.node,
        group_rank=None,
        incarnation=0,
        host="",
        ip="",
        machine="",
    )
    of_process = {name: getattr(document.place, name) for name in ("rank", "local_rank", "pid")}
    place = replace(
        known,
        **of_process,
        gpu="",
        world_size=known.world_size or document.place.world_size,
    )
    return replace(document, place=place, worker=place.node)
