"""Reads an attempt: lists its names and opens its documents.

A small attempt is read completely. In a large cascade the names tell which documents have the same fault: several of
each are opened, then those that the strategy names. `earliest` reads the first page and the first documents. If a name
contradicts its document, every document is opened.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from firstfault.errors import BadDocumentError, ObjectNotFoundError, StoreError
from firstfault.layout.keys import ErrorKey, RosterKey, is_of_entry, roster_key_for
from firstfault.layout.paths import bundle_name, bundle_path, join_name
from firstfault.model import DocumentRef, NodePresence, Phase, Place, Reads, Seal, Unopened, WorkerError
from firstfault.reading.assemble import Snapshot, Unreadable
from firstfault.reading.listing import Listing, begin, list_everything
from firstfault.reading.restarts import read_restarts
from firstfault.reading.rounds import judged_round
from firstfault.reading.selection import (
    MORE,
    NO_FAULT,
    OF_EACH_FAULT,
    OF_HISTORY,
    SMALL,
    STEPS,
    Wish,
    agrees,
    first_rows,
    incarnations_of_round,
    newest_incarnations,
    ranks_named,
    roster_entries_to_open,
    some_of_each_fault,
    unopened_by_fault,
)
from firstfault.store import join
from firstfault.sync import gathered
from firstfault.wire.bundle import unpack
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, decode, decode_presence

if TYPE_CHECKING:
    from array import array
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from firstfault.layout.paths import Layout
    from firstfault.model import JobErrors, RestartRecord
    from firstfault.reading.key_table import KeyTable
    from firstfault.store import ObjectInfo, ReadableStore

__all__ = ["list_all", "look", "read_document", "read_listed", "read_roster", "snapshot_of_document"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

_PARALLEL_GETS = 64
_WORTH_A_BUNDLE = 8
"""Fewer documents and entries are read one by one."""
_MAX_BUNDLE_BYTES = 64 * 1024 * 1024
_MOST_BUNDLES = 4
"""Of more bundles, the largest are tried: all but one are damaged, or left by a pod that concluded early."""
MAX_OPENED = 65_536
"""Documents and roster entries that are opened of one attempt."""
MAX_OPENED_BYTES = 1024 * 1024 * 1024
"""Bytes of them together, as listed."""
_KEY = re.compile(rb"e1-[0-9a-z-]{60,160}\.pb")
"""Names of documents in the receipts of a roster entry."""
_CUT_DOCUMENTS, _CUT_ENTRIES = 900, 450
"""Names between two cuts of a listing; a page has 1,000."""


@dataclass
class _Room:
    """What may still be opened of an attempt: whoever may write to it must not fill a reader's memory."""

    documents: int = field(default_factory=lambda: MAX_OPENED)
    size: int = field(default_factory=lambda: MAX_OPENED_BYTES)

    def admits(self, item: ObjectInfo) -> bool:
        """Whether a document may be opened, which is then counted."""
        if item.size > MAX_DOCUMENT_BYTES:
            return True  # it will not be opened
        if not self.documents or item.size > self.size:
            return False
        self.documents -= 1
        self.size -= item.size
        return True


@dataclass
class _Opened:
    """The opened documents of a table, by row."""

    rows: dict[int, WorkerError | Seal | Unreadable] = field(default_factory=dict)

    def lies(self, table: KeyTable) -> bool:
        """Whether a document contradicts its name."""
        return any(
            isinstance(found, WorkerError) and not agrees(table.key(row), found) for row, found in self.rows.items()
        )


async def look(  # noqa: PLR0913 - the parts of a read
    store: ReadableStore,
    layout: Layout,
    wish_of: Callable[[Sequence[Seal]], Wish],
    judge: Callable[[Snapshot], JobErrors],
    known: Mapping[str, NodePresence] | None = None,
    *,
    fresh: bool = False,
) -> Snapshot:
    """List an attempt and return what was read of it.

    Args:
        store: the store of the layout's root.
        layout: the attempt's folders.
        wish_of: returns what to read, given the sealed verdicts.
        judge: assembles snapshot into a job.
        known: roster entries that were read before, by name.
        fresh: whether to leave out the copies that the pods left.

    Raises:
        StoreError: the folder could not be listed, or the layout's only document could not be read.
    """
    if layout.document is not None:
        return _sorted_out([await read_document(store, layout.document, None)])
    begun = None
    if store.pages_in_order and wish_of(()).reads is Reads.FIRST:
        found, begun = await _first(store, layout)
        if found is not None:
            return found
    elif store.pages_in_order:
        begun = await begin(store, layout)
    copies = await _copies(store, layout, begun) if begun is not None and not fresh else {}
    listing = await list_everything(store, layout, begun, _cuts(copies, layout))
    if begun is None and not fresh:
        copies = await _copies(store, layout, listing)
    return await _Look(store, layout, listing, dict(known or {}), copies).read(wish_of, judge)


