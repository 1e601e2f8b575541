"""Lists an attempt's folders in as few requests as the storage allows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from firstfault.layout.keys import ErrorKey
from firstfault.layout.paths import is_bundle, is_error_file, is_restart_record, is_stock_error_file, join_name
from firstfault.reading.key_table import KeyTable
from firstfault.store import ObjectInfo
from firstfault.sync import gathered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from firstfault.layout.paths import Layout
    from firstfault.store import Page, ReadableStore

__all__ = ["Listing", "begin", "list_everything"]

_STOCK = "error"
"""Flyte's own files sort behind this name, and before our folders."""
_BEFORE_NAMES = "!"
"""Sorts before every name that does not begin with a space. Some storages do not accept a trailing slash instead."""
_AFTER_KEYS = "e1-:"
"""Sorts behind every key of grammar 1, and before other names with the same beginning."""
_AT_ONCE = 16
"""Parts of a listing that are read at the same time."""


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

    def mark(self) -> tuple[object, ...]:
        """Return a value that changes when an object is added, removed or overwritten."""
        rest = [
            (item.name, item.size, item.last_modified_ns)
            for item in (*self.others, *self.stock, *self.roster, *self.restarts)
        ]
        return (len(self.table), sum(map(self.table.number, range(len(self.table)))), tuple(sorted(rest, key=repr)))

    def add(self, objects: Iterable[ObjectInfo], layout: Layout) -> None:
        """Add objects, whose names are relative to the layout's root."""
        for item in objects:
            folder, _, name = item.name.rpartition("/")
            if layout.errors is not None and folder == layout.errors:
                self._add_document(name, item)
            elif layout.roster is not None and folder == layout.roster:
                if is_error_file(name):
                    self.roster.append(_named(item, name))
                elif is_bundle(name):
                    self.bundles.append(_named(item, name))
                elif is_restart_record(name):
                    self.restarts.append(_named(item, name))
            elif layout.stock is not None and folder == layout.stock and is_stock_error_file(name):
                self.stock.append(_named(item, name))

    def _add_document(self, name: str, item: ObjectInfo) -> None:
        key = ErrorKey.parse(name)
        if key is not None:
            self.table.add(key, item)
        elif is_error_file(name):
            self.others.append(_named(item, name))
        else:
            self.foreign.append(name)


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
        async for page in store.pages(folder):
            listing.add((_named(item, f"{folder}/{item.name}") for item in page), layout)

    async def read_stock(folder: str) -> None:
        listing.add((_named(item, join_name(folder, item.name)) for item in await store.list(folder)), layout)

    reads = [read(folder) for folder in (layout.errors, layout.roster) if folder is not None]
    await gathered(*reads, *([read_stock(layout.stock)] if layout.stock is not None else []))
    return listing


def _end_of_keys(layout: Layout) -> str:
    return f"{layout.errors}/{_AFTER_KEYS}"


def _last(page: Page) -> str:
    return page.objects[-1].name if page.objects else ""


def _take(listing: Listing, page: Page, layout: Layout, end: str | None) -> str | None:
    """Add a page up to the name `end`; return the name behind which to continue, None if there is no need."""
    listing.add((item for item in page.objects if end is None or item.name <= end), layout)
    return _continues(page, layout, end)


def _continues(page: Page, layout: Layout, end: str | None) -> str | None:
    """Return the name behind which to continue after a page of names up to `end`, None if there is no need."""
    last = _last(page)
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
