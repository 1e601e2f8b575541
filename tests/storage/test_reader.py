"""The reader on S3; `tests/readers` has it on a local folder."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any

import pytest

from firstfault.errors import AccessDeniedError
from firstfault.layout import ERRORS, ROSTER, error_key_for, roster_key_for
from firstfault.model import Phase
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.reading import fetch as reading
from firstfault.store import Store, open_store
from firstfault.testing import make_error, make_presence
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, encode, encode_presence

if TYPE_CHECKING:
    from collections.abc import Callable

    from firstfault.store import ObjectInfo
    from tests.s3_server import S3

ROOT = make_error(3, node="worker-1", at_ms=0, message="the first fault", group_world_size=2, world_size=4)
VICTIMS = [
    make_error(rank, node=f"worker-{rank // 2}", at_ms=50 + rank, exception="RuntimeError", message="peer is gone")
    for rank in range(3)
]


@pytest.fixture
def uri(s3_environ: S3) -> str:
    """Return a fresh output prefix."""
    return s3_environ.uri()


def test_the_root_cause_is_found(uri: str, write: Callable[..., list[str]]) -> None:
    """The worker that failed first is the root cause, also for eight threads that share a reader."""
    write(uri, *VICTIMS, ROOT)
    reader = MultiErrorFileOutputReader(uri)
    verdict = reader.verdict()
    assert verdict is not None
    assert (verdict.ranks, verdict.node, verdict.victims.count) == ((3,), "worker-1", 3)
    assert reader.is_error()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        (error,) = {future.result() for future in [pool.submit(reader.read_error) for _ in range(8)]}
    assert (error.worker, error.timestamp_ns) == ("worker-1", ROOT.timestamp_ns)
    assert "the first fault" in error.message
    assert f"firstfault show {uri}" in error.message


def test_outputs_and_deck_are_seen(uri: str, with_store: Callable[..., Any]) -> None:
    """An empty prefix has no error, no outputs and no deck; later calls of the same reader see them."""
    reader = MultiErrorFileOutputReader(uri)
    assert (reader.is_error(), reader.exists(), reader.deck_exists()) == (False, False, False)
    assert reader.read_error().code == "ErrorFileNotFound"

    async def put(store: Store) -> None:
        await store.put("outputs.pb", b"")
        await store.put("deck.html", b"<html>")

    with_store(uri, put)
    assert (reader.is_error(), reader.exists(), reader.deck_exists()) == (False, True, True)
    outputs, error = reader.read()
    assert error is None
    assert not outputs.literals


def test_a_document_over_the_limit_is_not_fetched(
    uri: str, write: Callable[..., list[str]], with_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document over 2 MiB is counted as unreadable, neither read nor decoded; the others still count."""
    write(uri, VICTIMS[0])
    big = error_key_for(ROOT)
    with_store(uri, lambda store: store.put(f"{ERRORS}/{big}", bytes(MAX_DOCUMENT_BYTES + 1)))
    fetched: list[str] = []
    decoded: list[str] = []
    kind = type(open_store(uri))
    get, decode = kind.get, reading.decode

    async def spy_get(store: Store, path: str, **options: Any) -> bytes:
        fetched.append(path)
        return await get(store, path, **options)

    monkeypatch.setattr(kind, "get", spy_get)
    monkeypatch.setattr(reading, "decode", lambda data, ref: (decoded.append(ref.name), decode(data, ref))[1])
    job = MultiErrorFileOutputReader(uri).job()
    assert [failure.rank for failure in job.failures] == [0]
    assert job.coverage.unreadable == 1
    assert any(big in note and str(MAX_DOCUMENT_BYTES) in note for note in job.coverage.notes)
    assert len(decoded) == 1
    assert not any(big in path for path in fetched)


def test_settling_sees_a_node_that_reports_late(
    uri: str, write: Callable[..., list[str]], with_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the reader waits for the second node, its report arrives, and the wait ends with the root cause."""
    looked = threading.Event()
    kind = type(open_store(uri))
    listing = kind.list

    async def spy_list(store: Store, folder: str = "") -> list[ObjectInfo]:
        found = await listing(store, folder)
        looked.set()
        return found

    def enter(node: int, phase: Phase) -> None:
        entry = make_presence(phase, node=f"worker-{node}", group_rank=node, nodes=2)
        path = f"{ROSTER}/{roster_key_for(entry)}"
        with_store(uri, lambda store: store.put(path, encode_presence(entry)))

    enter(0, Phase.JOINED)
    enter(1, Phase.JOINED)
    write(uri, *VICTIMS)
    enter(0, Phase.FAILED)
    monkeypatch.setattr(kind, "list", spy_list)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(MultiErrorFileOutputReader(uri, settle_seconds=60).job)
        assert looked.wait(30)
        write(uri, ROOT)
        assert not waiting.done()
        enter(1, Phase.FAILED)
        job = waiting.result(50)
    assert job.settled
    assert job.failures[0].rank == 3


def test_without_the_list_permission(
    s3_no_list: S3, monkeypatch: pytest.MonkeyPatch, write: Callable[..., list[str]]
) -> None:
    """No method reports "no error"; a pod with findings of its own uses them, and a note names the permission."""
    for name, value in s3_no_list.environment().items():
        monkeypatch.setenv(name, value)
    uri = s3_no_list.uri()
    reader = MultiErrorFileOutputReader(uri)
    for call in (reader.is_error, reader.read_error, reader.decision, reader.job):
        with pytest.raises(AccessDeniedError, match="list permission"):
            call()
    write(uri, ROOT, VICTIMS[0])
    own = {f"firstfault/errors/{error_key_for(VICTIMS[0])}": encode(VICTIMS[0])}
    reader = MultiErrorFileOutputReader(uri, copies=own, settle_seconds=60)
    conclusion = reader.conclude()
    assert conclusion is not None
    assert conclusion.verdict.ranks == (0,)
    assert not conclusion.verdict.settled
    assert not conclusion.verdict.coverage.complete
    (note,) = conclusion.verdict.coverage.notes
    assert note.startswith("only the documents at hand")
    assert "list permission" in note
    assert "only the documents at hand" in reader.read_error().message
