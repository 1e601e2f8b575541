"""Opens files of an attempt: documents, roster entries, records of restarts, and copies of all of them."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from firstfault.errors import BadDocumentError, ObjectNotFoundError, StoreError
from firstfault.layout import Layout, RosterKey, bundle_name, bundle_path, is_of_nodes, join_name, roster_key_for
from firstfault.model import DocumentRef, NodePresence, Place, RestartKind, RestartRecord, Seal, Unopened, WorkerError
from firstfault.reading.assemble import Snapshot, Unreadable
from firstfault.reading.listing import Listing, list_everything
from firstfault.store import ObjectInfo, Page, ReadableStore, by_name, join
from firstfault.sync import gathered
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, decode, decode_presence, unpack
from firstfault.wire.json_schemas import MAX_RESTART_BYTES, restart_from_json

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

_PARALLEL_GETS = 64
_WORTH_A_BUNDLE = 8
"""Fewer documents and entries are read one by one."""
_MAX_BUNDLE_BYTES = 64 * 1024 * 1024
_MOST_BUNDLES = 4
"""Of more bundles, the largest are tried: all but one are damaged, or left by a pod that concluded early."""
_MOST_RESTARTS = 64
"""Of many records of restarts, so many are read: the last ones by name."""
MAX_OPENED = 65_536
"""Documents and roster entries that are opened of one attempt."""
MAX_OPENED_BYTES = 1024 * 1024 * 1024
"""Bytes of them together, as listed."""
_KEY = re.compile(rb"e1-[0-9a-z-]{60,160}\.pb")
"""Names of documents in the receipts of a roster entry."""
_CUT_DOCUMENTS, _CUT_ENTRIES = 900, 450
"""Names between two cuts of a listing; a page has 1,000."""


@dataclass
class Room:
    """What may still be opened of an attempt: a process that may write to it must not fill a reader's memory."""

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


# --- documents --------------------------------------------------------------------------------------------------------


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
        return _too_large(item)
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
    """Return the snapshot of one document.

    Raises:
        BadDocumentError: it is not valid.
    """
    return sorted_out([decode(data, DocumentRef(name, size=len(data)))])


def no_room(item: ObjectInfo) -> Unreadable:
    """Return why a document was not opened that `Room` does not admit."""
    return Unreadable(
        item.name, f"not opened: of an attempt {MAX_OPENED} documents and {MAX_OPENED_BYTES} bytes are read"
    )


def _too_large(item: ObjectInfo) -> Unreadable:
    return Unreadable(item.name, f"{item.size} bytes, more than the limit of {MAX_DOCUMENT_BYTES}")


# --- the roster -------------------------------------------------------------------------------------------------------


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
            return _too_large(item)
        if not admits(item):
            return no_room(item)
        path = join_name(folder, item.name)
        try:
            data = _copy(copies or {}, path, item)
            entry = decode_presence(await store.get(path) if data is None else data, item.name)
        except (StoreError, BadDocumentError) as error:
            return Unreadable(item.name, str(error))
        key = RosterKey.parse(item.name)
        # a wrong round would turn failures into those of an earlier round
        agrees = key is None or key == RosterKey.parse(roster_key_for(entry, key.uuid))
        return entry if agrees else Unreadable(item.name, "it contradicts its name")

    results = dict(zip((item.name for item in names), await each(read, names), strict=True))
    entries = {name: result for name, result in results.items() if isinstance(result, NodePresence)}
    bad = [result for result in results.values() if isinstance(result, Unreadable)]
    for item in bad:
        key = RosterKey.parse(item.name)
        if key is not None:
            place = Place(round=key.round, group_rank=key.group_rank, incarnation=key.incarnation)
            entries[item.name] = NodePresence(key.phase, place)
    return entries, bad


# --- records of restarts ----------------------------------------------------------------------------------------------


async def read_restarts(store: ReadableStore, folder: str, names: Sequence[ObjectInfo]) -> tuple[RestartRecord, ...]:
    """Return the records that can be read, one for each restart, oldest first.

    Args:
        store: the store of the layout's root.
        folder: of the roster.
        names: of the records, as listed.
    """

    async def read(item: ObjectInfo) -> RestartRecord | None:
        path = join_name(folder, item.name)
        try:
            record = restart_from_json(await store.get(path, limit=MAX_RESTART_BYTES))
        except StoreError as error:
            logger.warning("the record of a restart cannot be read: %s", error)
            return None
        if record is None:
            logger.warning(
                "%s is not a record of a restart, or of a version that this one does not know", join(store.uri, path)
            )
        return record

    last = sorted(names, key=lambda item: item.name)[-_MOST_RESTARTS:]
    found = await gathered(*(read(item) for item in last))
    return oldest_first(record for record in found if record is not None)


def oldest_first(records: Iterable[RestartRecord]) -> tuple[RestartRecord, ...]:
    """Return one record of each restart: if several nodes wrote one, that of the agents' common decision."""

    def rank(record: RestartRecord) -> tuple[bool, bool]:
        return record.is_agreed, record.lost_seconds is not None

    best: dict[tuple[RestartKind, int], RestartRecord] = {}
    for record in records:
        key = (record.kind, record.number)
        if key not in best or rank(record) > rank(best[key]):
            best[key] = record
    return tuple(sorted(best.values(), key=lambda item: (item.timestamp_ns or 0, item.kind.value, item.number)))