async def list_all(store: ReadableStore, layout: Layout) -> Listing:
    """Return the listing of an attempt's folders.

    Raises:
        StoreError: a folder could not be listed.
    """
    return await list_everything(store, layout, await begin(store, layout) if store.pages_in_order else None)


async def read_listed(  # noqa: PLR0913, PLR0917 - the parts of a read
    store: ReadableStore,
    layout: Layout,
    listing: Listing,
    wish_of: Callable[[Sequence[Seal]], Wish],
    judge: Callable[[Snapshot], JobErrors],
    known: dict[str, NodePresence],
) -> Snapshot:
    """Read the documents of a listing as far as the strategy wants them; see `look` for the other arguments.

    Args:
        store: the store of the layout's root.
        layout: the attempt's folders.
        listing: their complete listing.
        wish_of: returns what to read.
        judge: assembles snapshot into a job.
        known: roster entries that were read before, by name; new ones are added.
    """
    copies = await _copies(store, layout, listing)
    return await _Look(store, layout, listing, known, copies).read(wish_of, judge)


# --- the first failure alone ----------------------------------------------------------------------------------------


async def _first(store: ReadableStore, layout: Layout) -> tuple[Snapshot | None, Listing]:
    """Return the earliest failure of the last round, from the first page of names, and the listing.

    The findings are None if more must be read: the attempt is small or has other files, or the first document cannot be
    read, is about a stopped process, or is about an exception in flight.
    """
    early: dict[str, asyncio.Task[WorkerError | Seal | Unreadable]] = {}

    def start(item: ObjectInfo) -> None:
        path = join_name(layout.errors or "", item.name)
        early[path] = asyncio.create_task(read_document(store, path, item))

    async def read(place: tuple[str, ObjectInfo]) -> WorkerError | Seal | Unreadable:
        task = early.get(place[0])
        return await (task if task is not None else read_document(store, *place))

    try:
        listing = await begin(store, layout, start, SMALL)
        newest = newest_incarnations(listing)
        rows = first_rows(listing, newest) if listing.in_order else []
        if not rows:
            return None, listing
        table = listing.table
        places = [(join_name(layout.errors or "", item.name), item) for item in map(table.item, rows)]
        places += [(join_name(layout.stock or "", item.name), item) for item in listing.stock]
        documents = await _each(read, places)
    finally:
        await asyncio.gather(*early.values(), return_exceptions=True)
    opened = dict(zip(rows, documents, strict=False))
    for row, found in opened.items():
        if not isinstance(found, WorkerError) or not agrees(table.key(row), found):
            return None, listing
        if found.in_flight or found.stopped_by_agent:
            return None, listing
    more = " at least" if listing.rest is not None else ""
    said = f"only the first page of names was read ({len(table)} documents{more}), and {len(rows)} were opened"
    current = table.rows_of_round(table.last_round(), newest or {})
    return _sorted_out(documents, notes=(said,), unopened=unopened_by_fault(table, current, opened)), listing


# --- all documents, or several of each fault ------------------------------------------------------------------------


