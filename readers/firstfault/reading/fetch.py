"""One look at an attempt: what is listed, and which of it is opened.

Of a small attempt everything is. Of a large cascade, names say which documents are alike; of each fault several are
opened, then those of whoever was named. `earliest` needs no more than the first page and the first document. A name
that turns out to be wrong costs it all: then every document is opened.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from firstfault.errors import BadDocumentError, ObjectNotFoundError, StoreError
from firstfault.layout.keys import ErrorKey, RosterKey
from firstfault.layout.paths import join_name
from firstfault.model import DocumentRef, NodePresence, Phase, Place, Seal, Unopened, WorkerError
from firstfault.reading.assemble import Findings, Unreadable
from firstfault.reading.listing import Listing, begin, list_everything
from firstfault.store import join
from firstfault.strategies import Reads
from firstfault.sync import gathered
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, decode, decode_presence

if TYPE_CHECKING:
    from array import array
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from firstfault.layout.paths import Layout
    from firstfault.model import JobErrors
    from firstfault.reading.key_table import KeyTable
    from firstfault.store import ObjectInfo, Store

__all__ = ["Wish", "list_all", "look", "read_document", "read_listed", "read_roster"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

_PARALLEL_GETS = 64
_SMALL = 128
"""As many documents are all opened, and as many roster entries."""
_OF_EACH = 16
"""Documents that are opened of one fault, at first."""
_AT_FIRST = 1024
"""Documents that are opened at first, of all faults together."""
_MORE = 256
"""Documents that are opened in each step after that."""
_STEPS = 6
_NO_FAULT = "0" * 12
_AT_ONCE = 16
"""Files of Flyte's own that `earliest` opens beside the first document, at most; and documents of one moment."""
_OF_HISTORY = 32
"""Documents of earlier rounds that are opened of a large attempt."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a strategy wants to read."""

    reads: Reads
    named: Callable[[JobErrors], Iterable[int]] = lambda _: ()
    """After a first look: the ranks whose documents it wants as well."""


@dataclass
class _Opened:
    """What was read of the documents in a table, by row."""

    rows: dict[int, WorkerError | Seal | Unreadable] = field(default_factory=dict)

    def lies(self, table: KeyTable) -> bool:
        """Whether a document says something else than its name."""
        return any(
            isinstance(found, WorkerError) and not _agrees(table.key(row), found) for row, found in self.rows.items()
        )


