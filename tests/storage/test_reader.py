"""The reader on a local folder and on S3."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any

import pytest

from firstfault.cli import main
from firstfault.errors import AccessDeniedError, ObjectTooLargeError, StoreUnavailableError
from firstfault.layout import ERRORS, ROSTER, error_key_for, roster_key_for
from firstfault.model import Phase
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.reading import fetch as reading
from firstfault.store import Store, open_store
from firstfault.testing import make_error, make_presence
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, encode, encode_presence
from tests.faulty_proxy import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from firstfault.store import ObjectInfo
    from tests.faulty_proxy import FaultyProxy
    from tests.s3_server import S3
    from tests.storage.conftest import Crowd

ROOT = make_error(3, node="worker-1", at_ms=0, message="the first fault", group_world_size=2, world_size=4)
VICTIMS = [
    make_error(rank, node=f"worker-{rank // 2}", at_ms=50 + rank, exception="RuntimeError", message="peer is gone")
    for rank in range(3)
]


# --- documents ------------------------------------------------------------------------------------------------------


def test_the_root_cause_is_found(store_uri: str, write: Callable[..., list[str]]) -> None:
    """The worker that failed first is the root cause, the others are its victims."""
    write(store_uri, *VICTIMS, ROOT)
    reader = MultiErrorFileOutputReader(store_uri)
    verdict = reader.verdict()
    assert verdict is not None
    assert (verdict.ranks, verdict.node, verdict.victims.count) == ((3,), "worker-1", 3)
    assert reader.is_error()
    error = reader.read_error()
    assert (error.worker, error.timestamp_ns) == ("worker-1", ROOT.timestamp_ns)
    assert "the first fault" in error.message
    assert f"firstfault show {store_uri}" in error.message


def test_an_attempt_without_any_file(store_uri: str) -> None:
    """An empty prefix has no error, no outputs and no deck; `read_error` returns ErrorFileNotFound."""
    reader = MultiErrorFileOutputReader(store_uri)
    assert not reader.is_error()
    assert not reader.exists()
    assert not reader.deck_exists()
    assert reader.read_error().code == "ErrorFileNotFound"


def test_outputs_and_deck_are_seen(store_uri: str, with_store: Callable[..., Any]) -> None:
    """An attempt with outputs and a deck has no error."""

    async def put(store: Store) -> None:
        await store.put("outputs.pb", b"")
        await store.put("deck.html", b"<html>")

    with_store(store_uri, put)
    reader = MultiErrorFileOutputReader(store_uri)
    assert reader.exists()
    assert reader.deck_exists()
    assert not reader.is_error()
    outputs, error = reader.read()
    assert error is None
    assert not outputs.literals


@pytest.mark.parametrize("part", ["errors", "document", "slash"])
def test_every_way_to_name_it(store_uri: str, write: Callable[..., list[str]], part: str) -> None:
    """The errors folder, a single document and a prefix with a slash at its end lead to the same failure."""
    (name,) = write(store_uri, ROOT)
    uri = {"errors": f"{store_uri}/{ERRORS}", "document": f"{store_uri}/{ERRORS}/{name}", "slash": f"{store_uri}/"}
    verdict = MultiErrorFileOutputReader(uri[part]).verdict()
    assert verdict is not None
    assert verdict.ranks == (3,)


def test_a_document_that_comes_later_is_seen(store_uri: str, write: Callable[..., list[str]]) -> None:
    """The same reader sees documents that were written after its last call."""
    reader = MultiErrorFileOutputReader(store_uri)
    seen = [reader.verdict()]
    for error in (VICTIMS[0], ROOT):
        write(store_uri, error)
        seen.append(reader.verdict())
    assert [verdict.ranks if verdict else None for verdict in seen] == [None, (0,), (3,)]


def test_a_document_over_the_limit_is_not_fetched(
    store_uri: str, write: Callable[..., list[str]], with_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document over 2 MiB is counted as unreadable, neither read nor decoded; the others still count."""
    write(store_uri, VICTIMS[0])
    big = error_key_for(ROOT)
    with_store(store_uri, lambda store: store.put(f"{ERRORS}/{big}", bytes(MAX_DOCUMENT_BYTES + 1)))
    fetched: list[str] = []
    decoded: list[str] = []
    kind = type(open_store(store_uri))
    get, decode = kind.get, reading.decode

    async def spy_get(store: Store, path: str, **options: Any) -> bytes:
        fetched.append(path)
        return await get(store, path, **options)

    monkeypatch.setattr(kind, "get", spy_get)
    monkeypatch.setattr(reading, "decode", lambda data, ref: (decoded.append(ref.name), decode(data, ref))[1])
    job = MultiErrorFileOutputReader(store_uri).job()
    assert [failure.rank for failure in job.failures] == [0]
    assert job.coverage.unreadable == 1
    assert any(big in note and str(MAX_DOCUMENT_BYTES) in note for note in job.coverage.notes)
    assert len(decoded) == 1
    assert not any(big in path for path in fetched)


def test_a_single_document_over_the_limit(store_uri: str, with_store: Callable[..., Any]) -> None:
    """A single document that is too large raises an error with its size."""
    with_store(store_uri, lambda store: store.put("error.pb", bytes(MAX_DOCUMENT_BYTES + 1)))
    with pytest.raises(ObjectTooLargeError, match=str(MAX_DOCUMENT_BYTES + 1)):
        MultiErrorFileOutputReader(f"{store_uri}/error.pb").job()


