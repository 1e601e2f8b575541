"""The recorder as a process: it uploads, answers, survives signals and its agent, and cleans up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from firstfault.errors import StoreError, UsageError
from firstfault.layout import error_key_for, roster_key_for
from firstfault.model import DocumentRef, NodePresence, Phase, Receipt, WorkerError, Writer
from firstfault.recorder import (
    NodeFolder,
    Recorder,
    RecorderProcess,
    RecorderUnavailableError,
    Spool,
    Target,
    server,
    start_recorder,
)
from firstfault.recorder.client import RECEIVED
from firstfault.recorder.folder import DOCUMENT, PRESENCE, Settings
from firstfault.recorder.process import IGNORED_SIGNALS
from firstfault.recorder.server import Uploads, _Server
from firstfault.testing import make_error, make_presence
from firstfault.wire.documents import decode, decode_presence, encode, encode_presence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HANG_S = 60.0
"""Longest wait for an expected event."""
SHORT_S = 0.5
"""A deadline that a test lets pass."""
TOLERANCE_S = 20.0
"""Tolerance on a deadline on a busy machine."""
ERRORS = "firstfault/errors"
ROSTER = "firstfault/roster"
_CLIENTS = 8


def until(what: str, condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"still not so: {what}"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; it may be a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@dataclass(frozen=True)
class Out:
    """An output prefix in a folder."""

    folder: Path

    @property
    def uri(self) -> str:
        """The output prefix."""
        return str(self.folder)

    def files(self, where: str = ERRORS) -> dict[str, bytes]:
        """Return the names of the files in one of its folders, sorted."""
        folder = self.folder / where
        files = sorted(folder.glob("*.pb")) if folder.is_dir() else []
        return {path.name: path.read_bytes() for path in files}

    def failures(self) -> list[WorkerError]:
        """Return its decoded documents."""
        found = [decode(data, DocumentRef(name)) for name, data in self.files().items()]
        return [failure for failure in found if isinstance(failure, WorkerError)]

    def roster(self) -> list[NodePresence]:
        """Return its roster entries."""
        return [decode_presence(data, name) for name, data in self.files(ROSTER).items()]


@pytest.fixture
def out(tmp_path: Path) -> Out:
    """Return an empty output prefix."""
    return Out(tmp_path / "out")


@pytest.fixture
def short() -> Iterator[str]:
    """Return a folder with a path that is short enough for a socket."""
    folder = tempfile.mkdtemp(prefix="ff-", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start(short: str) -> Iterator[Callable[..., RecorderProcess]]:
    """Start recorders, and kill those that are left after the test."""
    started: list[RecorderProcess] = []

    def run(uri: str, **options: object) -> RecorderProcess:
        process = start_recorder(uri, **{"deadline_seconds": HANG_S, "parent": short, **options})  # type: ignore[arg-type]
        started.append(process)
        return process

    yield run
    for process in started:
        if process.alive():
            os.kill(process.pid, signal.SIGKILL)
        process.end()


def with_modules(folder: Path) -> dict[str, str]:
    """Return this environment with one more folder on PYTHONPATH."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


@dataclass(frozen=True)
class Gate:
    """A storage, installed as an fsspec plug-in, whose writes wait until its gate is opened."""

    folder: Path

    def uri(self, out: Out) -> str:
        """Return the URI of an output prefix behind the gate."""
        return f"gated://{out.folder}"

    def environment(self) -> dict[str, str]:
        """Return an environment with this storage."""
        return {**with_modules(self.folder), "GATE": str(self.folder)}

    def waiting(self) -> int:
        """Return the number of writes that reached the gate."""
        return len(list(self.folder.glob("write-*")))

    def open(self) -> None:
        """Let all writes through."""
        (self.folder / "open").touch()


