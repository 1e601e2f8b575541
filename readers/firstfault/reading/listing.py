"""Lists an attempt's folders in as few requests as the storage allows, and chooses which documents are opened.

Names of documents are kept as a table. The choice is pure: from names and what was read so far to names.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from firstfault.layout import (
    ErrorKey,
    Layout,
    RosterKey,
    is_bundle,
    is_error_file,
    is_of_nodes,
    is_restart_record,
    is_stock_error_file,
    join_name,
)
from firstfault.model import JobErrors, Phase, Reads, Unopened, WorkerError
from firstfault.store import ObjectInfo, Page, ReadableStore
from firstfault.sync import gathered

_STOCK = "error"
"""Flyte's own files sort behind this name, and before our folders."""
_BEFORE_NAMES = "!"
"""Sorts before every name that does not begin with a space. Some storages do not accept a trailing slash instead."""
_AFTER_KEYS = "e1-:"
"""Sorts behind every key of grammar 1, and before other names with the same beginning."""
_AT_ONCE = 16
"""Parts of a listing that are read at the same time."""
_NONE = -1
_NO_TIME = (1 << 64) - 1
_UUID_BYTES = 16
_END = len(".pb")
_UUID_FROM = 2 * _UUID_BYTES + _END
_HEX = 16


# --- names as a table -------------------------------------------------------------------------------------------------


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

        def is_newest(row: int) -> bool:
            node, incarnation = _or_none(self._group[row]), self._incarnation[row]
            # without a group rank or an incarnation, treat it as the newest
            return node is None or not incarnation or incarnation >= incarnations.get(node, 0)

        return [row for row in rows if self._round[row] > number or is_newest(row)]

    def rows_unconfirmed(self, rows: Iterable[int], number: int, newest: Mapping[int | None, int]) -> list[int]:
        """Return those of `rows` that name a later round than `number`, or a newer incarnation than the roster's."""
        found = []
        for row in rows:
            known = newest.get(_or_none(self._group[row]), self._incarnation[row])
            if self._round[row] > number or self._incarnation[row] > known:
                found.append(row)
        return found

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


# --- listing ----------------------------------------------------------------------------------------------------------


@dataclass
class Listing:
    """The listing of one attempt."""

    table: KeyTable = field(default_factory=KeyTable)
    """Error documents whose names match the grammar."""
    others: list[ObjectInfo] = field(default_factory=list)
    """Documents with other names, which all have to be opened."""
    foreign: list[str] = field(default_factory=list)
    """Names of files that are not documents."""
    stock: list[ObjectInfo] = field(default_factory=list)
    """Flyte's own error files."""
    roster: list[ObjectInfo] = field(default_factory=list)
    bundles: list[ObjectInfo] = field(default_factory=list)
    """Files with copies of documents and roster entries."""
    restarts: list[ObjectInfo] = field(default_factory=list)
    """Records of restarts within the attempt."""
    in_order: bool = True
    """Whether all pages so far were sorted by name."""
    rest: str | None = None
    """The name behind which to continue the listing up to the end of the keys; None: it is complete."""
    rest_after_keys: str | None = None
    """The same for the listing behind the keys."""

    @property
    def of_nodes(self) -> list[ObjectInfo]:
        """Bundles of what all nodes wrote, where each node has a folder of its own."""
        return [item for item in self.bundles if is_of_nodes(item.name)]

    def mark(self) -> tuple[object, ...]:
        """Return a value that changes when an object is added, removed or overwritten."""
        rest = [
            (item.name, item.size, item.last_modified_ns)
            for item in (*self.others, *self.stock, *self.roster, *self.of_nodes, *self.restarts)
        ]
        return (len(self.table), sum(map(self.table.number, range(len(self.table)))), tuple(sorted(rest, key=repr)))

    def add(self, objects: Iterable[ObjectInfo], layout: Layout) -> None:
        """Add objects, whose names are relative to the layout's root."""
        for item in objects:
            folder, _, name = item.name.rpartition("/")
            if layout.errors is not None and folder == layout.errors:
                key = ErrorKey.parse(name)
                if key is not None:
                    self.table.add(key, item)
                elif is_error_file(name):
                    self.others.append(_named(item, name))
                else:
                    self.foreign.append(name)
            elif layout.roster is not None and folder == layout.roster:
                if is_error_file(name):
                    self.roster.append(_named(item, name))
                elif is_bundle(name):
                    self.bundles.append(_named(item, name))
                elif is_restart_record(name):
                    self.restarts.append(_named(item, name))
            elif layout.stock is not None and folder == layout.stock and is_stock_error_file(name):
                self.stock.append(_named(item, name))


def _named(item: ObjectInfo, name: str) -> ObjectInfo:
    return ObjectInfo(name, item.size, item.last_modified_ns)


