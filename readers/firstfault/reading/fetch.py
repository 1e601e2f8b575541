"""Read the files of an attempt: documents, roster entries, restart records,
and bundles with copies of all of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from firstfault.errors import BadDocumentError, ObjectNotFoundError, StoreError
from firstfault.layout import (
    Layout,
    RosterKey,
    bundle_name,
    is_nodes_bundle,
    join_name,
    roster_key_for,
)
from firstfault.model import (
    DocumentRef,
    NodePresence,
    Place,
    RestartKind,
    RestartRecord,
    Seal,
    Unopened,
    WorkerError,
)
from firstfault.reading.assemble import Snapshot, Unreadable
from firstfault.reading.listing import Listing, list_everything
from firstfault.store import ObjectInfo, Page, ReadableStore, join, sort_by_name
from firstfault.utils.loggers import get_logger
from firstfault.utils.run_sync import map_concurrently
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, decode, decode_presence, unpack
from firstfault.wire.json_schemas import MAX_RESTART_BYTES, restart_from_json

logger = get_logger(__name__)

_MIN_BUNDLED_FILES = 8
"""Minimum number of documents and entries to read from a bundle; fewer are read one by one."""
_MAX_BUNDLE_BYTES = 64 * 1024 * 1024
_MAX_BUNDLES = 4
"""Maximum number of bundles to try, largest first: smaller ones are from pods that concluded early.
"""
_MAX_RESTARTS = 64
"""Maximum number of restart records to read of each kind: the last ones by name."""
MAX_OPENED_FILES = 65_536
"""Maximum number of documents and roster entries to open in one attempt."""
MAX_OPENED_BYTES = 1024 * 1024 * 1024
"""Maximum total size of these files, as listed."""
_KEY = re.compile(rb"e1-[0-9a-z-]{60,160}\.pb")
"""Names of documents in the receipts of an encoded roster entry."""
_DOCUMENTS_PER_PART, _ENTRIES_PER_PART = 900, 450
"""Number of names between two parts of a listing; a page has 1,000 names."""


@dataclass
class Room:
    """The remaining read budget: no process with write access to the attempt can
    exhaust a reader's memory.
    """

    documents: int = field(default_factory=lambda: MAX_OPENED_FILES)
    size: int = field(default_factory=lambda: MAX_OPENED_BYTES)

    def admits(self, item: ObjectInfo) -> bool:
        """Whether the budget allows to open a document; if so, charge it."""
        if not self.documents or item.size > self.size:
            return False
        self.documents -= 1
        self.size -= item.size
        return True


# --- documents and roster entries -----------------------------------------------------------------


async def read_document(store: ReadableStore, path: str) -> WorkerError | Seal:
    """Return the decoded document at a path.

    Raises:
        StoreError: it is missing, or could not be read.
        BadDocumentError: it isn't valid.
    """
    data = await store.get(path, limit=MAX_DOCUMENT_BYTES)
    return decode(data, DocumentRef(path.rpartition("/")[2], join(store.uri, path), size=len(data)))


async def read_listed(
    store: ReadableStore, item: ObjectInfo, room: Room | None = None
) -> WorkerError | Seal | Unreadable:
    """Return a listed document, or the reason that it can't be read; charge `room`."""
    data = await _open_object(store, item, room)
    if isinstance(data, Unreadable):
        return data
    try:
        return decode(
            data,
            DocumentRef(item.base, join(store.uri, item.name), item.last_modified_ns, len(data)),
        )
    except BadDocumentError as error:
        return Unreadable(item.base, str(error))


async def read_roster(
    store: ReadableStore, items: Sequence[ObjectInfo], room: Room | None = None
) -> tuple[dict[str, NodePresence], list[Unreadable]]:
    """Return the listed entries by name, and the unreadable ones,
    which get an entry made from the file name.
    """

    async def read(item: ObjectInfo) -> NodePresence | Unreadable:
        data = await _open_object(store, item, room)
        if isinstance(data, Unreadable):
            return data
        try:
            entry = decode_presence(data, item.base)
        except BadDocumentError as error:
            return Unreadable(item.base, str(error))
        key = RosterKey.parse(item.base)
        # an entry with a wrong, later round would turn all current failures into history
        agrees = key is None or key == RosterKey.parse(roster_key_for(entry, key.uuid))
        return entry if agrees else Unreadable(item.base, "it contradicts its name")

    results = dict(
        zip((item.base for item in items), await map_concurrently(read, items), strict=True)
    )
    entries = {name: result for name, result in results.items() if isinstance(result, NodePresence)}
    bad = [result for result in results.values() if isinstance(result, Unreadable)]
    for item in bad:
        key = RosterKey.parse(item.name)
        # the name is enough to know that the node reached this phase
        if key is not None:
            place = Place(round=key.round, group_rank=key.group_rank, incarnation=key.incarnation)
            entries[item.name] = NodePresence(key.phase, place)
    return entries, bad


