"""The recorder as a process: it uploads, answers, survives signals, and cleans up."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from firstfault.errors import RecorderUnavailableError, StoreError
from firstfault.layout import ERRORS, ROSTER
from firstfault.model import Receipt
from firstfault.recorder import uploads as uploads_module
from firstfault.recorder.client import RECEIVED, RecorderClient, Target
from firstfault.recorder.folder import DEATH_DOCUMENT, DEATH_ROSTER_ENTRY, NodeFolder
from firstfault.recorder.process import IGNORED_SIGNALS, RecorderProcess
from firstfault.recorder.uploads import Uploads
from firstfault.testing import make_error, make_presence
from firstfault.wire.documents import encode, encode_presence
from tests.prefix import Prefix
from tests.processes import is_gone
from tests.readers.recorders import HANG_S, SHORT_S, TOLERANCE_S, Gate, Start
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

_CLIENTS = 8


def spooled(process: RecorderProcess, name: str = "a.pb", data: bytes = b"said") -> Path:
    """Put a file into the spool of round 0, local rank 1."""
    return process.folder.spool("0-1").add(name, data)


def put(
    process: RecorderProcess,
    file: Path | None = None,
    rank: int | None = None,
    seconds: float = HANG_S,
) -> Receipt:
    """Upload a file, a spooled one by default, under its own name."""
    file = file or spooled(process)
    return RecorderClient(process.folder).put(
        Target(f"{ERRORS}/{file.name}", rank=rank), file, seconds
    )


def receipt_of(folder: NodeFolder, spool: str = "0-1") -> Receipt | None:
    (document,) = folder.spool(spool).documents()
    return document.receipt


# --- uploads --------------------------------------------------------------------------------------


def test_an_answer_means_the_document_is_in_the_storage(
    start: Start,
    out: Prefix,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is durable is in the storage before the answer; the receipts tell how long it took,
    or the reason.
    """
    process = start(out.uri)
    recorder = RecorderClient(process.folder)
    began = time.monotonic_ns()
    target = Target(f"{ERRORS}/b.pb", fault_monotonic_ns=began, rank=3)
    receipt = recorder.put(target, spooled(process, "b.pb"), HANG_S)
    took = time.monotonic_ns() - began
    assert out.files() == {"b.pb": b"said"}
    assert receipt == Receipt(
        "b.pb",
        durable=True,
        fault_to_durable_ns=receipt.fault_to_durable_ns,
        rank=3,
    )
    assert 0 < (receipt.fault_to_durable_ns or 0) <= took
    assert receipt_of(process.folder) == receipt
    # a file outside of a spool has no receipt file; a relative path is the client's, not the
    # recorder's
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("entry.pb").write_bytes(b"joined")
    assert recorder.roster(HANG_S) == []
    for name in ("r.pb", "a.pb"):
        assert recorder.put(Target(f"{ROSTER}/{name}"), Path("entry.pb"), HANG_S) == Receipt(
            name, durable=True
        )
    assert out.files(ROSTER) == {"a.pb": b"joined", "r.pb": b"joined"}
    assert [path.name for path in Path().iterdir()] == ["entry.pb"]
    assert recorder.roster(HANG_S) == ["a.pb", "r.pb"]
    missing = recorder.put(Target(f"{ERRORS}/c.pb", rank=1), tmp_path / "c.pb", HANG_S)
    assert missing == Receipt(
        "c.pb",
        durable=False,
        error=f"{tmp_path / 'c.pb'} could not be read",
        rank=1,
    )
    report = recorder.resources(HANG_S)
    assert report.oom_kill in {None, 0}
    assert report.memory_used_bytes is None or report.memory_used_bytes > 0


def test_eight_uploads_run_concurrently(start: Start, out: Prefix, gate: Gate) -> None:
    """Eight uploads run concurrently."""
    process = start(gate.uri(out))
    files = [spooled(process, f"{rank}.pb", str(rank).encode()) for rank in range(_CLIENTS)]
    with ThreadPoolExecutor(_CLIENTS) as pool:
        answers = pool.map(lambda rank: put(process, files[rank], rank), range(_CLIENTS))
        wait_until(lambda: gate.waiting() == _CLIENTS, "eight uploads at the gate")
        gate.open()
        assert list(answers) == [
            Receipt(f"{rank}.pb", durable=True, rank=rank) for rank in range(_CLIENTS)
        ]
    assert out.files() == {f"{rank}.pb": str(rank).encode() for rank in range(_CLIENTS)}