class _Look:
    """Reads the documents of a listing."""

    def __init__(
        self,
        store: ReadableStore,
        layout: Layout,
        listing: Listing,
        roster: dict[str, NodePresence],
        copies: dict[str, bytes],
    ) -> None:
        self._store = store
        self._layout = layout
        self._listing = listing
        self._table = listing.table
        self._roster = roster
        self._bad_roster: list[Unreadable] = []
        self._copies = copies
        self._room = _Room()
        self._opened = _Opened()
        self._found: tuple[int, Snapshot] | None = None
        """What was read, with the number of documents that were open then."""
        self._rest: list[WorkerError | Seal | Unreadable] = []
        self._restarts: tuple[RestartRecord, ...] = ()
        self._rows: list[int] = []
        """Rows of the judged round."""
        self._history: list[int] = []
        """Rows of earlier rounds and incarnations."""

    async def read(self, wish_of: Callable[[Sequence[Seal]], Wish], judge: Callable[[Snapshot], JobErrors]) -> Snapshot:
        """Return the snapshot."""
        is_small = len(self._table) <= SMALL
        names = [(join_name(self._layout.errors or "", item.name), item) for item in self._listing.others]
        names += [(join_name(self._layout.stock or "", item.name), item) for item in self._listing.stock]
        await gathered(
            self._read_roster(),
            self._read_rest(names),
            self._read_restarts(),
            self._open(range(len(self._table)) if is_small else ()),
        )
        wish = wish_of([found for found in self._rest if isinstance(found, Seal)])
        if not is_small and (wish.reads is Reads.ALL or not await self._read_groups(wish, judge)):
            await self._open(range(len(self._table)))
        return self._findings()

    async def _read_rest(self, names: Iterable[tuple[str, ObjectInfo]]) -> None:
        async def read(place: tuple[str, ObjectInfo]) -> WorkerError | Seal | Unreadable:
            path, item = place
            return await read_document(self._store, path, item) if self._room.admits(item) else _no_room(item)

        self._rest = await _each(read, names)

    async def _read_restarts(self) -> None:
        self._restarts = await read_restarts(self._store, self._layout.roster or "", self._listing.restarts)

    async def _read_roster(self) -> None:
        items = [item for item in self._listing.roster if item.name not in self._roster]
        if len(items) > SMALL:
            items = roster_entries_to_open(items)
        folder, admits = self._layout.roster or "", self._room.admits
        read, self._bad_roster = await read_roster(self._store, folder, items, self._copies, admits)
        self._roster.update(read)

    async def _open(self, rows: Iterable[int]) -> None:
        new = [row for row in rows if row not in self._opened.rows]
        folder = self._layout.errors or ""

        async def read(row: int) -> WorkerError | Seal | Unreadable:
            item = self._table.item(row)
            if not self._room.admits(item):
                return _no_room(item)
            return await read_document(self._store, join_name(folder, item.name), item, self._copies)

        self._opened.rows.update(zip(new, await _each(read, new), strict=True))

    async def _read_groups(self, wish: Wish, judge: Callable[[Snapshot], JobErrors]) -> bool:
        """Open some documents of each fault, then those of named ranks; return whether all names were right."""
        table = self._table
        keys = [key for key in map(RosterKey.parse, self._roster) if key is not None]
        round_ = judged_round({key.round for key in keys}, table.rounds(), self._restarts)
        newest = incarnations_of_round(keys, round_)
        gone = {
            receipt.name
            for entry in self._roster.values()
            for receipt in entry.receipts
            if receipt.withdrawn and (key := ErrorKey.parse(receipt.name)) and is_of_entry(key, entry.place)
        }
        rows = table.rows_of_round(round_, newest)
        self._rows = [row for row in rows if not gone or str(table.key(row)) not in gone]
        groups = table.by_fault(self._rows)
        self._history = sorted(set(range(len(table))) - set(rows), key=table.moment)
        # a name without a fingerprint does not tell the fault
        wanted = [*groups.pop(NO_FAULT, ()), *self._of_finished(keys)]
        wanted += some_of_each_fault(groups)
        if keys:
            wanted += table.rows_unconfirmed(self._rows, max(key.round for key in keys), newest)[:MORE]
        await self._open(self._history[:OF_HISTORY])
        for _ in range(STEPS):
            wanted = [row for row in {*wanted, *table.of_processes(wanted, self._rows)} if row not in self._opened.rows]
            if not wanted:
                return True
            await self._open(sorted(wanted, key=table.moment))
            if self._opened.lies(table):
                return False
            named = ranks_named(wish, judge(self._findings()))
            left = [row for row in self._rows if row not in self._opened.rows]
            wanted = [*[row for row in left if table.rank(row) in named][:MORE], *self._unclear(groups)]
        return True

    def _of_finished(self, keys: Iterable[RosterKey]) -> list[int]:
        """Return the rows of nodes that succeeded: their exceptions in flight were handled."""
        finished = {key.group_rank for key in keys if key.phase is Phase.SUCCEEDED}
        return [row for row in self._rows if finished and self._table.group_rank(row) in finished][:MORE]

    def _unclear(self, groups: Mapping[str, array[int]]) -> list[int]:
        """Return more rows of faults of which no opened document is readable, or only some processes were stopped."""
        found = []
        for rows in groups.values():
            read = [self._opened.rows[row] for row in rows if row in self._opened.rows]
            failures = [item for item in read if isinstance(item, WorkerError)]
            if read and len({bool(item.sent_signals) for item in failures}) != 1:
                found += [row for row in rows if row not in self._opened.rows][:OF_EACH_FAULT]
        return found

    def _findings(self) -> Snapshot:
        """Return all that was read; the same object if nothing was opened since the last call."""
        if self._found is None or self._found[0] != len(self._opened.rows):
            self._found = (len(self._opened.rows), self._sorted())
        return self._found[1]

    def _sorted(self) -> Snapshot:
        found = _sorted_out(
            [*self._opened.rows.values(), *self._rest],
            notes=tuple(f"roster entry not readable: {item.name}: {item.reason}" for item in self._bad_roster),
            unopened=unopened_by_fault(self._table, self._rows, self._opened.rows),
        )
        history = sum(row not in self._opened.rows for row in self._history)
        return Snapshot(
            documents=found.documents,
            seals=found.seals,
            roster=tuple(self._roster.values()),
            unreadable=found.unreadable,
            foreign=tuple(self._listing.foreign),
            notes=found.notes,
            unopened=found.unopened,
            unopened_history=history,
            listed=self._table,
            stored=frozenset(self._stored_late()),
            restarts=self._restarts,
        )

    def _stored_late(self) -> Iterator[str]:
        """Yield the names of documents that the storage has although their receipts report no upload."""
        for entry in self._roster.values():
            for receipt in entry.receipts:
                if not receipt.durable and self._table.is_stored(receipt.name):
                    yield receipt.name


