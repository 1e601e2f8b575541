"""The names of error documents as a table, grouped by fault. It decides which documents are opened, not the verdict."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from firstfault.layout.keys import ErrorKey
from firstfault.store import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["KeyTable"]

_NONE = -1
_NO_TIME = (1 << 64) - 1
_UUID_BYTES = 16
_END = len(".pb")
_UUID_FROM = 2 * _UUID_BYTES + _END
_HEX = 16


class KeyTable:
    """The fields of error documents' names in columns, about 65 bytes per document.

    A row is a document's index in the table, in the order of `add`.
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
        self._index: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._round)

    def add(self, key: ErrorKey, item: ObjectInfo) -> None:
        """Add a document: the fields of its name, and its entry in any listing, of which its name is not used."""
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
        """Return the fields of the document's name."""
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
        """Return the document's entry in the listing."""
        return ObjectInfo(str(self.key(row)), self._size[row], _or_none(self._modified[row]))

    def rank(self, row: int) -> int | None:
        """Return the rank in the name."""
        return _or_none(self._rank[row])

    def group_rank(self, row: int) -> int | None:
        """Return the group rank in the name."""
        return _or_none(self._group[row])

    def moment(self, row: int) -> int:
        """Return the sort key by time, in nanoseconds; rows without a time come last."""
        return self._time[row]

    def __contains__(self, name: object) -> bool:
        """Whether a document of this name was listed. The first membership test builds the index."""
        return isinstance(name, str) and self._row(name) is not None

    def is_stored(self, name: str) -> bool:
        """Whether the storage has a document of this name; it may also be only a copy that a node handed over."""
        row = self._row(name)
        return row is not None and self._modified[row] != _NONE

    def _row(self, name: str) -> int | None:
        if not name.startswith("e1-"):
            return None
        try:
            uuid = bytes.fromhex(name[-_UUID_FROM:-_END])
        except ValueError:
            return None
        if len(self._index) != len(self):
            ids = bytes(self._uuid)
            self._index = {ids[row * _UUID_BYTES : (row + 1) * _UUID_BYTES]: row for row in range(len(self))}
        return self._index.get(uuid)

    def last_round(self) -> int:
        """Return the highest round; -1 for an empty table."""
        return max(self._round, default=_NONE)

    def rounds(self) -> set[int]:
        """Return all rounds in the names."""
        return set(self._round)

    def rows_of_round(self, number: int, newest: Mapping[int | None, int]) -> list[int]:
        """Return the rows of a round and of later ones, without those of a node's earlier incarnations.

        Args:
            number: the round.
            newest: the incarnations of this round in the roster, by group rank; without any, the names decide.
        """
        rows = [row for row, found in enumerate(self._round) if found >= number]
        incarnations = dict(newest)
        for row in rows if not newest else ():
            node = _or_none(self._group[row])
            incarnations[node] = max(incarnations.get(node, 0), self._incarnation[row])
        return [row for row in rows if self._round[row] > number or self._is_newest(row, incarnations)]

    def rows_unconfirmed(self, rows: Iterable[int], number: int, newest: Mapping[int | None, int]) -> list[int]:
        """Return those of `rows` that name a later round than `number`, or a newer incarnation than the roster's."""
        found = []
        for row in rows:
            known = newest.get(_or_none(self._group[row]), self._incarnation[row])
            if self._round[row] > number or self._incarnation[row] > known:
                found.append(row)
        return found

    def _is_newest(self, row: int, incarnations: Mapping[int | None, int]) -> bool:
        node, incarnation = _or_none(self._group[row]), self._incarnation[row]
        # without a group rank or an incarnation, treat it as the newest
        return node is None or not incarnation or incarnation >= incarnations.get(node, 0)

    def by_fault(self, rows: Iterable[int]) -> dict[str, array[int]]:
        """Return rows by the fingerprint in their names, each group sorted by time."""
        groups: dict[int, array[int]] = {}
        for row in sorted(rows, key=self.moment):
            groups.setdefault(self._fingerprint[row], array("q")).append(row)
        return {f"{fingerprint:012x}": found for fingerprint, found in groups.items()}

    def of_processes(self, rows: Sequence[int], among: Iterable[int]) -> Iterator[int]:
        """Yield the rows in `among` about the same processes as `rows`: documents of the worker and of its agent."""
        wanted = {self._process(row) for row in rows if self._rank[row] != _NONE}
        return (row for row in among if self._process(row) in wanted)

    def _process(self, row: int) -> tuple[int, int, int]:
        return (self._rank[row], self._group[row], self._incarnation[row])


def _or_none(number: int) -> int | None:
    return None if number == _NONE else number
