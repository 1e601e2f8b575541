"""Which round is judged, and of which incarnation of each node. Pure; docs/reading.md has the reasons.

Where a roster exists, it decides: any process that may write to the attempt can write a document of a later round.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.model import RestartKind, Writer
from firstfault.model.roster import node_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from firstfault.model import NodePresence, Place, RestartRecord, WorkerError
    from firstfault.model.roster import NodeKey


def judged_round(entries: Collection[int], documents: Iterable[int], restarts: Iterable[RestartRecord]) -> int:
    """Return the last round with a roster entry; without a roster, the last with a document.

    If a record reports a restart, a document of that round is enough.

    Args:
        entries: the rounds of the roster's entries.
        documents: the rounds of the documents.
        restarts: the records of the attempt's restarts.
    """
    if not entries:
        return max(documents, default=0)
    begun = {record.number + 1 for record in restarts if record.restart and record.kind is RestartKind.ROUND}
    return max(*entries, *(number for number in documents if number in begun), 0)


@dataclass(frozen=True, slots=True)
class JudgedRound:
    """The judged round, and which documents belong to it."""

    number: int
    last_entry: int | None
    """The last round with a roster entry; None: there is no roster."""
    newest: dict[NodeKey, int]
    """The newest incarnation of each node in this round, from its entries; without any, from the documents."""
    has_entries: bool
    """Whether the round has a roster entry."""

    def has(self, document: WorkerError) -> bool:
        """Whether a document is judged; it is history if its node or the job has restarted since."""
        place = document.place
        if document.writer is Writer.STOCK or place.round > self.number:
            return True  # Flyte's own files have no round; a later one cannot be history
        if place.round != self.number:
            return False
        return not place.incarnation or place.incarnation >= self._newest_of(place, default=0)

    def is_unconfirmed(self, document: WorkerError) -> bool:
        """Whether a document names a later round than the roster, or a newer incarnation than its node's entries."""
        return self.is_of_unknown_round(document) or self._is_of_unknown_incarnation(document)

    def is_of_unknown_round(self, document: WorkerError) -> bool:
        """Whether a document names a later round than every roster entry."""
        is_ours = document.writer is not Writer.STOCK
        return is_ours and self.last_entry is not None and document.place.round > self.last_entry

    def _is_of_unknown_incarnation(self, document: WorkerError) -> bool:
        place = document.place
        if document.writer is Writer.STOCK or not self.has_entries or place.round != self.number:
            return False
        return place.incarnation > self._newest_of(place, default=place.incarnation)

    def _newest_of(self, place: Place, default: int) -> int:
        if place.group_rank is None:
            return max((number for (node, _), number in self.newest.items() if node == place.node), default=default)
        # an entry that could not be read has no node's name
        keys = (node_key(place), ("", place.group_rank))
        return max((self.newest[key] for key in keys if key in self.newest), default=default)


def round_of(
    roster: Sequence[NodePresence], documents: Iterable[WorkerError], restarts: Iterable[RestartRecord]
) -> JudgedRound:
    """Return the judged round of an attempt.

    Args:
        roster: its entries.
        documents: its documents.
        restarts: the records of its restarts.
    """
    entries = {entry.place.round for entry in roster}
    # a name alone does not count: an unreadable document must not make the readable ones history
    ours = [document.place for document in documents if document.writer is not Writer.STOCK]
    number = judged_round(entries, (place.round for place in ours), restarts)
    newest: dict[NodeKey, int] = defaultdict(int)
    for place in [entry.place for entry in roster] if number in entries else ours:
        if place.round == number:
            key = node_key(place)
            newest[key] = max(newest[key], place.incarnation)
    return JudgedRound(number, max(entries, default=None), dict(newest), number in entries)