async def _open_object(
    store: ReadableStore, item: ObjectInfo, room: Room | None
) -> bytes | Unreadable:
    """Return the bytes of a listed object, or the reason that it wasn't read."""
    if item.size > MAX_DOCUMENT_BYTES:
        return Unreadable(
            item.base, f"{item.size} bytes, more than the limit of {MAX_DOCUMENT_BYTES}"
        )
    if room is not None and not room.admits(item):
        limits = f"{MAX_OPENED_FILES} documents and {MAX_OPENED_BYTES} bytes"
        return Unreadable(item.base, f"not opened: of an attempt {limits} are read")
    try:
        return await store.get(item.name)
    except ObjectNotFoundError:
        return Unreadable(item.base, "gone between listing and reading")
    except StoreError as error:
        return Unreadable(item.base, str(error))


def build_snapshot(
    read: Iterable[WorkerError | Seal | Unreadable],
    notes: tuple[str, ...] = (),
    unopened: tuple[Unopened, ...] = (),
) -> Snapshot:
    """Sort documents, seals and unreadable files into a snapshot."""
    items = list(read)
    return Snapshot(
        documents=tuple(item for item in items if isinstance(item, WorkerError)),
        seals=tuple(item for item in items if isinstance(item, Seal)),
        unreadable=tuple(item for item in items if isinstance(item, Unreadable)),
        notes=notes,
        unopened=unopened,
    )


# --- records of restarts --------------------------------------------------------------------------


async def read_restarts(
    store: ReadableStore, items: Sequence[ObjectInfo]
) -> tuple[RestartRecord, ...]:
    """Return the readable restart records, one for each restart, oldest first."""

    async def read(item: ObjectInfo) -> RestartRecord | None:
        try:
            record = restart_from_json(await store.get(item.name, limit=MAX_RESTART_BYTES))
        except StoreError as error:
            logger.warning("the record of a restart cannot be read: %s", error)
            return None
        if record is None:
            uri = join(store.uri, item.name)
            logger.warning(
                "%s is not a record of a restart, or of a version that this one does not know", uri
            )
        return record

    # per kind: many stalls must not displace the few records of rounds
    kinds: dict[str, list[ObjectInfo]] = defaultdict(list)
    for item in sorted(items, key=lambda item: item.name):
        kinds[item.base[: -len("-00000-0000000.json")]].append(item)
    records = await map_concurrently(
        read, [item for kind in kinds.values() for item in kind[-_MAX_RESTARTS:]]
    )
    return select_restarts(record for record in records if record is not None)


def select_restarts(records: Iterable[RestartRecord]) -> tuple[RestartRecord, ...]:
    """Return one record of each restart, oldest first; of several nodes' records,
    the agents' common decision wins.
    """

    def rank(record: RestartRecord) -> tuple[bool, bool]:
        return record.is_agreed, record.lost_seconds is not None

    best: dict[tuple[RestartKind, int], RestartRecord] = {}
    for record in records:
        key = (record.kind, record.number)
        if key not in best or rank(record) > rank(best[key]):
            best[key] = record
    return tuple(
        sorted(
            best.values(), key=lambda item: (item.timestamp_ns or 0, item.kind.value, item.number)
        )
    )


# --- copies ---------------------------------------------------------------------------------------


async def read_node_copies(store: ReadableStore, listing: Listing) -> dict[str, bytes]:
    """Return the documents and roster entries in the attempt's largest bundle of copies, by path.

    A damaged or changed bundle is ignored: its name is a hash of its content.
    """
    if len(listing.documents) + len(listing.roster) < _MIN_BUNDLED_FILES:
        return {}
    return await _unpack_bundle(
        store, listing, [item for item in listing.bundles if not is_nodes_bundle(item.base)]
    )