async def look(
    store: Store,
    layout: Layout,
    wish_of: Callable[[Sequence[Seal]], Wish],
    judge: Callable[[Findings], JobErrors],
    known: Mapping[str, NodePresence] | None = None,
) -> Findings:
    """Return what the storage says about an attempt.

    Args:
        store: of the layout's root.
        layout: what lies where.
        wish_of: what is to be read, given the verdicts that pods have left.
        judge: makes a job of findings, as the caller will.
        known: roster entries that were read already, by name.

    Raises:
        StoreError: it could not be listed, or the only document that was asked for not be read.
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
    listing = await list_everything(store, layout, begun)
    return await read_listed(store, layout, listing, wish_of, judge, dict(known or {}))


async def list_all(store: Store, layout: Layout) -> Listing:
    """Return all that lies in an attempt's folders.

    Raises:
        StoreError: it could not be listed.
    """
    return await list_everything(store, layout, await begin(store, layout) if store.pages_in_order else None)


async def read_listed(  # noqa: PLR0913, PLR0917 - a look's parts
    store: Store,
    layout: Layout,
    listing: Listing,
    wish_of: Callable[[Sequence[Seal]], Wish],
    judge: Callable[[Findings], JobErrors],
    known: dict[str, NodePresence],
) -> Findings:
    """Return what an attempt's objects say, as far as it is wished; see `look`.

    Args:
        store: of the layout's root.
        layout: what lies where.
        listing: all that lies there.
        wish_of: what is to be read.
        judge: makes a job of findings.
        known: roster entries that were read already, by name; those that are read now are added.
    """
    return await _Look(store, layout, listing, known).read(wish_of, judge)


# --- the first failure alone ----------------------------------------------------------------------------------------


async def _first(store: Store, layout: Layout) -> tuple[Findings | None, Listing]:
    """Return the earliest failure of the last round, from the first page, and what was listed.

    None where that takes more than a look: of a small attempt, of one that left other files, and where the first
    document is not the whole answer, because its process was stopped, or the exception was still in flight, or it
    cannot be read.
    """
    early: dict[str, asyncio.Task[WorkerError | Seal | Unreadable]] = {}

    def start(item: ObjectInfo) -> None:
        path = join_name(layout.errors or "", item.name)
        early[path] = asyncio.create_task(read_document(store, path, item))

    async def read(place: tuple[str, ObjectInfo]) -> WorkerError | Seal | Unreadable:
        task = early.get(place[0])
        return await (task if task is not None else read_document(store, *place))

    try:
        listing = await begin(store, layout, start, _SMALL)
        newest = _newest(listing)
        rows = _first_rows(listing, newest) if listing.in_order else []
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
        if not isinstance(found, WorkerError) or not _agrees(table.key(row), found):
            return None, listing
        if found.in_flight or found.stopped_by_agent:
            return None, listing
    more = " at least" if listing.rest is not None else ""
    said = f"only the first page of names was looked at ({len(table)} documents{more}), and {len(rows)} were opened"
    current = table.rows_of_round(table.last_round(), newest or {})
    return _sorted_out(documents, notes=(said,), unopened=_unopened(table, current, opened)), listing


def _first_rows(listing: Listing, newest: Mapping[int | None, int] | None) -> list[int]:
    """Return the documents of the last round's first moment; none where more than they have to be looked at."""
    table = listing.table
    is_small = len(table) <= _SMALL
    if newest is None or is_small or listing.others or listing.foreign or len(listing.stock) > _AT_ONCE:
        return []
    # in the order of their names, and so of time
    rows = table.rows_of_round(table.last_round(), newest)
    first = [row for row in rows[: _AT_ONCE + 1] if table.moment(row) == table.moment(rows[0])]
    return first if len(first) <= _AT_ONCE else []


def _newest(listing: Listing) -> dict[int | None, int] | None:
    """Return the incarnation of each node of the documents' last round; None if the roster has a later one."""
    keys = [RosterKey.parse(item.name) for item in listing.roster]
    return _lives([key for key in keys if key is not None], listing.table.last_round())


def _lives(keys: Iterable[RosterKey], round_: int) -> dict[int | None, int] | None:
    newest: dict[int | None, int] = {}
    for key in keys:
        if key.round > round_:
            return None
        if key.round == round_:
            newest[key.group_rank] = max(newest.get(key.group_rank, 0), key.incarnation)
    return newest


# --- everything, or as much as tells it all -------------------------------------------------------------------------


