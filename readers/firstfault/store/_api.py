"""The protocol of a storage backend."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from types import TracebackType

    from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing."""

    name: str
    """Relative to the folder that was listed, without a slash."""
    size: int
    """Bytes."""
    last_modified_ns: int | None = None
    """Nanoseconds since the Unix epoch by the storage's clock, often whole seconds; None if it is not known."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing."""

    objects: tuple[ObjectInfo, ...]
    """In the storage's order. Names are relative to the folder; those of subfolders contain slashes."""
    more: bool
    """Whether more objects may follow."""

    @property
    def in_order(self) -> bool:
        """Whether the objects are sorted by name."""
        names = [item.name for item in self.objects]
        return all(one < other for one, other in itertools.pairwise(names))


class ReadableStore(Protocol):
    """A folder of objects to read. All errors are `firstfault.errors.StoreError`; transient ones have been retried."""

    @property
    def uri(self) -> str:
        """The folder, without a trailing slash."""
        ...

    @property
    def pages_in_order(self) -> bool:
        """Whether `page` returns the first objects by name in one request.

        If False, or not known, a reader lists everything instead.
        """
        ...

    async def list(self, folder: str = "") -> list[ObjectInfo]:
        """Return the objects directly in `folder` (relative), by name; empty if it does not exist. Never cached."""
        ...

    def pages(self, folder: str = "") -> AsyncIterator[Sequence[ObjectInfo]]:
        """Yield the objects of `list` page by page, in the storage's order, holding one page in memory.

        A page that could not be read is requested again. No object is yielded twice.
        """
        ...

    async def page(self, folder: str = "", *, after: str = "") -> Page:
        """Return the objects in or below `folder` whose names sort after `after`.

        If `pages_in_order`, at most 1,000, with one request; else all of them.

        Args:
            folder: relative.
            after: a name relative to `folder`; it need not exist.
        """
        ...

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return an object's bytes.

        Raises:
            ObjectNotFoundError: the object does not exist.
            ObjectTooLargeError: it has more than `limit` bytes. A limit may cost a request; leave it out if a listing
                has given the size.
        """
        ...


class Store(ReadableStore, Protocol):
    """A folder of objects to read and to write."""

    async def put(self, path: str, data: bytes) -> None:
        """Write an object atomically: a reader sees all of it or none of it."""
        ...

    async def exists(self, path: str) -> bool:
        """Whether the object exists."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