async def begin(
    store: ReadableStore, layout: Layout, eager: Callable[[ObjectInfo], None] = lambda _: None, small: int = 0
) -> Listing:
    """List two first pages at once: from the start of the documents, and from the end of the keys.

    The first has the last round's earliest failures, the second its roster. If `Listing.in_order` is False, the rest of
    the listing must not be used.

    Args:
        store: the store of the layout's root.
        layout: the attempt's folders.
        eager: called with the first document by name, as soon as it is listed.
        small: `eager` is not called if the page has at most this number of objects.
    """
    listing = Listing()
    start = _STOCK if layout.stock is not None else f"{layout.errors}/{_BEFORE_NAMES}"
    end = _end_of_keys(layout)

    async def documents() -> None:
        page = await store.page(after=start)
        folder = f"{layout.errors}/"
        item = next((item for item in page.objects if item.name.startswith(folder)), None)
        if item is not None and len(page.objects) > small:
            eager(_named(item, item.name.removeprefix(folder)))
        listing.in_order &= page.in_order
        listing.rest = _take(listing, page, layout, end)

    async def after_keys() -> None:
        page = await store.page(after=end)
        listing.in_order &= page.in_order
        listing.rest_after_keys = _take(listing, page, layout, None)

    await gathered(documents(), after_keys())
    return listing


async def list_everything(
    store: ReadableStore, layout: Layout, begun: Listing | None = None, cuts: Sequence[str] = ()
) -> Listing:
    """Return the complete listing of an attempt's folders; continues one of `begin`.

    Args:
        store: the store of the layout's root.
        layout: the attempt's folders.
        begun: the listing to continue.
        cuts: paths below the root, sorted, at which to split what is left of it: the parts are read at the same time.
            They need not exist.
    """
    if begun is not None and begun.in_order:
        await gathered(
            _list_rest(store, layout, begun, _segments(begun.rest, cuts, _end_of_keys(layout))),
            _list_rest(store, layout, begun, _segments(begun.rest_after_keys, cuts, None)),
        )
        if begun.in_order:
            return begun
    listing = Listing()

    async def read(folder: str) -> None:
        listing.add((_named(item, join_name(folder, item.name)) for item in await store.list(folder)), layout)

    folders = (layout.errors, layout.roster, layout.stock)
    await gathered(*(read(folder) for folder in folders if folder is not None))
    return listing


def _end_of_keys(layout: Layout) -> str:
    return f"{layout.errors}/{_AFTER_KEYS}"


def _take(listing: Listing, page: Page, layout: Layout, end: str | None) -> str | None:
    """Add a page up to the name `end`; return the name behind which to continue, None if there is no need."""
    listing.add((item for item in page.objects if end is None or item.name <= end), layout)
    return _continues(page, layout, end)


def _continues(page: Page, layout: Layout, end: str | None) -> str | None:
    """Return the name behind which to continue after a page of names up to `end`, None if there is no need."""
    last = page.objects[-1].name if page.objects else ""
    if not page.more or (end is not None and last >= end):
        return None
    if end is None:
        # nothing behind the roster is ours
        return max(last, f"{layout.roster}/{_BEFORE_NAMES}") if last < f"{layout.roster}0" else None
    # skip other folders, which may be large, from the end of Flyte's own files to the documents
    return last if last.startswith(_STOCK) else max(last, f"{layout.errors}/{_BEFORE_NAMES}")


def _segments(start: str | None, cuts: Iterable[str], end: str | None) -> list[tuple[str, str | None]]:
    """Return the parts of a listing from behind `start` up to `end`: behind which name each begins, and its last name.

    Args:
        start: None: nothing is left to list.
        cuts: names, sorted, at which to split it.
        end: None: there is no last name.
    """
    if start is None:
        return []
    between = [name for name in cuts if name > start and (end is None or name < end)]
    return list(zip([start, *between], [*between, end], strict=True))


async def _list_rest(
    store: ReadableStore, layout: Layout, listing: Listing, segments: Sequence[tuple[str, str | None]]
) -> None:
    """Add the names of segments, in their order."""
    failed = False

    async def pages(start: str | None, end: str | None) -> list[Page]:
        found: list[Page] = []
        while start is not None and listing.in_order and not failed:
            page = await store.page(after=start)
            listing.in_order &= page.in_order
            found.append(page)
            start = _continues(page, layout, end)
        return found

    for first in range(0, len(segments), _AT_ONCE):
        some = segments[first : first + _AT_ONCE]
        tasks = [asyncio.ensure_future(pages(*segment)) for segment in some]
        try:
            for (_, end), task in zip(some, tasks, strict=True):
                for page in await task:
                    _take(listing, page, layout, end)
        except BaseException:
            failed = True
            # a request must not outlive the event loop; the others end with the one that they have sent
            await asyncio.gather(*tasks, return_exceptions=True)
            raise


# --- which documents of a large attempt are opened --------------------------------------------------------------------

