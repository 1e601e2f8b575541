"""The conformance suite of the store, which runs on each kind of storage and with both clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from firstfault.errors import ObjectNotFoundError, ObjectTooLargeError
from firstfault.store import Store
from firstfault.utils.run_sync import run_sync

_NANO = 1_000_000_000
_CLOCKS_MAY_DIFFER_S = 60
_UNICODE = "w\u00f6rker 3 \u2192 \U0001f525.pb"


def _opened(test: Callable[[Any, Store], Awaitable[None]]) -> Callable[[StoreTests], None]:
    """Run an asynchronous test with an open store."""

    def run(self: StoreTests) -> None:
        async def entered() -> None:
            async with self.open_store() as store:
                await test(self, store)

        run_sync(entered())

    # not functools.wraps: pytest would look for a fixture of the name `store`
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


class StoreTests:
    """Tests that every store must pass; a subclass defines `open_store`."""

    def open_store(self) -> Store:
        """Return a store that is not yet entered. All stores of a test share one folder,
        which is empty at first.
        """
        raise NotImplementedError

    @_opened
    async def test_gives_back_what_was_put(self, store: Store) -> None:
        """`get` returns the bytes that were put, also none,
        and under a name with characters outside of ASCII.
        """
        for name, data in (("a.pb", bytes(range(256)) * 33), ("b.pb", b""), (_UNICODE, b"x")):
            await store.put(f"errors/{name}", data)
            assert await store.exists(f"errors/{name}")
            assert await store.get(f"errors/{name}") == data
        listed = [(item.name, item.size) for item in await store.list("errors")]
        assert listed == [("a.pb", 256 * 33), ("b.pb", 0), (_UNICODE, 1)]

    @_opened
    async def test_creates_an_object_once(self, store: Store) -> None:
        """Of 16 concurrent calls of `create`, one writes the object; later ones change nothing,
        while `put` replaces it.
        """
        # fsspec's memory has no conditional write, so concurrent calls may both write there
        calls = 1 if store.uri.startswith("memory:") else 16
        contents = [b"%d" % number for number in range(calls)]
        created = await asyncio.gather(*(store.create("error.pb", data) for data in contents))
        assert created.count(True) == 1
        assert await store.get("error.pb") == contents[created.index(True)]
        assert not await store.create("error.pb", b"later")
        assert await store.get("error.pb") == contents[created.index(True)]
        await store.put("error.pb", b"replaced")
        assert await store.get("error.pb") == b"replaced"
        assert [item.name for item in await store.list()] == ["error.pb"]

    @_opened
    async def test_lists_by_name_with_sizes(self, store: Store) -> None:
        """A listing is sorted by name and has the size of each object;
        that of the store's own folder needs no name.
        """
        names = ("B.pb", "a.pb", "b.pb", "c.pb")
        for folder in ("errors", ""):
            for name in reversed(names):
                await store.put(f"{folder}/{name}".lstrip("/"), name.encode() * ord(name[0]))
            listed = [(item.name, item.size) for item in await store.list(folder)]
            assert listed == [(name, 4 * ord(name[0])) for name in names]
        assert await store.list() == await store.list("")

    @_opened
    async def test_a_page_is_of_all_that_lies_below(self, store: Store) -> None:
        """A page has the objects of all folders behind a name, and tells whether more follow."""
        for name in ("errors/a.pb", "errors/b.pb", "roster/c.pb", "z.pb"):
            await store.put(name, b"xyz")
        page = await store.page("errors/a.pb")
        assert [(item.name, item.size) for item in page.objects] == [
            ("errors/b.pb", 3),
            ("roster/c.pb", 3),
            ("z.pb", 3),
        ]
        assert not page.has_more
        assert [item.name for item in (await store.page("f")).objects] == ["roster/c.pb", "z.pb"]
        assert (await store.page("zz")).objects == ()

    @_opened
    async def test_a_page_has_at_most_1000_objects_unless_unordered(self, store: Store) -> None:
        """A page has at most 1,000 objects, or all without an order;
        successive pages have each object once.
        """
        names = [f"errors/{number:04d}.pb" for number in range(1_003)]
        gate = asyncio.Semaphore(32)

        async def put(name: str) -> None:
            async with gate:
                await store.put(name, b"")

        await asyncio.gather(*map(put, names))
        page = await store.page()
        assert (len(page.objects), page.has_more) == (
            (1_000, True) if store.has_ordered_pages else (1_003, False)
        )
        first = [item.name for item in page.objects]
        rest = await store.page(max(first))
        assert not rest.has_more
        assert [*first, *(item.name for item in rest.objects)] == names
        assert [f"errors/{item.name}" for item in await store.list("errors")] == names

    @_opened
    async def test_a_folder_is_not_an_object(self, store: Store) -> None:
        """A listing has no subfolders, a missing one is empty; folders do not exist,
        and their URI ends in no slash.
        """
        assert not store.uri.endswith("/")
        assert await store.list() == []
        await store.put("errors/a.pb", b"x")
        await store.put("errors/old/b.pb", b"x")
        await store.put("errors-of-another/c.pb", b"x")
        assert [item.name for item in await store.list("errors")] == ["a.pb"]
        assert await store.list("never/written") == []
        assert not await store.exists("errors/old")
        assert not await store.exists("errors")

    @_opened
    async def test_every_listing_is_fresh(self, first: Store) -> None:
        """A listing shows what this store, or another one,
        has put or overwritten since the last one.
        """
        async with self.open_store() as second:
            for store in (first, second):
                assert await store.list("errors") == []
            assert not await second.exists("errors/a.pb")
            for writer, data in ((first, b"x"), (second, b"a long one" * 1_000), (first, b"short")):
                await writer.put("errors/a.pb", data)
                for store in (first, second):
                    assert [(item.name, item.size) for item in await store.list("errors")] == [
                        ("a.pb", len(data))
                    ]
                    assert await store.exists("errors/a.pb")
                    assert await store.get("errors/a.pb") == data

    @_opened
    async def test_getting_a_missing_object_raises_its_path(self, store: Store) -> None:
        """`get` of a missing object raises ObjectNotFoundError with its path,
        and `exists` is False.
        """
        await store.put("errors/a.pb", b"x")
        for path in ("errors/b.pb", "elsewhere/a.pb", "errors/a.pb/c.pb"):
            assert not await store.exists(path)
            with pytest.raises(ObjectNotFoundError, match=path):
                await store.get(path)
            with pytest.raises(ObjectNotFoundError, match=path):
                await store.get(path, limit=1_000)

    @_opened
    async def test_the_limit_is_the_largest_size_allowed(self, store: Store) -> None:
        """`get` returns an object of `limit` bytes,
        and raises ObjectTooLargeError for one byte more.
        """
        await store.put("errors/a.pb", b"x" * 1_000)
        assert len(await store.get("errors/a.pb", limit=1_000)) == 1_000
        with pytest.raises(ObjectTooLargeError, match=r"a\.pb"):
            await store.get("errors/a.pb", limit=999)

    @_opened
    async def test_the_time_of_a_write_is_plausible(self, store: Store) -> None:
        """A modification time, if there is one, is about now in nanoseconds."""
        await store.put("errors/a.pb", b"x")
        (item,) = await store.list("errors")
        if item.last_modified_ns is not None:
            assert abs(item.last_modified_ns - time.time_ns()) < _CLOCKS_MAY_DIFFER_S * _NANO