_GATED = """
import os, time, uuid
from pathlib import Path
from fsspec.implementations.local import LocalFileSystem

class Gated(LocalFileSystem):
    protocol = "gated"

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(path.removeprefix("gated://"))

    def pipe_file(self, path, value, **kwargs):
        gate = Path(os.environ["GATE"])
        (gate / f"write-{uuid.uuid4().hex}").touch()
        while not (gate / "open").exists():
            time.sleep(0.005)
        super().pipe_file(path, value, **kwargs)
"""


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Return a storage whose gate is closed."""
    folder = tmp_path / "plugins"
    (folder / "gated-1.0.dist-info").mkdir(parents=True)
    (folder / "gated-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: gated\nVersion: 1.0\n")
    (folder / "gated-1.0.dist-info" / "entry_points.txt").write_text("[fsspec.specs]\ngated = gated.Gated\n")
    (folder / "gated.py").write_text(_GATED)
    gate = Gate(folder)
    yield gate
    gate.open()


def spooled(process: RecorderProcess, name: str = "a.pb", data: bytes = b"said") -> Path:
    """Put a file into the spool of round 0, local rank 1."""
    return process.folder.spool("0-1").add(name, data)


def receipt_of(folder: NodeFolder, spool: str = "0-1") -> Receipt | None:
    """Return the receipt of the only document in a spool."""
    (document,) = folder.spool(spool).documents()
    return document.receipt


# --- uploads --------------------------------------------------------------------------------------------------------


def test_requests(
    start: Callable[..., RecorderProcess], out: Out, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is durable is in the storage before the answer; the receipts tell how long it took, or the reason."""
    process = start(out.uri)
    recorder = Recorder(process.folder)
    began = time.monotonic_ns()
    target = Target(f"{ERRORS}/b.pb", fault_monotonic_ns=began, rank=3)
    receipt = recorder.put(target, spooled(process, "b.pb"), HANG_S)
    took = time.monotonic_ns() - began
    assert out.files() == {"b.pb": b"said"}
    assert receipt == Receipt("b.pb", durable=True, fault_to_durable_ns=receipt.fault_to_durable_ns, rank=3)
    assert 0 < (receipt.fault_to_durable_ns or 0) <= took
    assert receipt_of(process.folder) == receipt
    # a file outside of a spool has no receipt file; a relative path is the client's, not the recorder's
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("entry.pb").write_bytes(b"joined")
    assert recorder.roster(HANG_S) == []
    for name in ("r.pb", "a.pb"):
        assert recorder.put(Target(f"{ROSTER}/{name}"), Path("entry.pb"), HANG_S) == Receipt(name, durable=True)
    assert out.files(ROSTER) == {"a.pb": b"joined", "r.pb": b"joined"}
    assert [path.name for path in Path().iterdir()] == ["entry.pb"]
    assert recorder.roster(HANG_S) == ["a.pb", "r.pb"]
    missing = recorder.put(Target(f"{ERRORS}/c.pb", rank=1), tmp_path / "c.pb", HANG_S)
    assert missing == Receipt("c.pb", durable=False, error=f"{tmp_path / 'c.pb'} could not be read", rank=1)
    report = recorder.resources(HANG_S)
    numbers = {"oom_kill", "memory_used_bytes", "memory_peak_bytes", "memory_limit_bytes", "watermark_ns"}
    assert (report.keys(), report["oom_kill"] in {None, 0}) == (numbers, True)


def test_many_at_once(start: Callable[..., RecorderProcess], out: Out, gate: Gate) -> None:
    """Eight uploads run concurrently."""
    process = start(gate.uri(out), environment=gate.environment())
    files = [spooled(process, f"{rank}.pb", str(rank).encode()) for rank in range(_CLIENTS)]

    def put(rank: int) -> Receipt:
        file = files[rank]
        return Recorder(process.folder).put(Target(f"{ERRORS}/{file.name}", rank=rank), file, HANG_S)

    with ThreadPoolExecutor(_CLIENTS) as pool:
        answers = pool.map(put, range(_CLIENTS))
        until("eight uploads at the gate", lambda: gate.waiting() == _CLIENTS)
        gate.open()
        assert list(answers) == [Receipt(f"{rank}.pb", durable=True, rank=rank) for rank in range(_CLIENTS)]
    assert out.files() == {f"{rank}.pb": str(rank).encode() for rank in range(_CLIENTS)}