@pytest.mark.parametrize(("slow_s", "uploads"), [(HANG_S, 1), (0.0, 2)])
def test_a_second_request_joins_the_upload_in_progress(
    slow_s: float,
    uploads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second request joins the upload in progress, and begins another one if that is slow."""
    monkeypatch.setattr(uploads_module, "SLOW_UPLOAD_SECONDS", slow_s)
    begun: list[str] = []

    async def serve() -> None:
        there = Uploads(str(tmp_path))
        both = asyncio.Event()
        first = asyncio.Event()

        async def put(path: str, _: bytes) -> None:
            begun.append(path)
            first.set()
            await both.wait()

        there._store = SimpleNamespace(put=put)
        there._warm.set()
        requests = [asyncio.create_task(there.put(Target("errors/a.pb"), b"said"))]
        await first.wait()
        requests.append(asyncio.create_task(there.put(Target("errors/a.pb"), b"said")))
        while len(begun) < uploads:  # noqa: ASYNC110 - an event would be set before
            await asyncio.sleep(0)
        both.set()
        assert [receipt.durable for receipt in await asyncio.gather(*requests)] == [True, True]

    asyncio.run(serve())
    assert len(begun) == uploads


@pytest.mark.parametrize("slow_s", [HANG_S, 0.0], ids=["soon", "slow"])
def test_newer_content_replaces_the_older_whichever_ends_last(
    slow_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces the older content, although that is still being uploaded,
    and even if that ends last.
    """
    monkeypatch.setattr(uploads_module, "SLOW_UPLOAD_SECONDS", slow_s)
    stored: dict[str, bytes] = {}

    async def serve() -> None:
        there = Uploads(str(tmp_path))
        begun = asyncio.Event()
        slow = asyncio.Event()

        async def put(path: str, data: bytes) -> None:
            begun.set()
            if data == b"older":
                await slow.wait()
            stored[path] = data

        there._store = SimpleNamespace(put=put)
        there._warm.set()
        older = asyncio.create_task(there.put(Target("deck.html"), b"older"))
        await begun.wait()
        newer = asyncio.create_task(there.put(Target("deck.html"), b"newer"))
        # it doesn't wait for the older upload
        while not slow_s and not newer.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        slow.set()
        assert [receipt.durable for receipt in await asyncio.gather(older, newer)] == [True, True]
        await there.drain(HANG_S)

    asyncio.run(serve())
    assert stored == {"deck.html": b"newer"}


def test_an_upload_finishes_after_the_clients_deadline(
    start: Start, out: Prefix, gate: Gate
) -> None:
    """The client returns at its deadline; the recorder finishes the upload and writes
    the receipt to the spool.
    """
    process = start(gate.uri(out))
    file = spooled(process)
    RecorderClient(process.folder).resources(HANG_S)  # it is up
    began = time.monotonic()
    receipt = put(process, file, 1, 3.0)
    assert 3.0 <= time.monotonic() - began < 3.0 + TOLERANCE_S
    assert receipt == Receipt(
        "a.pb",
        durable=False,
        error="the storage did not answer within 3.0 s",
        rank=1,
    )
    assert (out.files(), receipt_of(process.folder)) == ({}, None)
    gate.open()
    wait_until(lambda: receipt_of(process.folder) is not None, "a receipt")
    assert receipt_of(process.folder) == Receipt("a.pb", durable=True, rank=1)
    assert out.files() == {"a.pb": b"said"}


def test_a_frozen_recorder_is_reported_in_time_for_an_own_upload(start: Start, out: Prefix) -> None:
    """The client reports it early enough for its caller to upload by itself;
    the recorder does the upload later.
    """
    process = start(out.uri)
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RecorderUnavailableError, match=r"did not answer within 0\.5 s"):
        put(process, seconds=1.0)
    assert time.monotonic() - began < SHORT_S + TOLERANCE_S
    with pytest.raises(RecorderUnavailableError, match=r"did not answer within 0\.1 s"):
        RecorderClient(process.folder).resources(0.2)
    os.kill(process.pid, signal.SIGCONT)
    wait_until(lambda: "a.pb" in out.files(), "the upload")


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("nosuch://bucket/run", "unknown storage scheme 'nosuch'"),
        ("/dev/null/run", "cannot write /dev/null/run"),
    ],
)
def test_the_receipt_says_why_the_storage_cannot_be_opened(
    start: Start, uri: str, reason: str
) -> None:
    """The receipt tells why the storage cannot be opened, to the client and in the spool."""
    process = start(uri)
    receipt = put(process, rank=2)
    assert (receipt.durable, receipt.rank, receipt.fault_to_durable_ns) == (False, 2, None)
    assert reason in receipt.error
    assert receipt_of(process.folder) == receipt
    if uri.startswith("nosuch"):
        with pytest.raises(StoreError, match="nosuch"):
            RecorderClient(process.folder).roster(HANG_S)