# --- reading --------------------------------------------------------------------------------------------------------


async def read_document(
    store: ReadableStore, path: str, item: ObjectInfo | None, copies: dict[str, bytes] | None = None
) -> WorkerError | Seal | Unreadable:
    """Return a decoded document, or why it cannot be read.

    Args:
        store: the store of the layout's root.
        path: the document's path, relative to the store's root.
        item: its entry in a listing; None for a single document, for which errors are raised.
        copies: of documents, by their name in a bundle; those that are used are taken out.

    Raises:
        StoreError: the single document is missing, or could not be read.
        BadDocumentError: the single document is not valid.
    """
    name = path.rsplit("/", 1)[-1]
    if item is not None and item.size > MAX_DOCUMENT_BYTES:
        return _too_large(name, item.size)
    try:
        data = _copy(copies or {}, path, item)
        if data is None:
            data = await store.get(path, limit=MAX_DOCUMENT_BYTES if item is None else None)
        ref = DocumentRef(name, join(store.uri, path), item.last_modified_ns if item else None, len(data))
        return decode(data, ref)
    except ObjectNotFoundError:
        if item is None:
            raise
        return Unreadable(name, "gone between listing and reading")
    except (StoreError, BadDocumentError) as error:
        if item is None:
            raise
        return Unreadable(name, str(error))


def snapshot_of_document(data: bytes, name: str) -> Snapshot:
    """Return what one document says.

    Raises:
        BadDocumentError: it is not valid.
    """
    return _sorted_out([decode(data, DocumentRef(name, size=len(data)))])


async def _copies(store: ReadableStore, layout: Layout, listing: Listing) -> dict[str, bytes]:
    """Return the documents and roster entries of the attempt's largest bundle of copies, by their name in it.

    A bundle that is damaged or was changed is left out: its name is a hash of its content.
    """
    if len(listing.table) + len(listing.roster) < _WORTH_A_BUNDLE:
        return {}
    for item in sorted(listing.bundles, key=lambda item: -item.size)[:_MOST_BUNDLES]:
        path = join_name(layout.roster or "", item.name)
        try:
            data = await store.get(path, limit=_MAX_BUNDLE_BYTES)
            if bundle_name(data) == item.name:
                return unpack(data)
            logger.warning("%s is damaged, and every document is read by itself", join(store.uri, path))
        except (StoreError, BadDocumentError) as error:
            logger.warning("%s cannot be read, and every document is read by itself: %s", join(store.uri, path), error)
    return {}