class _Look:
    """Reads what was listed."""

    def __init__(self, store: Store, layout: Layout, listing: Listing, roster: dict[str, NodePresence]) -> None:
        self._store = store
        self._layout = layout
        self._listing = listing
        self._table = listing.table
        self._roster = roster
        self._bad_roster: list[Unreadable] = []
        self._opened = _Opened()
        self._rest: list[WorkerError | Seal | Unreadable] = []
        self._rows: list[int] = []
        """Of the round that is judged."""
        self._history: list[int] = []
        """Of earlier rounds and lives."""

    async def read(self, wish_of: Callable[[Sequence[Seal]], Wish], judge: Callable[[Findings], JobErrors]) -> Findings:
        """Return the findings."""
        is_small = len(self._table) <= _SMALL
        names = [(join_name(self._layout.errors or "", item.name), item) for item in self._listing.others]
        names += [(join_name(self._layout.stock or "", item.name), item) for item in self._listing.stock]
        await gathered(
            self._read_roster(), self._read_rest(names), self._open(range(len(self._table)) if is_small else ())
        )
        wish = wish_of([found for found in self._rest if isinstance(found, Seal)])
        if not is_small and (wish.reads is Reads.ALL or not await self._read_groups(wish, judge)):
            await self._open(range(len(self._table)))
        return self._findings()

    async def _read_rest(self, names: Iterable[tuple[str, ObjectInfo]]) -> None:
        self._rest = await _each(lambda path: read_document(self._store, *path), names)

    async def _read_roster(self) -> None:
        items = [item for item in self._listing.roster if item.name not in self._roster]
        if len(items) > _SMALL:
            items = _that_count(items)
        read, self._bad_roster = await read_roster(self._store, self._layout.roster or "", items)
        self._roster.update(read)

    async def _open(self, rows: Iterable[int]) -> None:
        new = [row for row in rows if row not in self._opened.rows]
        folder = self._layout.errors or ""

        async def read(row: int) -> WorkerError | Seal | Unreadable:
            item = self._table.item(row)
            return await read_document(self._store, join_name(folder, item.name), item)

        self._opened.rows.update(zip(new, await _each(read, new), strict=True))

    async def _read_groups(self, wish: Wish, judge: Callable[[Findings], JobErrors]) -> bool:
        """Open some documents of each fault, then those of whoever is named; return whether the names were right."""
        table = self._table
        keys = [key for key in map(RosterKey.parse, self._roster) if key is not None]
        round_ = max([table.last_round(), *(key.round for key in keys)])
        gone = {receipt.name for entry in self._roster.values() for receipt in entry.receipts if receipt.withdrawn}
        rows = table.rows_of_round(round_, _lives(keys, round_) or {})
        self._rows = [row for row in rows if not gone or str(table.key(row)) not in gone]
        groups = table.by_fault(self._rows)
        self._history = sorted(set(range(len(table))) - set(rows), key=table.moment)
        # a name without a fault says nothing about what is in the document
        wanted = [*groups.pop(_NO_FAULT, ()), *self._of_finished(keys)]
        wanted += _of_each(groups)
        await self._open(self._history[:_OF_HISTORY])
        for _ in range(_STEPS):
            wanted = [row for row in {*wanted, *table.of_processes(wanted, self._rows)} if row not in self._opened.rows]
            if not wanted:
                return True
            await self._open(sorted(wanted, key=table.moment))
            if self._opened.lies(table):
                return False
            named = _named(wish, judge(self._findings()))
            left = [row for row in self._rows if row not in self._opened.rows]
            wanted = [*[row for row in left if table.rank(row) in named][:_MORE], *self._unclear(groups)]
        return True

    def _of_finished(self, keys: Iterable[RosterKey]) -> list[int]:
        """The rows of nodes that succeeded after all: an exception that was still in flight was handled then."""
        finished = {key.group_rank for key in keys if key.phase is Phase.SUCCEEDED}
        return [row for row in self._rows if finished and self._table.group_rank(row) in finished][:_MORE]

    def _unclear(self, groups: Mapping[str, array[int]]) -> list[int]:
        """More rows of faults of which nothing could be read, or of which some were stopped and others were not."""
        found = []
        for rows in groups.values():
            read = [self._opened.rows[row] for row in rows if row in self._opened.rows]
            failures = [item for item in read if isinstance(item, WorkerError)]
            if read and len({bool(item.sent_signals) for item in failures}) != 1:
                found += [row for row in rows if row not in self._opened.rows][:_OF_EACH]
        return found

    def _findings(self) -> Findings:
        found = _sorted_out(
            [*self._opened.rows.values(), *self._rest],
            notes=tuple(f"roster entry not readable: {item.name}: {item.reason}" for item in self._bad_roster),
            unopened=_unopened(self._table, self._rows, self._opened.rows),
        )
        history = sum(row not in self._opened.rows for row in self._history)
        return Findings(
            documents=found.documents,
            seals=found.seals,
            roster=tuple(self._roster.values()),
            unreadable=found.unreadable,
            foreign=tuple(self._listing.foreign),
            notes=found.notes,
            unopened=found.unopened,
            unopened_history=history,
            listed=self._table,
        )


