"""The one protocol that a storage backend fulfils."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["ObjectInfo", "Store"]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing."""

    name: str
    """Relative to the folder that was listed, without a slash."""
    size: int
    """Bytes."""
    last_modified_ns: int | None = None
    """Nanoseconds since the Unix epoch by the storage's clock; often whole seconds. None: it does not say."""


class Store(Protocol):
    """A folder of objects. All errors are `firstfault.errors.StoreError`; transient ones have been retried."""

    @property
    def uri(self) -> str:
        """The folder, without a trailing slash."""
        ...

    async def list(self, folder: str = "") -> list[ObjectInfo]:
        """Return the objects directly in `folder` (relative), by name. A folder that does not exist is empty.

        Never answered from a cache.
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