# --- copies -----------------------------------------------------------------------------------------------------------


async def copies_of(store: ReadableStore, layout: Layout, listing: Listing) -> dict[str, bytes]:
    """Return the documents and roster entries of the attempt's largest bundle of copies, by their name in it.

    A bundle that is damaged or was changed is left out: its name is a hash of its content.
    """
    if len(listing.table) + len(listing.roster) < _WORTH_A_BUNDLE:
        return {}
    return await _unpacked(store, layout, [item for item in listing.bundles if not is_of_nodes(item.name)])


async def with_other_nodes(store: ReadableStore, layout: Layout, listing: Listing) -> tuple[ReadableStore, Listing]:
    """Return the store and the listing with what the other nodes wrote, if they handed it over: they share no folder.

    An attempt in a common folder has no such bundle, and needs no further request.
    """
    found = await _unpacked(store, layout, listing.of_nodes)
    if not found:
        return store, listing
    base = (layout.roster or "").removesuffix("roster")
    with_copies = StoreWithCopies(store, {f"{base}{path}": data for path, data in found.items()}, store.uri)
    return with_copies, await list_everything(with_copies, layout)


async def _unpacked(store: ReadableStore, layout: Layout, bundles: Sequence[ObjectInfo]) -> dict[str, bytes]:
    """Return the content of the largest bundle that is whole."""
    for item in sorted(bundles, key=lambda item: -item.size)[:_MOST_BUNDLES]:
        path = join_name(layout.roster or "", item.name)
        try:
            data = await store.get(path, limit=_MAX_BUNDLE_BYTES)
            if item.name == bundle_name(data, of_nodes=is_of_nodes(item.name)):
                return unpack(data)
            logger.warning("%s is damaged, and every document is read by itself", join(store.uri, path))
        except (StoreError, BadDocumentError) as error:
            logger.warning("%s cannot be read, and every document is read by itself: %s", join(store.uri, path), error)
    return {}


def cuts(copies: Mapping[str, bytes], layout: Layout) -> list[str]:
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


class StoreWithCopies:
    """Lists what a store has and the copies that it lacks; reads copies first.

    Args:
        store: opened and closed by the caller; None: the copies are all there is.
        copies: by path, relative to the store's root.
        uri: of the store's root.
    """

    def __init__(self, store: ReadableStore | None, copies: Mapping[str, bytes], uri: str) -> None:
        self._store = store
        self._copies = copies
        self._uri = uri
        self.read: dict[str, bytes] = {}
        """What was read, by path."""

    @property
    def uri(self) -> str:
        """The folder, without a trailing slash."""
        return self._uri

    @property
    def pages_in_order(self) -> bool:
        """Whether `page` returns the first objects by name in one request."""
        return self._store is None or self._store.pages_in_order

    async def list(self, folder: str = "") -> list[ObjectInfo]:
        """Return the objects directly in `folder`, by name."""
        listed = await self._store.list(folder) if self._store is not None else []
        both = {item.name: item for item in (*self._below(folder), *listed) if "/" not in item.name}
        return by_name(both.values())

    async def page(self, folder: str = "", *, after: str = "") -> Page:
        """Return at most 1,000 objects of the store whose names sort after `after`, and the copies between them."""
        found = await self._store.page(folder, after=after) if self._store is not None else Page((), more=False)
        if not found.in_order:
            return found
        last = found.objects[-1].name if found.more and found.objects else None
        listed = {item.name for item in found.objects}
        lacking = [
            item
            for item in self._below(folder)
            if item.name > after and (last is None or item.name < last) and item.name not in listed
        ]
        return Page(tuple(by_name([*found.objects, *lacking])), found.more) if lacking else found

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return an object's bytes; its copy's, if there is one.

        Raises:
            ObjectNotFoundError: the object does not exist.
        """
        data = self._copies.get(path)
        if data is None:
            if self._store is None:
                raise ObjectNotFoundError(f"there is no copy of {join(self._uri, path)}")
            data = await self._store.get(path, limit=limit)
        self.read[path] = data
        return data

    def _below(self, folder: str) -> Sequence[ObjectInfo]:
        beginning = f"{folder}/" if folder else ""
        return [
            ObjectInfo(path.removeprefix(beginning), len(data))
            for path, data in self._copies.items()
            if path.startswith(beginning)
        ]


# --- many at once -----------------------------------------------------------------------------------------------------


async def each(call: Callable[[T], Awaitable[R]], items: Iterable[T], at_once: int = _PARALLEL_GETS) -> list[R]:
    """Return the results of `call` for all items, in their order; at most `at_once` calls run at a time."""
    wanted = list(items)
    results: dict[int, R] = {}
    left = iter(enumerate(wanted))

    async def work() -> None:
        for index, item in left:
            results[index] = await call(item)

    await gathered(*(work() for _ in range(min(at_once, len(wanted)))))
    return [results[index] for index in range(len(wanted))]


def sorted_out(
    read: Iterable[WorkerError | Seal | Unreadable], notes: tuple[str, ...] = (), unopened: tuple[Unopened, ...] = ()
) -> Snapshot:
    """Return what was read, by kind."""
    found = list(read)
    return Snapshot(
        documents=tuple(item for item in found if isinstance(item, WorkerError)),
        seals=tuple(item for item in found if isinstance(item, Seal)),
        unreadable=tuple(item for item in found if isinstance(item, Unreadable)),
        notes=notes,
        unopened=unopened,
    )
