"""The one protocol that a storage backend fulfils."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["ObjectInfo", "Page", "Store"]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing."""

    name: str
    """Relative to the folder that was listed, without a slash."""
    size: int
    """Bytes."""
    last_modified_ns: int | None = None
    """Nanoseconds since the Unix epoch by the storage's clock; often whole seconds. None: it does not say."""


@dataclass(frozen=True, slots=True)
class Page:
    """The beginning of a listing."""

    objects: tuple[ObjectInfo, ...]
    """In the order in which the storage lists them; names are relative to the folder, and hold slashes if deeper."""
    more: bool
    """Whether there may be objects behind these."""

    @property
    def in_order(self) -> bool:
        """Whether the objects came in the order of their names, as the listing of an ordered storage does."""
        names = [item.name for item in self.objects]
        return all(one < other for one, other in itertools.pairwise(names))


class Store(Protocol):
    """A folder of objects. All errors are `firstfault.errors.StoreError`; transient ones have been retried."""

    @property
    def uri(self) -> str:
        """The folder, without a trailing slash."""
        ...

    @property
    def pages_in_order(self) -> bool:
        """Whether `page` sends what is first by name first, in one request, as far as is known before asking.

        False where it is not known, or costs more than it saves: then a reader lists everything.
        """
        ...

    async def list(self, folder: str = "") -> list[ObjectInfo]:
        """Return the objects directly in `folder` (relative), by name. A folder that does not exist is empty.

        Never answered from a cache.
        """
        ...

    def pages(self, folder: str = "") -> AsyncIterator[Sequence[ObjectInfo]]:
        """As `list`, bit by bit in the order of the storage: of a large folder only one page is held at a time.

        A page that could not be read is asked for again; one object is never given twice.
        """
        ...

    async def page(self, folder: str = "", *, after: str = "") -> Page:
        """Return the first page, at most 1,000 objects, of what lies in or below `folder` and sorts after `after`.

        One request where `pages_in_order`.

        Args:
            folder: relative.
            after: a name relative to `folder`; it need not exist.
        """
        ...

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return an object's bytes.

        Raises:
            ObjectNotFoundError: there is none.
            ObjectTooLargeError: it has more than `limit` bytes. A limit costs a request; leave it out where a listing
                has told the size.
        """
        ...

    async def put(self, path: str, data: bytes) -> None:
        """Write an object whole: a reader sees all of it or nothing."""
        ...

    async def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