@pytest.mark.parametrize(("slow_s", "uploads"), [(HANG_S, 1), (0.0, 2)])
def test_the_same_document_twice(slow_s: float, uploads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second request joins the upload in progress, and begins another one if that is slow."""
    monkeypatch.setattr(server, "SLOW_UPLOAD_S", slow_s)
    begun: list[str] = []

    async def serve() -> None:
        there = Uploads(str(tmp_path))
        both, first = asyncio.Event(), asyncio.Event()

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


def test_a_deadline_that_passes(
    start: Callable[..., RecorderProcess], out: Out, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client returns at its deadline; the recorder finishes the upload and writes the receipt to the spool."""
    monkeypatch.setattr("firstfault.recorder.client.RECEIVED_S", 4.0)
    process = start(gate.uri(out), environment=gate.environment())
    file = spooled(process)
    Recorder(process.folder).resources(HANG_S)  # it is up
    began = time.monotonic()
    receipt = Recorder(process.folder).put(Target(f"{ERRORS}/a.pb", rank=1), file, 8.0)
    assert 8.0 <= time.monotonic() - began < 8.0 + TOLERANCE_S
    assert receipt == Receipt("a.pb", durable=False, error="the storage did not answer within 8.0 s", rank=1)
    assert (out.files(), receipt_of(process.folder)) == ({}, None)
    gate.open()
    until("a receipt", lambda: receipt_of(process.folder) is not None)
    assert receipt_of(process.folder) == Receipt("a.pb", durable=True, rank=1)
    assert out.files() == {"a.pb": b"said"}


def test_a_recorder_that_is_frozen(start: Callable[..., RecorderProcess], out: Out) -> None:
    """The client reports it early enough for its caller to upload by itself; the recorder does the upload later."""
    process = start(out.uri)
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RecorderUnavailableError, match=r"did not answer within 0\.5 s"):
        Recorder(process.folder).put(Target(f"{ERRORS}/a.pb"), spooled(process), 1.0)
    assert time.monotonic() - began < SHORT_S + TOLERANCE_S
    with pytest.raises(RecorderUnavailableError, match=r"did not answer within 0\.1 s"):
        Recorder(process.folder).resources(0.2)
    os.kill(process.pid, signal.SIGCONT)
    until("the upload", lambda: "a.pb" in out.files())


@pytest.mark.parametrize(
    ("uri", "reason"),
    [("nosuch://bucket/run", "unknown storage scheme 'nosuch'"), ("/dev/null/run", "cannot write /dev/null/run")],
)
def test_a_storage_that_cannot_be(start: Callable[..., RecorderProcess], uri: str, reason: str) -> None:
    """The receipt tells why the storage cannot be opened, to the client and in the spool."""
    process = start(uri)
    receipt = Recorder(process.folder).put(Target(f"{ERRORS}/a.pb", rank=2), spooled(process), HANG_S)
    assert (receipt.durable, receipt.rank, receipt.fault_to_durable_ns) == (False, 2, None)
    assert reason in receipt.error
    assert receipt_of(process.folder) == receipt
    if uri.startswith("nosuch"):
        with pytest.raises(StoreError, match="nosuch"):
            Recorder(process.folder).roster(HANG_S)


# --- no recorder ----------------------------------------------------------------------------------------------------


def test_no_recorder(tmp_path: Path) -> None:
    """Without a recorder every request raises RecorderUnavailableError."""
    recorder = Recorder(NodeFolder(tmp_path))
    with pytest.raises(RecorderUnavailableError, match=str(tmp_path)):
        recorder.put(Target(f"{ERRORS}/a.pb"), tmp_path / "a.pb", HANG_S)
    with pytest.raises(RecorderUnavailableError):
        recorder.resources()
    with pytest.raises(RecorderUnavailableError):
        recorder.end()


