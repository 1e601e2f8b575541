"""Copies of documents: as a bundle beside them, which saves requests, and in the hands of a pod."""

import asyncio
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstfault import MultiErrorFileOutputReader
from firstfault.errors import BadDocumentError, ObjectNotFoundError
from firstfault.layout import (
    VERDICT_JSON,
    Layout,
    bundle_name,
    error_key_for,
    is_bundle,
    roster_key_for,
)
from firstfault.model import Verdict
from firstfault.reading.fetch import StoreWithCopies
from firstfault.reading.listing import Listing, begin_listing, list_everything
from firstfault.testing import make_error, make_presence
from firstfault.wire.documents import encode, encode_presence, pack, unpack
from lab.cascades.objects import Objects
from tests.readers.conftest import Attempt


@settings(max_examples=30)
@given(st.dictionaries(st.text(max_size=20), st.binary(), max_size=8))
def test_a_bundle_unpacks_to_what_was_packed(files: dict[str, bytes]) -> None:
    """What is packed comes back; the name belongs to the content."""
    assert unpack(pack(files)) == files
    assert is_bundle(bundle_name(pack(files)))


def test_a_damaged_bundle_is_refused() -> None:
    """A bundle that was cut anywhere, or is something else, is refused."""
    whole = pack({"errors/a.pb": b"a" * 50, "roster/b.pb": b"b"})
    for value in [whole[:length] for length in range(len(whole))] + [
        b"{}",
        pack({})[:-1],
        b"\x78\x9c",
    ]:
        with pytest.raises(BadDocumentError):
            unpack(value)
    # an index of megabytes is refused before it is parsed: its objects would take gigabytes
    with pytest.raises(BadDocumentError, match="index"):
        unpack(zlib.compress(b"[" + b"[]," * 2_000_000 + b"[]]\n"))


def _files(ranks: int = 12) -> dict[str, bytes]:
    """Return the files of a job of which rank 3 raised,
    and the others lost their connection to it.
    """
    files = {}
    for rank in range(ranks):
        text = "the batch has no labels" if rank == 3 else "Connection closed by peer"
        place = {"node": f"w-{rank}", "group_rank": rank}
        error = make_error(rank, group_world_size=ranks, at_ms=rank != 3, message=text, **place)
        entry = make_presence(nodes=ranks, ranks=(rank,), **place)
        files[f"errors/{error_key_for(error)}"] = encode(error)
        files[f"roster/{roster_key_for(entry)}"] = encode_presence(entry)
    return files