# --- no recorder ----------------------------------------------------------------------------------


def test_without_a_recorder_every_request_raises(tmp_path: Path) -> None:
    """Without a recorder every request raises RecorderUnavailableError."""
    recorder = RecorderClient(NodeFolder(tmp_path))
    target = Target(f"{ERRORS}/a.pb")
    asked = (
        lambda: recorder.put(target, tmp_path / "a.pb", HANG_S),
        lambda: recorder.resources(HANG_S),
        recorder.end,
    )
    for ask in asked:
        with pytest.raises(RecorderUnavailableError, match=str(tmp_path)):
            ask()


@pytest.mark.parametrize("up", [True, False], ids=["up", "starting"])
def test_a_waiting_client_notices_a_killed_recorder_at_once(
    start: Start,
    out: Prefix,
    gate: Gate,
    up: bool,
) -> None:
    """A waiting client gets RecorderUnavailableError as soon as the recorder dies,
    before or after it accepts.
    """
    process = start(gate.uri(out))
    if not up:
        os.kill(process.pid, signal.SIGSTOP)
    file = spooled(process)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(put, process, file)
        if up:
            wait_until(lambda: gate.waiting() == 1, "the upload at the gate")
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RecorderUnavailableError):
            asked.result()
    wait_until(lambda: not process.alive(), "the recorder's end")
    with pytest.raises(RecorderUnavailableError):  # a socket without a listener
        put(process, file)


def test_half_an_answer_is_none_and_a_full_backlog_is_bounded(short: str) -> None:
    """Half an answer is none; while the backlog is full a client waits for half of its time:
    it may do without.
    """
    folder = NodeFolder(Path(short))
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        ThreadPoolExecutor(1) as pool,
    ):
        listener.bind(str(folder.socket))
        listener.listen(0)
        asked = pool.submit(RecorderClient(folder).resources, HANG_S)
        connection, _ = listener.accept()
        with connection:
            connection.recv(1024)
            connection.sendall(RECEIVED + b'{"oom_kill"')
        with pytest.raises(RecorderUnavailableError, match="without an answer"):
            asked.result()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            first.connect(str(folder.socket))
            began = time.monotonic()
            with pytest.raises(RecorderUnavailableError, match="did not answer"):
                RecorderClient(folder).put(Target(f"{ERRORS}/a.pb"), Path("a.pb"), SHORT_S)
            assert SHORT_S / 2 <= time.monotonic() - began < SHORT_S / 2 + TOLERANCE_S


