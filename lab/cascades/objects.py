"""A store in memory, such as the bucket of a cascade."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from firstfault.errors import ObjectNotFoundError
from firstfault.layout import ERRORS, ROSTER, Layout, roster_key_for
from firstfault.model import JobErrors
from firstfault.reading.assemble import Snapshot
from firstfault.reading.attempt import read_once
from firstfault.reading.request import Patience, Request
from firstfault.store import ObjectInfo, Page
from firstfault.strategies import AggregationStrategy, get_reading_needs, get_strategy
from firstfault.wire.documents import encode, encode_presence

if TYPE_CHECKING:
    from typing_extensions import Self

_SIZE = 4000
"""Of each object, as it is listed."""


class Objects:
    """A bucket in memory that lists in order; it counts the requests.

    By path, `objects` has when each was written and a function that returns its bytes.
    """

    uri = "memory://cascade"
    has_ordered_pages = True

    def __init__(
        self, objects: Mapping[str, tuple[int | None, Callable[[], bytes]]], page: int = 1000
    ) -> None:
        self.objects = objects
        self._page = page
        self._names = sorted(objects)
        self.lists = 0
        self.gets = 0

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        """Return the bucket of a cascade; each object is encoded when it is read."""
        objects: dict[str, tuple[int | None, Callable[[], bytes]]] = {}
        for item in snapshot.documents:
            ref = item.documents[0]
            objects[f"{ERRORS}/{ref.name}"] = (ref.last_modified_ns, lambda item=item: encode(item))
        for bad in snapshot.unreadable:
            objects[f"{ERRORS}/{bad.name}"] = (None, lambda: b"\xff\xff")
        for entry in snapshot.roster:
            objects[f"{ROSTER}/{roster_key_for(entry)}"] = (
                None,
                lambda entry=entry: encode_presence(entry),
            )
        return cls(objects)

    async def page(self, after: str = "") -> Page:
        """See `firstfault.store.Store`."""
        self.lists += 1
        start = bisect_right(self._names, after)
        names = self._names[start : start + self._page]
        found = tuple(ObjectInfo(name, _SIZE, self.objects[name][0]) for name in names)
        return Page(found, len(self._names) > start + self._page)

    async def list(self, folder: str = "") -> list[ObjectInfo]:
        """See `firstfault.store.Store`."""
        self.lists += 1
        prefix = f"{folder}/" if folder else ""
        names = [name.removeprefix(prefix) for name in self._names if name.startswith(prefix)]
        return [
            ObjectInfo(name, _SIZE, self.objects[prefix + name][0])
            for name in names
            if "/" not in name
        ]

    # the protocol
    async def get(self, path: str, *, limit: int | None = None) -> bytes:  # noqa: ARG002
        """See `firstfault.store.Store`."""
        self.gets += 1
        if path not in self.objects:
            raise ObjectNotFoundError(path)
        return self.objects[path][1]()


def looked_at(
    objects: Objects, strategy: str | AggregationStrategy, expected_nodes: int | None = None
) -> JobErrors:
    """Return the job as a reader sees it that opens only the documents that `strategy` needs."""
    needs = get_reading_needs(get_strategy(strategy))
    return asyncio.run(
        read_once(
            objects,
            Request(
                Layout.of(objects.uri), lambda _: needs, Patience(expected_nodes=expected_nodes)
            ),
        )
    )