@pytest.mark.parametrize("up", [True, False], ids=["up", "starting"])
def test_a_recorder_that_is_killed_while_one_waits(
    start: Callable[..., RecorderProcess], out: Out, gate: Gate, up: bool
) -> None:
    """A waiting client gets RecorderUnavailableError as soon as the recorder dies, before or after it accepts."""
    process = start(gate.uri(out), environment=gate.environment())
    if not up:
        os.kill(process.pid, signal.SIGSTOP)
    file = spooled(process)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(Recorder(process.folder).put, Target(f"{ERRORS}/a.pb"), file, HANG_S)
        if up:
            until("the upload at the gate", lambda: gate.waiting() == 1)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RecorderUnavailableError):
            asked.result()
    until("the recorder's end", lambda: not process.alive())
    with pytest.raises(RecorderUnavailableError):  # a socket without a listener
        Recorder(process.folder).put(Target(f"{ERRORS}/a.pb"), file, HANG_S)


@contextlib.contextmanager
def listening(folder: NodeFolder, backlog: int) -> Iterator[socket.socket]:
    """Listen on the recorder's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(folder.socket))
        listener.listen(backlog)
        yield listener


def test_an_answer_that_breaks_off(short: str) -> None:
    """Half an answer raises RecorderUnavailableError."""
    folder = NodeFolder(Path(short))
    with listening(folder, 1) as listener, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(Recorder(folder).resources, HANG_S)
        connection, _ = listener.accept()
        with connection:
            connection.recv(1024)
            connection.sendall(RECEIVED + b'{"oom_kill"')
        with pytest.raises(RecorderUnavailableError, match="without an answer"):
            asked.result()


def test_a_full_queue(short: str) -> None:
    """A client waits while the recorder's backlog is full, for half of its time: its caller may do without."""
    folder = NodeFolder(Path(short))
    with listening(folder, 0), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
        first.connect(str(folder.socket))
        began = time.monotonic()
        with pytest.raises(RecorderUnavailableError, match="did not answer"):
            Recorder(folder).put(Target(f"{ERRORS}/a.pb"), Path("a.pb"), SHORT_S)
        assert SHORT_S / 2 <= time.monotonic() - began < SHORT_S / 2 + TOLERANCE_S