async def add_copies(
    store: ReadableStore, listing: Listing, copies: Mapping[str, bytes] | None = None
) -> tuple[ReadableStore, Listing]:
    """Return a store that reads copies first, and the listing,
    extended by files that exist only as copies.

    Nodes without a shared folder pass their files to a peer, which writes them as a bundle: only
    such bundles extend the listing. Copies of files in a shared folder only save requests. `copies`
    are from `read_node_copies`, or None if they haven't been read yet.
    """
    if copies is None:
        copies = await read_node_copies(store, listing)
    peer_files = await _unpack_bundle(store, listing, listing.all_nodes_bundles)
    if peer_files:
        store = StoreWithCopies(store, peer_files, store.uri)
        listing = await list_everything(store, listing.layout)
    listed = [*listing.roster, *map(listing.get_object, listing.documents)] if copies else []
    # use a copy only if its size is still the object's: the object may have been overwritten since
    usable = [
        item for item in listed if item.name in copies and len(copies[item.name]) == item.size
    ]
    same = {item.name: copies[item.name] for item in usable}
    return (StoreWithCopies(store, same, store.uri) if same else store), listing


async def _unpack_bundle(
    store: ReadableStore, listing: Listing, bundles: Sequence[ObjectInfo]
) -> dict[str, bytes]:
    """Return the files in the largest undamaged bundle, by path."""
    base = listing.layout.roster.removesuffix("roster")
    # the pod that concluded last knew of the most files, so its bundle is the largest
    for item in sorted(bundles, key=lambda item: -item.size)[:_MAX_BUNDLES]:
        uri = join(store.uri, item.name)
        try:
            data = await store.get(item.name, limit=_MAX_BUNDLE_BYTES)
            if item.base == bundle_name(data, of_separate_nodes=is_nodes_bundle(item.base)):
                return {f"{base}{path}": content for path, content in unpack(data).items()}
            logger.warning("%s is damaged; reading every document instead", uri)
        except (StoreError, BadDocumentError) as error:
            logger.warning("%s can't be read; reading every document instead: %s", uri, error)
    return {}


def find_part_starts(copies: Mapping[str, bytes], layout: Layout) -> list[str]:
    """Return paths that split a listing into parts of about one page,
    from the names in the copies.
    """
    entries = {path for path in copies if path.startswith(f"{layout.roster}/")}
    documents = copies.keys() - entries
    for data in copies.values():
        documents.update(f"{layout.errors}/{name.decode()}" for name in _KEY.findall(data))
    # half the distance for roster entries: each node has two, but perhaps only one of them is in
    # the copies
    return [*sorted(documents)[::_DOCUMENTS_PER_PART], *sorted(entries)[::_ENTRIES_PER_PART]]


class StoreWithCopies:
    """A store with additional copies: lists both, and reads copies first.

    The caller opens and closes `store`, which is None if only the copies exist. The keys of
    the copies are paths relative to the root.
    """

    def __init__(self, store: ReadableStore | None, copies: Mapping[str, bytes], uri: str) -> None:
        self._store = store
        self._copies = copies
        self._uri = uri
        self.read: dict[str, bytes] = {}
        """All content that was read, by path."""

    @property
    def uri(self) -> str:
        """The folder, without a trailing slash."""
        return self._uri

    @property
    def has_ordered_pages(self) -> bool:
        """Whether `page` returns the first objects by name in one request."""
        return self._store is None or self._store.has_ordered_pages

    async def list(self, folder: str = "") -> list[ObjectInfo]:
        """Return the objects directly in `folder`, by name."""
        listed = await self._store.list(folder) if self._store is not None else []
        copies = {
            name: ObjectInfo(name, len(data))
            for path, data in self._copies.items()
            if (name := path.rpartition("/")[2]) and path == join_name(folder, name)
        }
        return sort_by_name({**copies, **{item.name: item for item in listed}}.values())

    async def page(self, after: str = "") -> Page:
        """Return up to 1,000 objects of the store that sort after `after`,
        and the copies that sort among them.
        """
        page = (
            await self._store.page(after) if self._store is not None else Page((), has_more=False)
        )
        if not page.is_sorted:
            return page
        # copies behind the page's last name belong to a later page
        last = page.objects[-1].name if page.has_more and page.objects else None
        listed = {item.name for item in page.objects}
        lacking = [
            ObjectInfo(path, len(data))
            for path, data in self._copies.items()
            if path > after and (last is None or path < last) and path not in listed
        ]
        return (
            Page(tuple(sort_by_name([*page.objects, *lacking])), page.has_more) if lacking else page
        )

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return an object's bytes, from its copy if one exists.

        Raises:
            ObjectNotFoundError: the object doesn't exist.
        """
        data = self._copies.get(path)
        if data is None:
            if self._store is None:
                raise ObjectNotFoundError(f"there is no copy of {join(self._uri, path)}")
            data = await self._store.get(path, limit=limit)
        self.read[path] = data
        return data
