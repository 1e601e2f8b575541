"""List an attempt's folders in as few requests as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from firstfault.layout import (
    ErrorKey,
    Layout,
    is_bundle,
    is_error_file,
    is_nodes_bundle,
    is_restart_record,
    is_stock_error_file,
    join_name,
)
from firstfault.store import ObjectInfo, Page, ReadableStore
from firstfault.utils.run_sync import gather_all, map_concurrently

_BEFORE_FLYTE_FILES = "error"
"""Sorts before Flyte's own error files, which sort before our folders."""
_FLYTE_FILE_PREFIX = "error"
"""Begins the names of Flyte's own error files."""
_BEFORE_NAMES = "!"
"""Sorts before all names in a folder. Some storages don't accept a trailing slash instead."""
_AFTER_KEYS = "e1-:"
"""Sorts after every key of grammar version 1: ":" is the character after "9"."""
_MAX_CONCURRENT_PARTS = 32
"""Maximum number of listing parts that are read concurrently."""
_AFTER_ANY_TIME_NS = 1 << 64


class ProcessKey(NamedTuple):
    """The parts of a document's name that identify its process."""

    rank: int | None
    group_rank: int | None
    incarnation: int


@dataclass(slots=True, eq=False)
class ListedDocument:
    """A listed error document with its fields parsed from the name;
    about 400 bytes. Compared by identity.
    """

    key: ErrorKey
    size: int
    last_modified_ns: int | None
    """None if the document may exist only as a copy in a node's bundle."""

    @property
    def sort_time_ns(self) -> int:
        """The sort key by time, in nanoseconds; documents without a time come last."""
        return _AFTER_ANY_TIME_NS if self.key.timestamp_ns is None else self.key.timestamp_ns

    @property
    def process_key(self) -> ProcessKey:
        """The process that the document is about:
        the same for documents of a worker and of its agent.
        """
        return ProcessKey(self.key.rank, self.key.group_rank, self.key.incarnation)


@dataclass
class Listing:
    """The files of one attempt. Object names are paths relative to the layout's root."""

    layout: Layout
    documents: list[ListedDocument] = field(default_factory=list)
    """Error documents with names of the grammar."""
    unknown_documents: list[ObjectInfo] = field(default_factory=list)
    """Documents with unknown names, which must all be opened."""
    foreign_files: list[str] = field(default_factory=list)
    """Names of files that aren't documents."""
    flyte_error_files: list[ObjectInfo] = field(default_factory=list)
    """Flyte's own error files."""
    roster: list[ObjectInfo] = field(default_factory=list)
    bundles: list[ObjectInfo] = field(default_factory=list)
    """Bundles with copies of documents and roster entries."""
    restarts: list[ObjectInfo] = field(default_factory=list)
    """Records of restarts within the attempt."""
    is_sorted: bool = True
    """Whether all pages so far were sorted by name."""
    resume_name_in_keys: str | None = None
    """The name after which to continue listing, up to the last key, or None if all keys are listed.
    """
    resume_name_behind_keys: str | None = None
    """The name after which to continue listing files behind the keys, or None if all are listed."""

    @property
    def all_nodes_bundles(self) -> list[ObjectInfo]:
        """Bundles with the files of all nodes, if each node has a separate folder."""
        return [item for item in self.bundles if is_nodes_bundle(item.base)]

    def get_state(self) -> tuple[object, ...]:
        """Return a value that changes when an object is added, removed or overwritten."""
        # documents are immutable and may be many, so the sum of their uuids is enough
        rest = frozenset(
            (
                *self.unknown_documents,
                *self.flyte_error_files,
                *self.roster,
                *self.all_nodes_bundles,
                *self.restarts,
            )
        )
        return (
            len(self.documents),
            sum(int(document.key.uuid, 16) for document in self.documents),
            rest,
        )

    def get_object(self, document: ListedDocument) -> ObjectInfo:
        """Return the listed object of a document."""
        return ObjectInfo(
            f"{self.layout.errors}/{document.key}", document.size, document.last_modified_ns
        )

    def find_last_round(self) -> int:
        """Return the highest round in the names of documents; -1 if there are none."""
        return max((document.key.round for document in self.documents), default=-1)

    def add(self, objects: Iterable[ObjectInfo]) -> None:
        """Add objects, sorted by kind."""
        for item in objects:
            folder, _, name = item.name.rpartition("/")
            if folder == self.layout.errors:
                key = ErrorKey.parse(name)
                if key is not None:
                    self.documents.append(ListedDocument(key, item.size, item.last_modified_ns))
                elif is_error_file(name):
                    self.unknown_documents.append(item)
                else:
                    self.foreign_files.append(name)
            elif folder == self.layout.roster:
                if is_error_file(name):
                    self.roster.append(item)
                elif is_bundle(name):
                    self.bundles.append(item)
                elif is_restart_record(name):
                    self.restarts.append(item)
            elif self.layout.has_stock and not folder and is_stock_error_file(name):
                self.flyte_error_files.append(item)