SMALL = 128
"""As many documents are all opened, and as many roster entries."""
OF_EACH_FAULT = 16
"""Documents that are opened of one fault, at first."""
AT_FIRST = 1024
"""Documents that are opened at first, of all faults together."""
MORE = 256
"""Documents that are opened in each step after that."""
STEPS = 6
NO_FAULT = "0" * 12
AT_ONCE = 16
"""Files of Flyte's own that `earliest` opens beside the first document, at most; and documents of one moment."""
OF_HISTORY = 32
"""Documents of earlier rounds that are opened of a large attempt."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a strategy wants to read."""

    reads: Reads
    named: Callable[[JobErrors], Iterable[int]] = lambda _: ()
    """After a first look: the ranks whose documents it wants as well."""


def newest_incarnations(listing: Listing) -> dict[int | None, int] | None:
    """Return the incarnation of each node of the documents' last round; None if a roster has another last round."""
    parsed = [RosterKey.parse(item.name) for item in listing.roster]
    keys = [key for key in parsed if key is not None]
    last = listing.table.last_round()
    return None if keys and max(key.round for key in keys) != last else incarnations_of_round(keys, last)


def incarnations_of_round(keys: Iterable[RosterKey], round_: int) -> dict[int | None, int]:
    """Return each node's newest incarnation in a round."""
    newest: dict[int | None, int] = {}
    for key in keys:
        if key.round == round_:
            newest[key.group_rank] = max(newest.get(key.group_rank, 0), key.incarnation)
    return newest


def first_rows(listing: Listing, newest: Mapping[int | None, int] | None) -> list[int]:
    """Return the documents of the last round's first moment; none where more than they have to be looked at."""
    table = listing.table
    is_small = len(table) <= SMALL
    if newest is None or is_small or listing.others or listing.foreign or len(listing.stock) > AT_ONCE:
        return []
    # in the order of their names, and so of time
    rows = table.rows_of_round(table.last_round(), newest)
    first = [row for row in rows[: AT_ONCE + 1] if table.moment(row) == table.moment(rows[0])]
    return first if len(first) <= AT_ONCE else []


def some_of_each_fault(groups: Mapping[str, array[int]]) -> list[int]:
    """Return the rows to open first: of each fault the earliest, the last, and some between them.

    Where there are more faults than may be opened, those come first that are rare, and those that are early.
    """
    share = max(1, min(OF_EACH_FAULT, AT_FIRST // max(len(groups), 1)))
    chosen = list(groups.values())
    if len(chosen) > AT_FIRST:
        rare = sorted(range(len(chosen)), key=lambda index: len(chosen[index]))[: AT_FIRST // 2]
        chosen = [chosen[index] for index in sorted({*rare, *range(AT_FIRST // 2)})]
    return [row for rows in chosen for row in _some(rows, share)]


def _some(rows: Sequence[int], count: int) -> list[int]:
    if len(rows) <= count:
        return list(rows)
    early = max(count // 2, 1)
    rest = count - early
    step = (len(rows) - 1 - early) / max(rest - 1, 1)
    return [*rows[:early], *sorted({rows[len(rows) - 1 - int(number * step)] for number in range(rest)})]


def unopened_by_fault(table: KeyTable, rows: Iterable[int], opened: Mapping[int, object]) -> tuple[Unopened, ...]:
    """Return what was not opened, by fault."""
    found = []
    for digits, members in table.by_fault(rows).items():
        left = [row for row in members if row not in opened]
        if not left:
            continue
        said = {read.fingerprint for read in map(opened.get, members) if isinstance(read, WorkerError)}
        ranks = {rank for rank in map(table.rank, left) if rank is not None}
        nodes = {node for node in map(table.group_rank, left) if node is not None}
        names_hash = sum(map(table.number, left))
        group = Unopened(
            min(said, default=f"?:{digits}"), len(left), tuple(sorted(ranks)), tuple(sorted(nodes)), names_hash
        )
        found.append(group)
    return tuple(sorted(found, key=lambda group: (-group.count, group.fingerprint)))


def agrees(key: ErrorKey, error: WorkerError) -> bool:
    """Whether a document agrees with its name."""
    place = error.place
    # as the name has it, which is bounded
    said = ErrorKey.parse(
        str(
            ErrorKey(
                place.round,
                error.timestamp_ns,
                place.rank,
                place.group_rank,
                error.fingerprint.partition(":")[2],
                place.incarnation,
                key.uuid,
            )
        )
    )
    return said == key


def roster_entries_to_open(items: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Return the entries of the last round, of a node that has said how it ended that one alone; and foreign ones."""

    def life(key: RosterKey) -> tuple[int, int | None, int]:
        return (key.round, key.group_rank, key.incarnation)

    keys = {item.name: RosterKey.parse(item.name) for item in items}
    last = max((key.round for key in keys.values() if key is not None), default=0)
    ended = {life(key) for key in keys.values() if key is not None and key.phase is not Phase.JOINED}
    return [
        item
        for item in items
        if (key := keys[item.name]) is None
        or (key.round == last and (key.phase is not Phase.JOINED or life(key) not in ended))
    ]