def _named(wish: Wish, job: JobErrors) -> set[int]:
    """Return the ranks that a strategy wants to read about; it may be anybody's, and must not cost the answer."""
    try:
        return set(wish.named(job))
    except Exception as error:  # noqa: BLE001 - as above
        logger.warning("a strategy could not say whose documents it wants (%s: %s)", type(error).__name__, error)
        return set()


def _of_each(groups: Mapping[str, array[int]]) -> list[int]:
    """Return the rows to open first: of each fault the earliest, the last, and some between them.

    Where there are more faults than may be opened, those come first that are rare, and those that are early.
    """
    share = max(1, min(_OF_EACH, _AT_FIRST // max(len(groups), 1)))
    chosen = list(groups.values())
    if len(chosen) > _AT_FIRST:
        rare = sorted(range(len(chosen)), key=lambda index: len(chosen[index]))[: _AT_FIRST // 2]
        chosen = [chosen[index] for index in sorted({*rare, *range(_AT_FIRST // 2)})]
    return [row for rows in chosen for row in _some(rows, share)]


def _some(rows: Sequence[int], count: int) -> list[int]:
    if len(rows) <= count:
        return list(rows)
    early = max(count // 2, 1)
    rest = count - early
    step = (len(rows) - 1 - early) / max(rest - 1, 1)
    return [*rows[:early], *sorted({rows[len(rows) - 1 - int(number * step)] for number in range(rest)})]


def _unopened(table: KeyTable, rows: Iterable[int], opened: Mapping[int, object]) -> tuple[Unopened, ...]:
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


def _agrees(key: ErrorKey, error: WorkerError) -> bool:
    """Whether a document says what its name says."""
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


# --- reading --------------------------------------------------------------------------------------------------------


async def read_document(store: Store, path: str, item: ObjectInfo | None) -> WorkerError | Seal | Unreadable:
    """Return what a document says, or why it cannot be read.

    Args:
        store: where.
        path: of the document, relative to the store's root.
        item: as it was listed; None: it is the only one, and that it cannot be read is an error.

    Raises:
        StoreError: the only document is not there, or could not be read.
        BadDocumentError: the only document is none.
    """
    name = path.rsplit("/", 1)[-1]
    if item is not None and item.size > MAX_DOCUMENT_BYTES:
        return _too_large(name, item.size)
    try:
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


def _too_large(name: str, size: int) -> Unreadable:
    return Unreadable(name, f"{size} bytes, more than the {MAX_DOCUMENT_BYTES} that a document may have")


async def read_roster(
    store: Store, folder: str, names: Sequence[ObjectInfo]
) -> tuple[dict[str, NodePresence], list[Unreadable]]:
    """Return entries by name; of one that cannot be read, what its name says, so that it still counts for its round."""

    async def read(item: ObjectInfo) -> NodePresence | Unreadable:
        if item.size > MAX_DOCUMENT_BYTES:
            return _too_large(item.name, item.size)
        try:
            return decode_presence(await store.get(join_name(folder, item.name)), item.name)
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


def _that_count(items: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Return the entries of the last round, of a node that has said how it ended that one alone; and foreign ones."""
    keys = {item.name: RosterKey.parse(item.name) for item in items}
    last = max((key.round for key in keys.values() if key is not None), default=0)
    ended = {_life(key) for key in keys.values() if key is not None and key.phase is not Phase.JOINED}
    return [
        item
        for item in items
        if (key := keys[item.name]) is None
        or (key.round == last and (key.phase is not Phase.JOINED or _life(key) not in ended))
    ]


def _life(key: RosterKey) -> tuple[int, int | None, int]:
    return (key.round, key.group_rank, key.incarnation)


async def _each(call: Callable[[T], Awaitable[R]], items: Iterable[T]) -> list[R]:
    """Return what `call` returns for each item, in their order; bounded in how many are on their way."""
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
) -> Findings:
    found = list(read)
    return Findings(
        documents=tuple(item for item in found if isinstance(item, WorkerError)),
        seals=tuple(item for item in found if isinstance(item, Seal)),
        unreadable=tuple(item for item in found if isinstance(item, Unreadable)),
        notes=notes,
        unopened=unopened,
    )