# --- life and end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("up", [True, False], ids=["up", "starting"])
def test_signals_do_not_end_it(start: Callable[..., RecorderProcess], out: Out, up: bool) -> None:
    """Signals that terminate a pod do not end its recorder, not even during its start; the caller gets them again."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    process = start(out.uri)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    if up:
        Recorder(process.folder).resources(HANG_S)
    for number in IGNORED_SIGNALS:
        os.kill(process.pid, number)
    assert Recorder(process.folder).put(Target(f"{ERRORS}/a.pb"), spooled(process), HANG_S).durable
    assert process.alive()


def test_the_end(start: Callable[..., RecorderProcess], out: Out) -> None:
    """`end` removes process and folder and uploads no spooled document; a second call does nothing.

    The folder is private, and neither start nor requests leave a thread or an open file in the caller, which may fork.
    """
    descriptors, threads = set(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208 - names only
    process = start(out.uri)
    assert process.alive()
    assert process.folder.path.stat().st_mode & 0o777 == 0o700
    assert Recorder(process.folder).put(Target(f"{ERRORS}/a.pb"), spooled(process), HANG_S).durable
    assert set(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208 - as above
    assert threading.active_count() == threads
    spooled(process, "b.pb")
    process.folder.agent_spool.add("c.pb", b"held", held=True)
    process.folder.last_words.add(DOCUMENT, encode(make_error(None)))
    process.folder.last_words.add(PRESENCE, encode_presence(make_presence()))
    process.end(HANG_S)
    assert not process.alive()
    assert is_gone(process.pid)
    assert not process.folder.path.exists()
    assert list(out.files()) == ["a.pb"]
    assert out.roster() == []
    process.end()


def test_an_end_waits_for_what_is_in_hand(start: Callable[..., RecorderProcess], out: Out, gate: Gate) -> None:
    """An upload in progress finishes before the recorder exits."""
    process = start(gate.uri(out), environment=gate.environment())
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(Recorder(process.folder).put, Target(f"{ERRORS}/a.pb"), spooled(process), HANG_S)
        until("the upload at the gate", lambda: gate.waiting() == 1)
        ended = pool.submit(process.end, HANG_S)
        gate.open()
        ended.result()
        assert asked.result().durable
    assert out.files() == {"a.pb": b"said"}


def test_an_end_does_not_wait_for_ever(
    start: Callable[..., RecorderProcess], out: Out, gate: Gate, capfd: pytest.CaptureFixture[str]
) -> None:
    """A hanging upload is named on stderr, and the recorder exits."""
    process = start(gate.uri(out), environment=gate.environment())
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(Recorder(process.folder).put, Target(f"{ERRORS}/a.pb"), spooled(process), HANG_S)
        until("the upload at the gate", lambda: gate.waiting() == 1)
        process.end(HANG_S)
        with pytest.raises(RecorderUnavailableError):
            asked.result()
    assert not process.alive()
    assert not process.folder.path.exists()
    assert capfd.readouterr().err == (
        f"firstfault recorder: {ERRORS}/a.pb was not uploaded: the storage did not answer before the job ended\n"
    )


def test_an_end_of_a_frozen_recorder(start: Callable[..., RecorderProcess], out: Out) -> None:
    """A recorder that does not answer is killed after the timeout."""
    process = start(out.uri)
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    process.end(SHORT_S)
    assert time.monotonic() - began < SHORT_S + TOLERANCE_S
    assert not process.alive()
    assert not process.folder.path.exists()


def test_a_folder_too_deep_for_a_socket(
    start: Callable[..., RecorderProcess], out: Out, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long TMPDIR is ignored; a long `parent` raises a UsageError that gives the reason."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    process = start(out.uri, parent=None)
    assert process.folder.path.parent == Path("/tmp")  # noqa: S108 - what is expected
    Recorder(process.folder).resources(HANG_S)
    shutil.rmtree(process.folder.path)  # a recorder exits when its folder is gone
    until("the recorder's end", lambda: not process.alive())
    with pytest.raises(UsageError, match="107 bytes"):
        start(out.uri, parent=str(deep))
    assert list(deep.iterdir()) == []


def test_a_start_that_fails_leaves_no_folder(out: Out, short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process cannot be started, an OSError is raised and no folder is left."""
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        start_recorder(out.uri, deadline_seconds=1.0, parent=short)
    assert list(Path(short).iterdir()) == []


