"""A store together with objects of which the caller has the bytes: they need no request, and may be missing in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.errors import ObjectNotFoundError
from firstfault.store import ObjectInfo, Page, join

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from firstfault.store import ReadableStore


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
        lacking = self._lacking((item.name for item in listed), folder)
        return sorted([*listed, *lacking], key=_by_name) if lacking else listed

    async def pages(self, folder: str = "") -> AsyncIterator[Sequence[ObjectInfo]]:
        """Yield the objects of `list` page by page; the copies that the store lacks come last."""
        copies = {item.name: item for item in self._directly_in(folder)}
        if self._store is not None:
            async for page in self._store.pages(folder):
                for item in page:
                    copies.pop(item.name, None)
                yield page
        if copies:
            yield sorted(copies.values(), key=_by_name)

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
        return Page(tuple(sorted([*found.objects, *lacking], key=_by_name)), found.more) if lacking else found

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return an object's bytes; its copy's, if there is one.

        Raises:
            ObjectNotFoundError: the object does not exist.
        """
        data = self._copies.get(path)
        if data is None and self._store is None:
            raise ObjectNotFoundError(f"there is no copy of {join(self._uri, path)}")
        if data is None and self._store is not None:
            data = await self._store.get(path, limit=limit)
        self.read[path] = data or b""
        return data or b""

    def _lacking(self, listed: Iterable[str], folder: str) -> Sequence[ObjectInfo]:
        names = set(listed)
        return [item for item in self._directly_in(folder) if item.name not in names]

    def _directly_in(self, folder: str) -> Sequence[ObjectInfo]:
        return [item for item in self._below(folder) if "/" not in item.name]

    def _below(self, folder: str) -> Sequence[ObjectInfo]:
        beginning = f"{folder}/" if folder else ""
        return [
            ObjectInfo(path.removeprefix(beginning), len(data))
            for path, data in self._copies.items()
            if path.startswith(beginning)
        ]


def _by_name(item: ObjectInfo) -> str:
    return item.name