async def begin_listing(
    store: ReadableStore,
    layout: Layout,
    on_first_document: Callable[[ObjectInfo], None] = lambda _: None,
    max_objects_without_early_read: int = 0,
) -> Listing:
    """List two pages concurrently: the first documents, and the first names after the keys.

    The first page has the earliest failures of the last round, the second page its roster. If
    `Listing.is_sorted` is False, the storage doesn't sort by name, and the listing must be started
    over by folder.

    Args:
        store: the store of the layout's root.
        layout: the attempt's folders.
        on_first_document: called with the first document by name as soon as it is listed, to start
            reading early.
        max_objects_without_early_read: `on_first_document` isn't called if the page has at most
            this number of objects.
    """
    listing = Listing(layout)
    end = _get_keys_end(layout)

    async def list_first_documents() -> None:
        page = await store.page(
            _BEFORE_FLYTE_FILES if layout.has_stock else f"{layout.errors}/{_BEFORE_NAMES}"
        )
        item = next(
            (item for item in page.objects if item.name.startswith(f"{layout.errors}/")), None
        )
        if item is not None and len(page.objects) > max_objects_without_early_read:
            on_first_document(item)
        listing.resume_name_in_keys = _add_page(listing, page, end)

    async def list_names_behind_keys() -> None:
        listing.resume_name_behind_keys = _add_page(listing, await store.page(end), None)

    await gather_all(list_first_documents(), list_names_behind_keys())
    return listing


async def list_everything(
    store: ReadableStore,
    layout: Layout,
    begun: Listing | None = None,
    part_starts: Sequence[str] = (),
) -> Listing:
    """Return the complete listing of an attempt's folders;
    continues a listing from `begin_listing`.

    Args:
        store: the store of the layout's root.
        layout: the attempt's folders.
        begun: the listing to continue.
        part_starts: sorted paths below the root that split the remaining listing into parts, which
            are read concurrently. The paths need not exist.
    """
    # without sorted pages, positions between pages mean nothing: then start over and list folder by
    # folder
    if begun is not None and begun.is_sorted:
        end = _get_keys_end(layout)
        parts = [
            *_split_range(begun.resume_name_in_keys, part_starts, end),
            *_split_range(begun.resume_name_behind_keys, part_starts, None),
        ]

        async def read_part(part: tuple[str, str | None]) -> None:
            start: str | None
            start, end = part
            while start is not None and begun.is_sorted:
                start = _add_page(begun, await store.page(start), end)

        await map_concurrently(read_part, parts, _MAX_CONCURRENT_PARTS)
        if begun.is_sorted:
            return begun
    listing = Listing(layout)

    async def read(folder: str) -> None:
        items = await store.list(folder)
        listing.add(
            ObjectInfo(join_name(folder, item.name), item.size, item.last_modified_ns)
            for item in items
        )

    await gather_all(
        *map(read, (layout.errors, layout.roster, *([""] if layout.has_stock else [])))
    )
    return listing


def _get_keys_end(layout: Layout) -> str:
    return f"{layout.errors}/{_AFTER_KEYS}"


def _add_page(listing: Listing, page: Page, end: str | None) -> str | None:
    """Add a page up to the name `end`; return the name after which to continue,
    None if the listing is complete.
    """
    listing.is_sorted &= page.is_sorted
    listing.add(item for item in page.objects if end is None or item.name <= end)
    last = page.objects[-1].name if page.objects else ""
    if not page.has_more or (end is not None and last >= end):
        return None
    errors, roster = listing.layout.errors, listing.layout.roster
    if end is None:
        # "0" is the character after "/", so this is the end of the roster folder; files after it
        # aren't ours
        return max(last, f"{roster}/{_BEFORE_NAMES}") if last < f"{roster}0" else None
    # after Flyte's own files, jump to the documents: folders in between may be large
    return last if last.startswith(_FLYTE_FILE_PREFIX) else max(last, f"{errors}/{_BEFORE_NAMES}")


def _split_range(
    start: str | None, part_starts: Iterable[str], end: str | None
) -> list[tuple[str, str | None]]:
    """Split a listing into parts: for each, the name before its first name, and its last name.

    Args:
        start: the name after which to continue, or None if the listing is complete.
        part_starts: sorted names at which to split.
        end: the last name, or None for no limit.
    """
    if start is None:
        return []
    between = [name for name in part_starts if name > start and (end is None or name < end)]
    return list(zip([start, *between], [*between, end], strict=True))