def _put(attempt: Attempt, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        attempt.put(f"firstfault/{path}", data)


_FOR_A_VERDICT = 1
"""Requests for the nodes' verdict, if an attempt that failed has no error.pb."""


def _bundle(attempt: Attempt, files: dict[str, bytes], *, content: bytes | None = None) -> None:
    whole = pack(files)
    attempt.put(f"firstfault/roster/{bundle_name(whole)}", whole if content is None else content)


def _verdict(attempt: Attempt) -> Verdict:
    verdict = attempt.reader().verdict()
    assert verdict.ranks == (3,)
    return verdict


@pytest.mark.parametrize("folder", ["", "/firstfault/errors"])
def test_a_bundle_saves_requests(folder: str, attempt: Attempt, requested_paths: list[str]) -> None:
    """With a bundle a read opens one file, and says the same as without;
    a fresh read opens every file.
    """
    files = _files()
    _put(attempt, files)
    before = _verdict(attempt)
    assert len(requested_paths) == len(files) + _FOR_A_VERDICT
    requested_paths.clear()
    _bundle(attempt, files)
    reader = type(attempt.reader())(attempt.uri + folder)
    assert reader.verdict() == before
    assert len(requested_paths) == 1 + _FOR_A_VERDICT
    requested_paths.clear()
    assert attempt.reader(fresh=True).verdict() == before
    assert sorted(requested_paths) == sorted(
        [*(f"firstfault/{path}" for path in files), VERDICT_JSON]
    )


def test_files_missing_in_a_bundle_are_read_by_themselves(
    attempt: Attempt, requested_paths: list[str]
) -> None:
    """A file that came later, or that was overwritten since, is read by itself."""
    files = _files()
    place = {"node": "w-3", "group_rank": 3, "group_world_size": 12}
    _put(attempt, files)
    _bundle(attempt, files)
    overwritten = next(path for path in files if "-0000003-" in path and path.startswith("errors/"))
    attempt.put(
        f"firstfault/{overwritten}",
        encode(make_error(3, message="another text, and longer", **place)),
    )
    attempt.write(make_error(40, at_ms=-9, message="it was earlier", **place))
    found = {failure.rank: failure.message for failure in attempt.reader().job().failures}
    assert (found[40], found[3]) == ("it was earlier", "another text, and longer")
    assert len(requested_paths) == 3 + _FOR_A_VERDICT


def test_a_bundle_adds_no_object_that_the_storage_lost(attempt: Attempt) -> None:
    """What the storage no longer lists does not come back from a bundle."""
    files = _files()
    gone = make_error(50, node="w-50", group_rank=50, at_ms=-99, message="deleted")
    _put(attempt, files)
    before = _verdict(attempt)
    _bundle(attempt, {**files, f"errors/{error_key_for(gone)}": encode(gone)})
    assert _verdict(attempt) == before


@pytest.mark.parametrize(
    ("folder", "strategy"),
    [("", "evidence"), ("/firstfault", "evidence"), ("/firstfault/errors", "earliest")],
)
def test_a_bundle_adds_what_other_nodes_handed_over(
    folder: str, strategy: str, attempt: Attempt
) -> None:
    """In a folder that only one node sees, the bundle adds what the others handed over,
    also to a fresh read.
    """
    files = _files(150)
    own = {path: data for path, data in files.items() if "-0000002-" in path}
    _put(attempt, own)
    whole = pack(files)
    attempt.put(f"firstfault/roster/{bundle_name(whole, of_separate_nodes=True)}", whole)

    def told(reader: MultiErrorFileOutputReader) -> tuple[object, ...]:
        verdict = reader.verdict()
        return (verdict.headline, verdict.ranks, verdict.digest, verdict.coverage.reported)

    found = [
        told(type(attempt.reader())(attempt.uri + folder, strategy=strategy, fresh=fresh))
        for fresh in (False, True)
    ]
    _put(attempt, files)
    assert found == [told(attempt.reader(strategy="evidence"))] * 2
    assert found[0][1] == (3,)
    assert found[0][-1] == 150


@pytest.mark.parametrize("damage", ["cut", "changed", "no bundle"])
def test_a_bundle_that_does_not_match_its_name_is_ignored(
    damage: str,
    attempt: Attempt,
    requested_paths: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A bundle that does not match its name is ignored with a warning,
    and every document is read.
    """
    files = _files()
    _put(attempt, files)
    before = _verdict(attempt)
    requested_paths.clear()
    root = next(path for path, data in files.items() if b"no labels" in data)
    forged = pack({**files, root: encode(replace(make_error(3), message="something harmless"))})
    _bundle(
        attempt,
        files,
        content={"cut": pack(files)[:-9], "changed": forged, "no bundle": b"x"}[damage],
    )
    with caplog.at_level(logging.WARNING):
        assert _verdict(attempt) == before
    assert "is damaged; reading every document instead" in caplog.text
    assert len(requested_paths) == len(files) + 1 + _FOR_A_VERDICT


def _memory(files: Mapping[str, bytes]) -> Objects:
    """Return a store with tiny pages."""
    return Objects({path: (None, lambda data=data: data) for path, data in files.items()}, page=2)


NAMES = st.dictionaries(
    st.sampled_from([f"{folder}{name}" for folder in ("", "a/", "b/") for name in "uvwxyz"]),
    st.binary(),
)


@given(NAMES, NAMES)
def test_a_store_with_copies_lists_each_object_once_in_order(
    listed: dict[str, bytes], copies: dict[str, bytes]
) -> None:
    """Listing at once, and page by page, every object comes once and in order;
    copies are read first.
    """
    everything = sorted({**listed, **copies})
    stores = (
        StoreWithCopies(_memory(listed), copies, "memory://root"),
        StoreWithCopies(None, copies, "memory://root"),
    )

    async def check() -> None:
        for store, names in zip(stores, (everything, sorted(copies)), strict=True):
            for folder in ("", "a/", "b/"):
                inside = [name for name in names if name.rpartition("/")[0] == folder.strip("/")]
                assert [
                    folder + item.name for item in await store.list(folder.strip("/"))
                ] == inside
            found: list[str] = []
            more = True
            while more:
                page = await store.page(found[-1] if found else "")
                found += [item.name for item in page.objects]
                more = page.has_more
            assert found == names
            for path in names:
                assert await store.get(path) == copies.get(path, listed.get(path))
            assert sorted(store.read) == names
            with pytest.raises(ObjectNotFoundError):
                await store.get("c/nothing")

    asyncio.run(check())


TREE = sorted(
    ["error.pb", "errors-of-mine/x", "firstfault/errors/another.pb", "outputs.pb", "zzz"]
    + [f"firstfault/errors/{error_key_for(make_error(rank, at_ms=rank))}" for rank in range(12)]
    + [f"firstfault/roster/{roster_key_for(make_presence(group_rank=rank))}" for rank in range(7)]
)


@given(
    st.sets(st.sampled_from(TREE)),
    st.sets(st.sampled_from([*TREE, "", "firstfault", "firstfault/roster0", "~"])),
)
def test_a_listing_split_anywhere_has_the_same_objects(names: set[str], cuts: set[str]) -> None:
    """Split at any names, whether they exist or not, a listing has the same objects."""
    store = _memory(dict.fromkeys(names, b""))
    layout = Layout.of("memory://root")

    async def listed(cuts: Sequence[str]) -> Listing:
        return await list_everything(store, layout, await begin_listing(store, layout), cuts)

    whole = asyncio.run(listed(()))
    in_parts = asyncio.run(listed(sorted(cuts)))
    assert in_parts.get_state() == whole.get_state()
    assert len(whole.documents) == sum("errors/e1-" in name for name in names)
    assert len(whole.roster) == sum("roster/r1-" in name for name in names)