# --- life and end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("up", [True, False], ids=["up", "starting"])
def test_signals_do_not_end_the_recorder(start: Start, out: Prefix, up: bool) -> None:
    """Signals that terminate a pod do not end its recorder, not even during its start;
    the caller gets them again.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    process = start(out.uri)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    if up:
        RecorderClient(process.folder).resources(HANG_S)
    for number in IGNORED_SIGNALS:
        os.kill(process.pid, number)
    assert put(process).durable
    assert process.alive()


def test_end_removes_process_and_folder_once(start: Start, out: Prefix) -> None:
    """`end` removes process and folder and uploads no spooled document;
    a second call does nothing.
    """
    descriptors, threads = (
        set(os.listdir("/proc/self/fd")),  # noqa: PTH208 - names only
        threading.active_count(),
    )
    process = start(out.uri)
    assert process.alive()
    assert process.folder.path.stat().st_mode & 0o777 == 0o700
    assert put(process).durable
    # as above
    assert len(os.listdir("/proc/self/fd")) == len(descriptors) + 1, "the lock"  # noqa: PTH208
    assert threading.active_count() == threads
    spooled(process, "b.pb")
    process.folder.agent_spool.add("c.pb", b"spooled")
    process.folder.last_words.add(DEATH_DOCUMENT, encode(make_error(None)))
    process.folder.last_words.add(DEATH_ROSTER_ENTRY, encode_presence(make_presence()))
    process.end(HANG_S)
    assert not process.alive()
    assert is_gone(process.pid)
    assert not process.folder.path.exists()
    assert set(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208 - as above
    assert list(out.files()) == ["a.pb"]
    assert out.roster() == []
    process.end()


@pytest.mark.parametrize("hangs", [False, True])
def test_an_upload_in_progress_finishes_before_the_exit(
    start: Start,
    out: Prefix,
    gate: Gate,
    hangs: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """An upload in progress finishes before the recorder exits;
    one that hangs is named on stderr.
    """
    process = start(gate.uri(out))
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(put, process)
        wait_until(lambda: gate.waiting() == 1, "the upload at the gate")
        ended = pool.submit(process.end, HANG_S)
        if not hangs:
            gate.open()
        ended.result()
        assert (type(asked.exception()) is RecorderUnavailableError) is hangs
    assert out.files() == ({} if hangs else {"a.pb": b"said"})
    assert not process.alive()
    assert not process.folder.path.exists()
    reason = "was not uploaded: the storage did not answer before the job ended"
    assert capfd.readouterr().err == (
        f"firstfault: recorder: {ERRORS}/a.pb {reason}\n" if hangs else ""
    )


def test_a_frozen_recorder_is_killed_after_the_timeout(start: Start, out: Prefix) -> None:
    """A recorder that does not answer is killed after the timeout."""
    process = start(out.uri)
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    process.end(SHORT_S)
    assert time.monotonic() - began < SHORT_S + TOLERANCE_S
    assert not process.alive()
    assert not process.folder.path.exists()


def test_a_folder_too_deep_for_a_socket_is_ignored(
    start: Start,
    out: Prefix,
    short: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long TMPDIR is ignored. If the process cannot be started,
    an OSError is raised and no folder is left.
    """
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(deep))
        process = start(out.uri)
    assert process.folder.path.parent == Path("/tmp")  # noqa: S108 - what is expected
    RecorderClient(process.folder).resources(HANG_S)
    process.end()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        start(out.uri)
    assert list(Path(short).iterdir()) == []


def test_modules_in_the_working_directory_shadow_nothing(
    start: Start,
    out: Prefix,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A json.py in the working directory does not shadow the standard library's."""
    for name in ("json", "asyncio", "queue", "uuid"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported the wrong module')")
    monkeypatch.chdir(tmp_path)
    process = start(out.uri)
    assert put(process).durable


def test_an_invalid_request_blocks_neither_requests_nor_the_end(
    start: Start, out: Prefix, capfd: pytest.CaptureFixture[str]
) -> None:
    """An invalid request gets no result, the next request does,
    and the recorder's end waits for none of them.
    """
    process = start(out.uri)
    broken = (
        b"",
        b"not json",
        b"[]",
        b'{"op": "fly"}',
        b'{"op": "put"}',
        b"\xff\xfe",
        b"[" * 50_000,
    )
    for line in (*(line + b"\n" for line in broken), b"{" * 200_000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(HANG_S)
            connection.connect(str(process.folder.socket))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(line)
                connection.shutdown(socket.SHUT_WR)
                with connection.makefile("rb") as answer:
                    assert answer.read() in {b"", RECEIVED}
    RecorderClient(process.folder).resources(HANG_S)
    began = time.monotonic()
    process.end(HANG_S)
    assert time.monotonic() - began < HANG_S / 2
    assert capfd.readouterr().err == ""