def _cuts(copies: Mapping[str, bytes], layout: Layout) -> list[str]:
    """Return paths at which to split a listing into parts of about a page, from the names that copies tell."""
    documents: set[str] = set()
    entries: set[str] = set()
    for path, data in copies.items():
        folder, _, name = path.rpartition("/")
        (entries if folder == bundle_path(layout.roster or "") else documents).add(name)
        documents.update(found.decode() for found in _KEY.findall(data))
    # a node has two entries, and only one of them need be among the copies
    return [
        *(join_name(layout.errors or "", name) for name in sorted(documents)[::_CUT_DOCUMENTS]),
        *(join_name(layout.roster or "", name) for name in sorted(entries)[::_CUT_ENTRIES]),
    ]


def _copy(copies: dict[str, bytes], path: str, item: ObjectInfo | None) -> bytes | None:
    """Take the copy of a listed object; None if there is none, or if it was overwritten by one of another size.

    No object is read twice, so that its copy need not stay in memory.
    """
    data = copies.pop(bundle_path(path), None) if copies and item is not None else None
    return data if data is not None and item is not None and len(data) == item.size else None


def _no_room(item: ObjectInfo) -> Unreadable:
    return Unreadable(
        item.name, f"not opened: of an attempt {MAX_OPENED} documents and {MAX_OPENED_BYTES} bytes are read"
    )


def _too_large(name: str, size: int) -> Unreadable:
    return Unreadable(name, f"{size} bytes, more than the limit of {MAX_DOCUMENT_BYTES}")


async def read_roster(
    store: ReadableStore,
    folder: str,
    names: Sequence[ObjectInfo],
    copies: dict[str, bytes] | None = None,
    admits: Callable[[ObjectInfo], bool] = lambda _: True,
) -> tuple[dict[str, NodePresence], list[Unreadable]]:
    """Return the entries by name, and the unreadable ones; those have an entry with the fields of their names.

    Args:
        store: the store of the layout's root.
        folder: of the roster.
        names: of the entries, as listed.
        copies: as in `read_document`.
        admits: whether an entry may be opened.
    """

    async def read(item: ObjectInfo) -> NodePresence | Unreadable:
        if item.size > MAX_DOCUMENT_BYTES:
            return _too_large(item.name, item.size)
        if not admits(item):
            return _no_room(item)
        path = join_name(folder, item.name)
        try:
            data = _copy(copies or {}, path, item)
            entry = decode_presence(await store.get(path) if data is None else data, item.name)
            return entry if _is_named(entry, item.name) else Unreadable(item.name, "it contradicts its name")
        except (StoreError, BadDocumentError) as error:
            return Unreadable(item.name, str(error))

    results = dict(zip((item.name for item in names), await _each(read, names), strict=True))
    entries = {name: result for name, result in results.items() if isinstance(result, NodePresence)}
    bad = [result for result in results.values() if isinstance(result, Unreadable)]
    for item in bad:
        key = RosterKey.parse(item.name)
        if key is not None:
            place = Place(round=key.round, group_rank=key.group_rank, incarnation=key.incarnation)
            entries[item.name] = NodePresence(key.phase, place)
    return entries, bad


def _is_named(entry: NodePresence, name: str) -> bool:
    """Whether an entry says what its name says: a wrong round would turn failures into those of an earlier round."""
    key = RosterKey.parse(name)
    return key is None or key == RosterKey.parse(roster_key_for(entry, key.uuid))


async def _each(call: Callable[[T], Awaitable[R]], items: Iterable[T]) -> list[R]:
    """Return the results of `call` for all items, in their order; at most 64 calls run at a time."""
    wanted = list(items)
    results: dict[int, R] = {}
    left = iter(enumerate(wanted))

    async def work() -> None:
        for index, item in left:
            results[index] = await call(item)

    await gathered(*(work() for _ in range(min(_PARALLEL_GETS, len(wanted)))))
    return [results[index] for index in range(len(wanted))]


def _sorted_out(
    read: Iterable[WorkerError | Seal | Unreadable], notes: tuple[str, ...] = (), unopened: tuple[Unopened, ...] = ()
) -> Snapshot:
    found = list(read)
    return Snapshot(
        documents=tuple(item for item in found if isinstance(item, WorkerError)),
        seals=tuple(item for item in found if isinstance(item, Seal)),
        unreadable=tuple(item for item in found if isinstance(item, Unreadable)),
        notes=notes,
        unopened=unopened,
    )
