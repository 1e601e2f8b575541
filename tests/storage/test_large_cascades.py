"""A cascade of more workers than a page of a listing, on a real S3 server: the requests and the verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from firstfault.layout import ERRORS, ErrorKey
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.reading import attempt as reading
from firstfault.reading.listing import Listing, list_everything
from firstfault.store import Store
from tests.benchmarks.cascade import Cascade, put_all
from tests.faulty_proxy import FaultyProxy
from tests.s3_server import S3
from tests.storage.conftest import Peer

WORKERS = 1_040
CULPRIT = Cascade(WORKERS).culprit

pytestmark = pytest.mark.usefixtures("client")


@pytest.fixture(scope="module")
def large(s3: S3, environment_of: Callable[..., Any]) -> str:
    """Write the documents of 1,040 workers, one of which is the root cause."""
    uri = s3.uri("large")
    with environment_of(s3):
        put_all(uri, Cascade(WORKERS))
    return uri


def _listings(proxy: FaultyProxy) -> int:
    return sum("list-type=2" in request for request in proxy.requests)


def test_earliest_asks_three_times(large: str, faulty_proxy: FaultyProxy) -> None:
    """`earliest` sends two listings and one read, for the prefix as for the errors folder."""
    verdict = MultiErrorFileOutputReader(f"{large}/{ERRORS}", strategy="earliest").verdict()
    assert verdict is not None
    assert verdict.ranks == (CULPRIT,)
    assert not verdict.coverage.complete
    assert len(faulty_proxy.requests) == 3
    assert _listings(faulty_proxy) == 2


def test_evidence_opens_a_few(large: str, faulty_proxy: FaultyProxy) -> None:
    """Every name is listed; a few documents and the final roster entry of each node are opened."""
    reader = MultiErrorFileOutputReader(large)
    verdict = reader.verdict()
    assert verdict is not None
    assert verdict.ranks == (CULPRIT,)
    assert verdict.confidence == "high"
    assert verdict.victims.count == WORKERS - 1
    assert verdict.coverage.complete
    assert verdict.coverage.reported == WORKERS // 8
    assert _listings(faulty_proxy) == 3
    assert len(faulty_proxy.requests) < 3 + WORKERS // 8 + 40
    assert not any(request.startswith("HEAD") for request in faulty_proxy.requests)


def test_documents_that_are_gone(
    s3_environ: S3, peer: Peer, with_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents that disappear after the listing are counted, and others are read instead."""
    uri = s3_environ.uri("gone")
    put_all(uri, Cascade(64))

    async def names(store: Store) -> list[str]:
        return [item.name for item in await store.list(ERRORS)]

    keys = sorted(filter(None, map(ErrorKey.parse, with_store(uri, names))), key=lambda key: key.timestamp_ns or 0)
    gone = [str(key) for key in keys[1:20]]

    async def then_remove(*arguments: Any) -> Listing:
        listing = await list_everything(*arguments)
        for name in gone:
            peer.delete(f"{uri}/{ERRORS}/{name}")
        return listing

    monkeypatch.setattr(reading, "list_everything", then_remove)
    verdict = MultiErrorFileOutputReader(uri).verdict()
    assert verdict is not None
    assert verdict.ranks == (Cascade(64).culprit,)
    assert 0 < verdict.coverage.unreadable <= len(gone)
    assert not verdict.coverage.complete
    assert any("gone between listing and reading" in note for note in verdict.coverage.notes)
