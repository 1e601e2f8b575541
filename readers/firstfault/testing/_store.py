"""What every store owes its caller."""
# ruff: noqa: S101, PLR2004 - a suite of tests asserts, and its numbers are the expectation

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from firstfault.errors import ObjectNotFoundError, ObjectTooLargeError
from firstfault.sync import run_sync

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from firstfault.store import Store

__all__ = ["StoreTests"]

_NANO = 1_000_000_000
_CLOCKS_MAY_DIFFER_S = 60
_UNICODE = "w\u00f6rker 3 \u2192 \U0001f525.pb"


class StoreTests:
    """Inherit it, say how to open the store, and pytest checks it.

    ::

        class TestMine(StoreTests):
            @pytest.fixture(autouse=True)
            def _folder(self, tmp_path):
                self.folder = tmp_path

            def open_store(self):
                return MyStore(self.folder)
    """

    def open_store(self) -> Store:
        """Return a store that has not been entered yet; within one test always on the same folder, empty at first."""
        raise NotImplementedError

    def test_gives_back_what_was_put(self) -> None:
        """Every byte of an object comes back."""
        data = bytes(range(256)) * 33

        async def scenario(store: Store) -> None:
            await store.put("errors/a.pb", data)
            assert await store.get("errors/a.pb") == data

        self._run(scenario)

    def test_an_object_may_be_empty(self) -> None:
        """An object of no bytes exists, is listed with size 0, and gives no bytes."""

        async def scenario(store: Store) -> None:
            await store.put("errors/a.pb", b"")
            assert await store.get("errors/a.pb") == b""
            assert await store.exists("errors/a.pb")
            assert [(item.name, item.size) for item in await store.list("errors")] == [("a.pb", 0)]

        self._run(scenario)

    def test_a_name_may_be_unicode(self) -> None:
        """A name outside of ASCII, with a space, is listed as it was put, and found."""

        async def scenario(store: Store) -> None:
            await store.put(f"errors/{_UNICODE}", b"x")
            assert [item.name for item in await store.list("errors")] == [_UNICODE]
            assert await store.get(f"errors/{_UNICODE}") == b"x"

        self._run(scenario)

    def test_lists_by_name_with_sizes(self) -> None:
        """A listing is in the order of the names, whatever the order of writing, and says each size."""

        async def scenario(store: Store) -> None:
            for name in ("c", "a", "b", "B"):
                await store.put(f"errors/{name}.pb", name.encode() * ord(name))
            listed = [(item.name, item.size) for item in await store.list("errors")]
            assert listed == [("B.pb", 66), ("a.pb", 97), ("b.pb", 98), ("c.pb", 99)]

        self._run(scenario)

    def test_lists_the_root(self) -> None:
        """Objects directly in the store's own folder are listed without naming a folder."""

        async def scenario(store: Store) -> None:
            await store.put("error.pb", b"x")
            assert [item.name for item in await store.list()] == ["error.pb"]

        self._run(scenario)

    def test_pages_hold_what_a_list_holds(self) -> None:
        """Page by page the same objects come as at once, those of folders below left out."""

        async def scenario(store: Store) -> None:
            for name in ("c", "a", "old/b", "b"):
                await store.put(f"errors/{name}.pb", b"x")
            found = [item for page in [page async for page in store.pages("errors")] for item in page]
            assert sorted(found, key=lambda item: item.name) == await store.list("errors")
            assert [page async for page in store.pages("never/written") if page] == []

        self._run(scenario)

    def test_a_page_is_of_all_that_lies_below(self) -> None:
        """A page holds what is in a folder and below it, from behind a name on, and says that nothing follows."""

        async def scenario(store: Store) -> None:
            for name in ("errors/a.pb", "errors/b.pb", "roster/c.pb", "z.pb"):
                await store.put(f"out/{name}", b"xyz")
            await store.put("outer/d.pb", b"x")
            page = await store.page("out", after="errors/a.pb")
            assert [(item.name, item.size) for item in page.objects] == [
                ("errors/b.pb", 3),
                ("roster/c.pb", 3),
                ("z.pb", 3),
            ]
            assert not page.more
            assert (await store.page("out", after="zz")).objects == ()
            assert [item.name for item in (await store.page(after="out/s")).objects] == ["out/z.pb", "outer/d.pb"]
            assert (await store.page("never/written")).objects == ()

        self._run(scenario)

    def test_a_page_ends(self) -> None:
        """Of more than 1,000 objects a page holds 1,000; pages, one behind the other, hold each object once."""
        names = [f"{number:04d}.pb" for number in range(1_003)]

        async def scenario(store: Store) -> None:
            gate = asyncio.Semaphore(32)

            async def put(name: str) -> None:
                async with gate:
                    await store.put(f"errors/{name}", b"")

            await asyncio.gather(*map(put, names))
            page = await store.page("errors")
            assert (len(page.objects), page.more) == (1_000, True)
            first = [item.name for item in page.objects]
            rest = await store.page("errors", after=max(first))
            assert not rest.more
            assert [*first, *(item.name for item in rest.objects)] == names
            pages = [page async for page in store.pages("errors")]
            assert sorted(item.name for page in pages for item in page) == names

        self._run(scenario)

    def test_a_missing_folder_is_empty(self) -> None:
        """A folder in which nothing was ever put is listed as empty."""

        async def scenario(store: Store) -> None:
            assert await store.list("never/written") == []
            assert await store.list() == []

        self._run(scenario)

    def test_a_folder_is_not_an_object(self) -> None:
        """What lies in a folder below is not listed, nor is that folder; and a folder does not exist as an object."""

        async def scenario(store: Store) -> None:
            await store.put("errors/a.pb", b"x")
            await store.put("errors/old/b.pb", b"x")
            await store.put("errors-of-another/c.pb", b"x")
            assert [item.name for item in await store.list("errors")] == ["a.pb"]
            assert not await store.exists("errors/old")
            assert not await store.exists("errors")

        self._run(scenario)

    def test_every_listing_is_fresh(self) -> None:
        """An object that was put after a listing is in the next one, with its new size when it is overwritten."""

        async def scenario(store: Store) -> None:
            assert await store.list("errors") == []
            await store.put("errors/a.pb", b"x")
            assert [(item.name, item.size) for item in await store.list("errors")] == [("a.pb", 1)]
            await store.put("errors/a.pb", b"xyz")
            await store.put("errors/b.pb", b"")
            assert [(item.name, item.size) for item in await store.list("errors")] == [("a.pb", 3), ("b.pb", 0)]

        self._run(scenario)

    def test_two_stores_see_each_others_writes_at_once(self) -> None:
        """What one instance puts, another lists, finds and gets, also if it had looked before."""

        async def scenario(first: Store) -> None:
            async with self.open_store() as second:
                assert await second.list("errors") == []
                assert not await second.exists("errors/a.pb")
                await first.put("errors/a.pb", b"first")
                assert [item.name for item in await second.list("errors")] == ["a.pb"]
                assert await second.exists("errors/a.pb")
                assert await second.get("errors/a.pb") == b"first"
                await second.put("errors/a.pb", b"second")
                assert await first.get("errors/a.pb") == b"second"

        self._run(scenario)

    def test_overwriting_replaces_the_whole_object(self) -> None:
        """Of a longer object that was there before, nothing is left, and nothing else is listed beside it."""

        async def scenario(store: Store) -> None:
            await store.put("errors/a.pb", b"a long one" * 1_000)
            await store.put("errors/a.pb", b"short")
            assert await store.get("errors/a.pb") == b"short"
            assert [(item.name, item.size) for item in await store.list("errors")] == [("a.pb", 5)]

        self._run(scenario)

    def test_getting_what_is_not_there(self) -> None:
        """A missing object is ObjectNotFoundError, which names it, and does not exist."""

        async def scenario(store: Store) -> None:
            await store.put("errors/a.pb", b"x")
            for path in ("errors/b.pb", "elsewhere/a.pb", "errors/a.pb/c.pb"):
                assert not await store.exists(path)
                with pytest.raises(ObjectNotFoundError, match=path):
                    await store.get(path)
                with pytest.raises(ObjectNotFoundError, match=path):
                    await store.get(path, limit=1_000)

        self._run(scenario)

    def test_the_limit_is_the_largest_size_allowed(self) -> None:
        """An object of exactly `limit` bytes is returned, one byte more is ObjectTooLargeError."""

        async def scenario(store: Store) -> None:
            await store.put("errors/a.pb", b"x" * 1_000)
            assert len(await store.get("errors/a.pb", limit=1_000)) == 1_000
            with pytest.raises(ObjectTooLargeError, match=r"a\.pb"):
                await store.get("errors/a.pb", limit=999)

        self._run(scenario)

    def test_the_time_of_a_write_is_plausible(self) -> None:
        """If the storage says when an object was written, it says about now, in nanoseconds."""

        async def scenario(store: Store) -> None:
            await store.put("errors/a.pb", b"x")
            (item,) = await store.list("errors")
            if item.last_modified_ns is not None:
                assert abs(item.last_modified_ns - time.time_ns()) < _CLOCKS_MAY_DIFFER_S * _NANO

        self._run(scenario)

    def test_the_uri_has_no_slash_at_its_end(self) -> None:
        """The store says which folder it is, ready to have a name appended."""

        async def scenario(store: Store) -> None:
            assert store.uri
            assert not store.uri.endswith("/")

        self._run(scenario)

    def _run(self, scenario: Callable[[Store], Awaitable[None]]) -> None:
        async def entered() -> None:
            async with self.open_store() as store:
                await scenario(store)

        run_sync(entered())