def test_the_root_cause_on_the_second_page(s3_environ: S3, crowd: Crowd) -> None:
    """The earliest of 1,500 documents is found, although it is listed last."""
    job = MultiErrorFileOutputReader(crowd.uri).job()
    assert job.document_count == 1500
    assert job.failures[0].rank == 0
    assert len(job.failures) + sum(len(group.ranks) for group in job.unopened) == 1500


# --- waiting --------------------------------------------------------------------------------------------------------


def test_settling_sees_a_node_that_reports_late(
    store_uri: str, write: Callable[..., list[str]], with_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the reader waits for the second node, its report arrives, and the wait ends with the root cause."""
    looked = threading.Event()
    kind = type(open_store(store_uri))
    listing = kind.list

    async def spy_list(store: Store, folder: str = "") -> list[ObjectInfo]:
        found = await listing(store, folder)
        looked.set()
        return found

    def enter(node: int, phase: Phase) -> None:
        entry = make_presence(phase, node=f"worker-{node}", group_rank=node, nodes=2)
        path = f"{ROSTER}/{roster_key_for(entry)}"
        with_store(store_uri, lambda store: store.put(path, encode_presence(entry)))

    enter(0, Phase.JOINED)
    enter(1, Phase.JOINED)
    write(store_uri, *VICTIMS)
    enter(0, Phase.FAILED)
    monkeypatch.setattr(kind, "list", spy_list)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(MultiErrorFileOutputReader(store_uri, settle_seconds=60).job)
        assert looked.wait(30)
        write(store_uri, ROOT)
        assert not waiting.done()
        enter(1, Phase.FAILED)
        job = waiting.result(30)
    assert job.settled
    assert job.failures[0].rank == 3


# --- storage that refuses or fails ----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["is_error", "read_error", "verdict", "decision", "job"])
def test_a_folder_that_may_not_be_listed_never_reads_as_no_error(
    s3_no_list: S3, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """An account without the list permission gets AccessDeniedError from every method about errors."""
    for name, value in s3_no_list.environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AccessDeniedError, match="list permission"):
        getattr(MultiErrorFileOutputReader(s3_no_list.uri()), call)()


def test_without_the_list_permission_the_own_node_is_judged(
    s3_no_list: S3, monkeypatch: pytest.MonkeyPatch, write: Callable[..., list[str]]
) -> None:
    """A pod that may not list uses its own findings, and a note names the missing permission."""
    for name, value in s3_no_list.environment().items():
        monkeypatch.setenv(name, value)
    uri = s3_no_list.uri()
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


def test_a_document_that_may_not_be_read_is_counted(
    s3_environ: S3, faulty_proxy: FaultyProxy, write: Callable[..., list[str]]
) -> None:
    """A document whose read is refused is unreadable; the verdict comes from the others."""
    uri = s3_environ.uri()
    names = write(uri, ROOT, VICTIMS[0])
    faulty_proxy.plan(Fault("403", path=names[0]))
    job = MultiErrorFileOutputReader(uri).job()
    assert [failure.rank for failure in job.failures] == [0]
    assert job.coverage.unreadable == 1
    assert not job.coverage.complete


@pytest.mark.usefixtures("no_waiting")
def test_storage_that_is_down_never_reads_as_no_error(s3_environ: S3, unused_endpoint: str) -> None:
    """Without a server every method about errors raises."""
    options = {"endpoint_url": unused_endpoint}
    reader = MultiErrorFileOutputReader(s3_environ.uri(), storage_options=options)
    for call in (reader.is_error, reader.read_error, reader.exists, reader.read, reader.deck_exists):
        with pytest.raises(StoreUnavailableError):
            call()


# --- callers --------------------------------------------------------------------------------------------------------


def test_inside_a_running_event_loop(store_uri: str, write: Callable[..., list[str]]) -> None:
    """The reader works inside a running event loop."""
    write(store_uri, ROOT)

    async def main() -> tuple[bool, int]:
        reader = MultiErrorFileOutputReader(store_uri)
        return reader.is_error(), len((await reader.job_async()).failures)

    assert asyncio.run(main()) == (True, 1)


def test_one_reader_in_many_threads(store_uri: str, write: Callable[..., list[str]]) -> None:
    """Eight threads that share a reader all get the same answer."""
    write(store_uri, ROOT, *VICTIMS)
    reader = MultiErrorFileOutputReader(store_uri)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = {future.result() for future in [pool.submit(reader.read_error) for _ in range(8)]}
    assert [answer.worker for answer in answers] == ["worker-1"]


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs ``firstfault show`` and returns its exit code, output and error output."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["show", *arguments])
        return (int(ended.value.code), *capsys.readouterr())

    return run


def test_the_command_shows_the_root_cause(
    store_uri: str, write: Callable[..., list[str]], show: Callable[..., tuple[int, str, str]]
) -> None:
    """The command exits with 10 and names the root cause, on every storage."""
    write(store_uri, ROOT, *VICTIMS)
    code, output, errors = show(store_uri)
    assert (code, errors) == (10, "")
    assert "rank 3 on worker-1" in output
    assert "the first fault" in output


@pytest.mark.parametrize("where", ["s3://no-such-place/run", "denied"])
def test_the_command_says_what_is_wrong_in_one_line(
    s3_environ: S3, show: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A refused request has exit code 1 and one line on stderr, not "no error" and no traceback."""
    if where == "denied":
        monkeypatch.setenv("FLYTE_AWS_SECRET_ACCESS_KEY", "guessed")
        where = s3_environ.uri()
    code, output, errors = show(where)
    assert (code, output) == (1, "")
    assert len(errors.splitlines()) == 1
    assert errors.startswith("firstfault: cannot list s3://")
    assert "check the" in errors
