"""What a listing tells before anything is opened: the names of error documents as a table, and its groups of faults.

A name is a hint. What a table says decides which documents are opened, never what became of a job.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from firstfault.layout.keys import ErrorKey, unique_number
from firstfault.store import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["KeyTable"]

_NONE = -1
_NO_TIME = (1 << 64) - 1
_UUID_BYTES = 16
_HEX = 16


class KeyTable:
    """The names of error documents in columns: about 65 bytes each, however long the name.

    A row is a document's place in the table; rows come in the order in which they were added.
    """

    def __init__(self) -> None:
        self._round = array("i")
        self._time = array("Q")
        self._rank = array("i")
        self._group = array("i")
        self._fingerprint = array("q")
        self._incarnation = array("q")
        self._size = array("q")
        self._modified = array("q")
        self._uuid = bytearray()
        self._known: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._round)

    def add(self, key: ErrorKey, item: ObjectInfo) -> None:
        """Add a document by its name and its place in a listing."""
        self._round.append(key.round)
        self._time.append(_NO_TIME if key.timestamp_ns is None else key.timestamp_ns)
        self._rank.append(_NONE if key.rank is None else key.rank)
        self._group.append(_NONE if key.group_rank is None else key.group_rank)
        self._fingerprint.append(int(key.fingerprint or "0", _HEX))
        self._incarnation.append(key.incarnation)
        self._size.append(item.size)
        self._modified.append(_NONE if item.last_modified_ns is None else item.last_modified_ns)
        self._uuid += bytes.fromhex(key.uuid)

    def key(self, row: int) -> ErrorKey:
        """Return what the document's name says."""
        fingerprint = self._fingerprint[row]
        return ErrorKey(
            round=self._round[row],
            timestamp_ns=None if self._time[row] == _NO_TIME else self._time[row],
            rank=_or_none(self._rank[row]),
            group_rank=_or_none(self._group[row]),
            fingerprint=f"{fingerprint:012x}" if fingerprint else "",
            incarnation=self._incarnation[row],
            uuid=self._uuid[row * _UUID_BYTES : (row + 1) * _UUID_BYTES].hex(),
        )

    def number(self, row: int) -> int:
        """Return the name's uuid as a number."""
        return int.from_bytes(self._uuid[row * _UUID_BYTES : (row + 1) * _UUID_BYTES], "big")

    def item(self, row: int) -> ObjectInfo:
        """Return the document as it was listed."""
        return ObjectInfo(str(self.key(row)), self._size[row], _or_none(self._modified[row]))

    def rank(self, row: int) -> int | None:
        """Return the rank that the name says."""
        return _or_none(self._rank[row])

    def group_rank(self, row: int) -> int | None:
        """Return the node's rank that the name says."""
        return _or_none(self._group[row])

    def moment(self, row: int) -> int:
        """Return what orders rows by time, those without one last."""
        return self._time[row]

    def __contains__(self, name: object) -> bool:
        """Whether a document of this name was listed; the first question is the dear one."""
        number = unique_number(name) if isinstance(name, str) else None
        if number is None:
            return False
        if len(self._known) != len(self):
            ids = bytes(self._uuid)
            self._known = {ids[at : at + _UUID_BYTES] for at in range(0, len(ids), _UUID_BYTES)}
        return number.to_bytes(_UUID_BYTES, "big") in self._known

    def last_round(self) -> int:
        """Return the highest round of any name, -1 of an empty table."""
        return max(self._round, default=_NONE)

    def rows_of_round(self, number: int, newest: Mapping[int | None, int]) -> list[int]:
        """Return a round's rows, without those of a node's earlier incarnations.

        Args:
            number: the round.
            newest: the incarnation of each node, by its rank, as far as the roster knows it.
        """
        rows = [row for row, found in enumerate(self._round) if found == number]
        lives = dict(newest)
        for row in rows:
            node = _or_none(self._group[row])
            lives[node] = max(lives.get(node, 0), self._incarnation[row])
        return [row for row in rows if self._is_newest(row, lives)]

    def _is_newest(self, row: int, lives: Mapping[int | None, int]) -> bool:
        node, incarnation = _or_none(self._group[row]), self._incarnation[row]
        # a name without a node's rank says too little, and one without an incarnation is of a life nobody numbered
        return node is None or not incarnation or incarnation >= lives[node]

    def by_fault(self, rows: Iterable[int]) -> dict[str, array[int]]:
        """Return rows by the fingerprint of their names, each group in the order of time."""
        groups: dict[int, array[int]] = {}
        for row in sorted(rows, key=self.moment):
            groups.setdefault(self._fingerprint[row], array("q")).append(row)
        return {f"{fingerprint:012x}": found for fingerprint, found in groups.items()}

    def of_processes(self, rows: Sequence[int], among: Iterable[int]) -> Iterator[int]:
        """Yield the rows `among` which are about the same processes as `rows`: a worker's word and its agent's."""
        wanted = {self._process(row) for row in rows if self._rank[row] != _NONE}
        return (row for row in among if self._process(row) in wanted)

    def _process(self, row: int) -> tuple[int, int, int]:
        return (self._rank[row], self._group[row], self._incarnation[row])


def _or_none(number: int) -> int | None:
    return None if number == _NONE else number