def test_modules_in_the_working_directory(
    start: Callable[..., RecorderProcess], out: Out, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A json.py in the working directory does not shadow the standard library's."""
    for name in ("json", "asyncio", "queue", "uuid"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported the wrong module')")
    monkeypatch.chdir(tmp_path)
    process = start(out.uri)
    assert Recorder(process.folder).put(Target(f"{ERRORS}/a.pb"), spooled(process), HANG_S).durable


_DEEP = b"[" * 50_000 + b"\n"
"""JSON that is nested too deep."""


def test_a_request_that_makes_no_sense(
    start: Callable[..., RecorderProcess], out: Out, capfd: pytest.CaptureFixture[str]
) -> None:
    """An invalid request gets no result, and the next request does."""
    process = start(out.uri)
    for line in (
        b"\n",
        b"not json\n",
        b"[]\n",
        b'{"op": "fly"}\n',
        b'{"op": "put"}\n',
        b"\xff\xfe\n",
        b"{" * 200_000,
        _DEEP,
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(HANG_S)
            connection.connect(str(process.folder.socket))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(line)
                connection.shutdown(socket.SHUT_WR)
                with connection.makefile("rb") as answer:
                    assert answer.read() in {b"", RECEIVED}
    Recorder(process.folder).resources(HANG_S)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("line", [_DEEP, b'{"op": "end", "seconds": 0}\n'])
def test_a_request_is_counted_until_its_end(line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any request, also one that raises, the recorder waits for no connection."""
    closed: list[bool] = []

    async def serve() -> None:
        server = _Server(NodeFolder(tmp_path), Settings(str(tmp_path), 1.0, os.getpid(), -1))
        monkeypatch.setattr(server, "_answer", _raise_what_nothing_catches)
        writer = SimpleNamespace(write=lambda _: None, close=lambda: closed.append(True))
        reader = asyncio.StreamReader()
        reader.feed_data(line)
        reader.feed_eof()
        with contextlib.suppress(AttributeError):
            await server._serve(reader, writer)
        assert server._connections == 0

    asyncio.run(serve())
    assert closed == [True]


async def _raise_what_nothing_catches(_: object) -> None:
    raise AttributeError


# --- the agent's death ----------------------------------------------------------------------------------------------

_AGENT = """
import sys
from firstfault.recorder import start_recorder
uri, parent, deadline = sys.argv[1:]
process = start_recorder(uri, deadline_seconds=float(deadline), parent=parent)
print(process.pid, process.folder.path, flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Agent:
    """A process that has started a recorder."""

    process: subprocess.Popen[str]
    recorder_pid: int
    folder: NodeFolder

    def kill(self) -> None:
        """Kill it with SIGKILL, as the OOM killer does."""
        self.process.kill()
        self.process.wait(HANG_S)

    def wait_for_recorder(self) -> None:
        """Wait until the recorder has ended and its folder is gone."""
        until("the recorder's end", lambda: is_gone(self.recorder_pid))
        assert not self.folder.path.exists()


@pytest.fixture
def agent(short: str) -> Iterator[Callable[..., Agent]]:
    """Start agents, and kill those that are left after the test, with their recorders."""
    started: list[Agent] = []

    def run(uri: str, environment: dict[str, str] | None = None, deadline_seconds: float = HANG_S) -> Agent:
        process = subprocess.Popen(
            [sys.executable, "-c", _AGENT, uri, short, str(deadline_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.stdout is not None
        pid, _, folder = process.stdout.readline().strip().partition(" ")
        if not pid:
            process.communicate()
            pytest.fail(f"the agent ended with {process.returncode}")
        started.append(Agent(process, int(pid), NodeFolder(Path(folder))))
        return started[-1]

    yield run
    for one in started:
        # first the recorder, which keeps the pipe to us open
        if not is_gone(one.recorder_pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.recorder_pid, signal.SIGKILL)
        one.process.kill()
        with one.process:  # which closes its pipes and waits for it
            pass


@pytest.fixture
def without_pidfd(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which Python has no pidfd_open."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os\ndel os.pidfd_open\n")
    return with_modules(tmp_path / "site")


def write_last_words(folder: NodeFolder, round_number: int = 1) -> None:
    """Write the documents that an agent writes at the start of a round."""
    lost = make_error(None, at_ms=None, exception=None, message="the agent died", round=round_number)
    folder.last_words.add(DOCUMENT, encode(lost))
    folder.last_words.add(PRESENCE, encode_presence(make_presence(ranks=(0, 1), round=round_number, timestamp_ns=None)))


def spool_failure(spool: Spool, rank: int, *, held: bool = False, round_number: int = 1) -> str:
    """Spool a worker's document and return its name."""
    failure = make_error(rank, round=round_number, monotonic_ns=time.monotonic_ns())
    name = error_key_for(failure)
    spool.add(name, encode(failure), held=held)
    return name


@pytest.mark.parametrize("kernel_tells", [True, False], ids=["pidfd", "polled"])
def test_an_agent_that_is_killed(
    agent: Callable[..., Agent], out: Out, without_pidfd: dict[str, str], kernel_tells: bool
) -> None:
    """The recorder uploads the agent's death, the spooled documents and the roster entry with receipts, and exits."""
    dying = agent(out.uri, None if kernel_tells else without_pidfd)
    folder = dying.folder
    write_last_words(folder)
    open_name = spool_failure(folder.spool("1-0"), 0)
    held_name = spool_failure(folder.spool("1-1"), 1, held=True)
    done_name = spool_failure(folder.spool("1-2"), 2)
    done = Receipt(done_name, durable=True, fault_to_durable_ns=7, rank=2)
    folder.spool("1-2").add_receipt(done)
    withdrawn_name = spool_failure(folder.spool("1-3"), 3)
    folder.spool("1-3").withdraw(withdrawn_name)
    earlier_name = spool_failure(folder.spool("0-0"), 0, round_number=0)
    joined = make_presence(Phase.JOINED, round=1)
    folder.spool("roster").add(roster_key_for(joined), encode_presence(joined))
    Recorder(folder).resources(HANG_S)

    before_ns, before_monotonic_ns = time.time_ns(), time.monotonic_ns()
    dying.kill()
    dying.wait_for_recorder()
    after_ns = time.time_ns()

    (own,) = [failure for failure in out.failures() if failure.writer is Writer.RECORDER]
    assert before_ns <= (own.timestamp_ns or 0) <= after_ns
    assert (own.monotonic_ns or 0) >= before_monotonic_ns
    assert (own.message, own.place.round, own.rank) == ("the agent died", 1, None)
    assert own.resources.oom_kill in {None, 0}
    own_name = own.documents[0].name
    assert set(out.files()) == {own_name, open_name, held_name, earlier_name}

    entries = {entry.phase: entry for entry in out.roster()}
    assert entries.keys() == {Phase.JOINED, Phase.FAILED}
    last = entries[Phase.FAILED]
    assert (last.ranks, last.place.round) == ((0, 1), 1)
    assert before_ns <= (last.timestamp_ns or 0) <= after_ns
    receipts = {receipt.name: receipt for receipt in last.receipts}
    assert receipts.keys() == {own_name, open_name, held_name, done_name, withdrawn_name}
    assert receipts[done_name] == done
    assert (receipts[withdrawn_name].durable, receipts[withdrawn_name].withdrawn) == (False, True)
    for name, rank in ((own_name, None), (open_name, 0), (held_name, 1)):
        assert (receipts[name].durable, receipts[name].rank) == (True, rank)
        assert (receipts[name].fault_to_durable_ns or 0) > 0


def test_a_process_that_outlives_a_killed_agent(
    agent: Callable[..., Agent], out: Out, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its stderr is read after the recorder's end, too, so it gets no EPIPE; a FIFO without a writer keeps nothing."""
    dying = agent(out.uri)
    written, unused = dying.folder.path / "stderr-0-0.fifo", dying.folder.path / "stderr-0-1.fifo"
    os.mkfifo(written)
    os.mkfifo(unused)
    reader = os.open(written, os.O_RDONLY | os.O_NONBLOCK)  # the agent's
    writer = os.open(written, os.O_WRONLY)
    dying.kill()
    dying.wait_for_recorder()
    os.close(reader)
    said: list[str] = []
    for text in (b"x" * 200_000, b"the end\n"):  # more than a FIFO holds
        assert os.write(writer, text) == len(text)
    os.close(writer)
    until("its last words", lambda: said.append(capfd.readouterr().err) or "".join(said).endswith("the end\n"))
    assert "".join(said).count("x") == 200_000


def test_an_agent_that_exits_without_ending_its_recorder(agent: Callable[..., Agent], out: Out) -> None:
    """It counts as dead, also if it ended before its recorder began to watch."""
    dying = agent(out.uri)
    os.kill(dying.recorder_pid, signal.SIGSTOP)
    write_last_words(dying.folder)
    assert dying.process.stdin is not None
    dying.process.stdin.close()
    dying.process.wait(HANG_S)
    os.kill(dying.recorder_pid, signal.SIGCONT)
    dying.wait_for_recorder()
    assert [failure.writer for failure in out.failures()] == [Writer.RECORDER]
    assert len(out.roster()) == 1


def test_bytes_that_are_no_document(agent: Callable[..., Agent], out: Out, capfd: pytest.CaptureFixture[str]) -> None:
    """Unreadable documents are uploaded as they are; an unreadable document about the agent affects no other.

    Before an agent's first round there is none about it, and no roster entry.
    """
    dying = agent(out.uri)
    write_last_words(dying.folder)
    dying.folder.last_words.add(DOCUMENT, b"\xff\xff\xff")
    dying.folder.spool("0-0").add("strange.pb", b"\xff\xff\xff")
    dying.kill()
    dying.wait_for_recorder()
    assert list(out.files()) == ["strange.pb"]
    assert [receipt.name for receipt in out.roster()[0].receipts] == ["strange.pb"]
    assert f"{DOCUMENT} is not an error document" in capfd.readouterr().err
    early = agent(f"{out.uri}/early")
    early.folder.agent_spool.add("own.pb", b"\xff")
    early.kill()
    early.wait_for_recorder()
    other = Out(out.folder / "early")
    assert (list(other.files()), other.roster()) == (["own.pb"], [])


def test_a_death_with_a_storage_that_fails(
    agent: Callable[..., Agent], out: Out, capfd: pytest.CaptureFixture[str]
) -> None:
    """The roster entry and the log tell which uploads failed and why."""
    (out.folder / "firstfault").mkdir(parents=True)
    (out.folder / ERRORS).touch()
    dying = agent(out.uri)
    write_last_words(dying.folder)
    name = spool_failure(dying.folder.spool("1-0"), 0)
    dying.kill()
    dying.wait_for_recorder()
    (entry,) = out.roster()
    assert [receipt.durable for receipt in entry.receipts] == [False, False]
    assert all("cannot write" in receipt.error for receipt in entry.receipts)
    assert f"firstfault recorder: {name} was not uploaded: cannot write" in capfd.readouterr().err


def test_a_death_with_a_storage_that_hangs(
    agent: Callable[..., Agent], out: Out, gate: Gate, capfd: pytest.CaptureFixture[str]
) -> None:
    """The recorder of a dead agent waits for the storage until its deadline, and names the lost documents."""
    dying = agent(gate.uri(out), gate.environment(), SHORT_S)
    write_last_words(dying.folder)
    name = spool_failure(dying.folder.spool("1-0"), 0)
    dying.kill()
    dying.wait_for_recorder()
    lines = capfd.readouterr().err.splitlines()
    assert f"firstfault recorder: {name} was not uploaded: the storage did not answer within 0.5 s" in lines
    assert len(lines) == 3  # the document about the agent, the worker's, and the roster entry


def test_a_worker_that_dies_with_its_agent(agent: Callable[..., Agent], out: Out, gate: Gate) -> None:
    """The recorder of a dead agent still answers its workers."""
    dying = agent(gate.uri(out), gate.environment())
    write_last_words(dying.folder)
    dying.kill()
    until("the last words at the gate", lambda: gate.waiting() == 1)
    name = spool_failure(dying.folder.spool("1-0"), 0)
    file = dying.folder.spool("1-0").folder / name
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(Recorder(dying.folder).put, Target(f"{ERRORS}/{name}"), file, HANG_S)
        until("the worker's document at the gate", lambda: gate.waiting() == 2)
        gate.open()
        assert asked.result().durable
    dying.wait_for_recorder()
    assert name in out.files()
    assert len(out.failures()) == 2


def test_a_worker_that_asks_late(agent: Callable[..., Agent], out: Out) -> None:
    """The recorder of a dead agent waits a moment for late requests of workers."""
    dying = agent(out.uri)
    write_last_words(dying.folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(HANG_S)
        connection.connect(str(dying.folder.socket))
        Recorder(dying.folder).resources(HANG_S)  # accepted after ours
        dying.kill()
        until("the roster entry", lambda: bool(out.roster()))
        connection.sendall(b'{"op": "resources"}\n')
        with connection.makefile("rb") as answer:
            assert b"oom_kill" in answer.read()
    dying.wait_for_recorder()


# --- what it costs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["client", "folder"])
def test_a_dying_process_imports_next_to_nothing(module: str) -> None:
    """The client imports neither storage, protobuf, asyncio nor the server."""
    heavy = ("asyncio", "fsspec", "google.protobuf", "flyteidl", "stamina", "subprocess", "tempfile", "ssl")
    heavy += (
        "firstfault.wire.documents",
        "firstfault.store",
        "firstfault.recorder.process",
        "firstfault.recorder.server",
    )
    # an installed package may import some at every start of Python
    code = (
        f"import sys; before = set(sys.modules); import firstfault.recorder.{module}; after = set(sys.modules) - before"
    )
    code += f"; print([name for name in {heavy!r} if name in after])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert ran.stdout.strip() == "[]"
