"""A store in memory that serves a cascade as a bucket, and encodes each object when it is read."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from typing import TYPE_CHECKING

from firstfault.errors import ObjectNotFoundError
from firstfault.layout import ERRORS, ROSTER, Layout, roster_key_for
from firstfault.reading.attempt import Patience, Request, look
from firstfault.reading.listing import Wish
from firstfault.store import ObjectInfo, Page
from firstfault.strategies import get_strategy, reads_of
from firstfault.wire.documents import encode, encode_presence

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from firstfault.model import JobErrors
    from firstfault.reading.assemble import Snapshot
    from firstfault.strategies import AggregationStrategy

_PAGE = 1000


class Objects:
    """A bucket in memory that lists in order, 1,000 names per page; it counts the requests."""

    uri = "memory://cascade"
    pages_in_order = True

    def __init__(self, snapshot: Snapshot) -> None:
        self._objects: dict[str, tuple[int | None, Callable[[], bytes]]] = {}
        for item in snapshot.documents:
            ref = item.documents[0]
            self._objects[f"{ERRORS}/{ref.name}"] = (ref.last_modified_ns, lambda item=item: encode(item))
        for bad in snapshot.unreadable:
            self._objects[f"{ERRORS}/{bad.name}"] = (None, lambda: b"\xff\xff")
        for entry in snapshot.roster:
            self._objects[f"{ROSTER}/{roster_key_for(entry)}"] = (None, lambda entry=entry: encode_presence(entry))
        self._names = sorted(self._objects)
        self.lists = 0
        self.gets = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def page(self, folder: str = "", *, after: str = "") -> Page:
        """See `firstfault.store.Store`."""
        self.lists += 1
        prefix = f"{folder}/" if folder else ""
        names = [name for name in self._names[bisect_right(self._names, prefix + after) :] if name.startswith(prefix)]
        found = tuple(ObjectInfo(name.removeprefix(prefix), 4000, self._objects[name][0]) for name in names[:_PAGE])
        return Page(found, len(names) > _PAGE)

    async def list(self, folder: str = "") -> list[ObjectInfo]:
        """See `firstfault.store.Store`."""
        found: list[ObjectInfo] = []
        more = True
        while more:
            page = await self.page(folder, after=found[-1].name if found else "")
            found += page.objects
            more = page.more
        return [item for item in found if "/" not in item.name]

    async def get(self, path: str, *, limit: int | None = None) -> bytes:  # noqa: ARG002 - the protocol
        """See `firstfault.store.Store`."""
        self.gets += 1
        if path not in self._objects:
            raise ObjectNotFoundError(path)
        return self._objects[path][1]()

    async def put(self, path: str, data: bytes) -> None:
        """See `firstfault.store.Store`."""
        self._objects[path] = (None, lambda: data)
        self._names = sorted(self._objects)

    async def exists(self, path: str) -> bool:
        """See `firstfault.store.Store`."""
        return path in self._objects


def looked_at(objects: Objects, strategy: str | AggregationStrategy, expected_nodes: int | None = None) -> JobErrors:
    """Return the job as a reader sees it that opens only the documents that `strategy` needs."""
    wanted, named = reads_of(get_strategy(strategy))
    wish = Wish(wanted, named) if named is not None else Wish(wanted)
    return asyncio.run(
        look(objects, Request(Layout.of(objects.uri), lambda _: wish, Patience(expected_nodes=expected_nodes)))
    )
