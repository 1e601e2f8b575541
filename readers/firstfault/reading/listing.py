"""What lies in an attempt's folders, listed in as few requests as its storage allows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from firstfault.layout.keys import ErrorKey
from firstfault.layout.paths import is_error_file, is_stock_error_file, join_name
from firstfault.reading.key_table import KeyTable
from firstfault.store import ObjectInfo
from firstfault.sync import gathered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from firstfault.layout.paths import Layout
    from firstfault.store import Page, Store

__all__ = ["Listing", "begin", "list_everything"]

_STOCK = "error"
"""Every file of Flyte's own sorts behind this, and before our folders."""
_BEFORE_NAMES = "!"
"""Sorts before every name but those that begin with a space; a bare slash at the end is not understood everywhere."""
_AFTER_KEYS = "e1-:"
"""Sorts behind every key of grammar 1, and before whatever else begins as one."""


@dataclass
class Listing:
    """What was listed of one attempt."""

    table: KeyTable = field(default_factory=KeyTable)
    """The error documents whose names are keys."""
    others: list[ObjectInfo] = field(default_factory=list)
    """Documents with other names: they say nothing, so each has to be opened."""
    foreign: list[str] = field(default_factory=list)
    """Names of files that are no documents."""
    stock: list[ObjectInfo] = field(default_factory=list)
    """Flyte's own error files."""
    roster: list[ObjectInfo] = field(default_factory=list)
    in_order: bool = True
    """Whether the storage has sent names in order, as far as was seen."""
    rest: str | None = None
    """Behind which name there is more to list of what comes before the end of the keys; None: there is nothing."""
    rest_behind: str | None = None
    """The same of what comes after them."""

    def mark(self) -> tuple[object, ...]:
        """Return something that is another one as soon as something has been added, removed or written anew."""
        rest = [(item.name, item.size, item.last_modified_ns) for item in (*self.others, *self.stock, *self.roster)]
        return (len(self.table), sum(map(self.table.number, range(len(self.table)))), tuple(sorted(rest, key=repr)))

    def add(self, objects: Iterable[ObjectInfo], layout: Layout) -> None:
        """Sort objects with names relative to the layout's root into their places."""
        for item in objects:
            folder, _, name = item.name.rpartition("/")
            if layout.errors is not None and folder == layout.errors:
                self._add_document(_named(item, name))
            elif layout.roster is not None and folder == layout.roster:
                if is_error_file(name):
                    self.roster.append(_named(item, name))
            elif layout.stock is not None and folder == layout.stock and is_stock_error_file(name):
                self.stock.append(_named(item, name))

    def _add_document(self, item: ObjectInfo) -> None:
        key = ErrorKey.parse(item.name)
        if key is not None:
            self.table.add(key, item)
        elif is_error_file(item.name):
            self.others.append(item)
        else:
            self.foreign.append(item.name)


def _named(item: ObjectInfo, name: str) -> ObjectInfo:
    return ObjectInfo(name, item.size, item.last_modified_ns)


async def begin(
    store: Store, layout: Layout, eager: Callable[[ObjectInfo], None] = lambda _: None, small: int = 0
) -> Listing:
    """List the first page of what comes before the end of the keys, and of what comes after: two requests at once.

    The last round's earliest failures are in the one, and its roster is in the other. If the storage has not sent them
    in order, `Listing.in_order` says so, and nothing else in it is to be used.

    Args:
        store: of the layout's root.
        layout: what lies where.
        eager: called with the first document by name, as soon as it is known.
        small: not if there are no more objects than so many.
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

    async def what_follows() -> None:
        page = await store.page(after=end)
        listing.in_order &= page.in_order
        listing.rest_behind = _take(listing, page, layout, None)

    await gathered(documents(), what_follows())
    return listing


async def list_everything(store: Store, layout: Layout, begun: Listing | None = None) -> Listing:
    """Return all that lies in the attempt's folders, on from where `begin` stopped."""
    if begun is not None and begun.in_order:
        await gathered(_before(store, layout, begun), _behind(store, layout, begun))
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
    """Sort a page in, as far as the name `end`; return behind which name to go on, None if there is no need."""
    listing.add((item for item in page.objects if end is None or item.name <= end), layout)
    last = _last(page)
    if not page.more or (end is not None and last > end):
        return None
    if end is None:
        # whatever lies behind the roster is none of ours
        return max(last, f"{layout.roster}/{_BEFORE_NAMES}") if last < f"{layout.roster}0" else None
    # other folders beside the outputs may be large: from the end of Flyte's own files straight to the documents
    return last if last.startswith(_STOCK) else max(last, f"{layout.errors}/{_BEFORE_NAMES}")


async def _before(store: Store, layout: Layout, listing: Listing) -> None:
    while listing.rest is not None and listing.in_order:
        page = await store.page(after=listing.rest)
        listing.in_order = page.in_order
        listing.rest = _take(listing, page, layout, _end_of_keys(layout))


async def _behind(store: Store, layout: Layout, listing: Listing) -> None:
    while listing.rest_behind is not None and listing.in_order:
        page = await store.page(after=listing.rest_behind)
        listing.in_order = page.in_order
        listing.rest_behind = _take(listing, page, layout, None)
