"""Recording a failure: durable within its deadline or reported as lost,
and harmless to the user's code.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler

from firstfault.errors import StoreError
from firstfault.exceptions.first_cause import find_own_frames
from firstfault.model import (
    DocumentRef,
    ExceptionInfo,
    Kind,
    Resources,
    Subject,
    WorkerError,
    Writer,
)
from firstfault.recorder.client import RecorderClient
from firstfault.recorder.spool import Spool
from firstfault.testing import make_error
from firstfault.wire.documents import decode
from firstfault_torch import time_limits
from firstfault_torch.engine import PlainEngine, RecoverableError
from firstfault_torch.guard import suppress_internal_errors
from firstfault_torch.node import document_writer as recorder
from firstfault_torch.node_context import NodeContext
from firstfault_torch.worker import worker_monitor as worker
from firstfault_torch.worker.worker_monitor import (
    WorkerMonitor,
    current_monitor,
    recorded,
    run_recorded,
)
from tests.prefix import Prefix
from tests.recordings import make_node_context
from tests.waiting import run_in_thread

pytestmark = pytest.mark.slow

TOLERANCE_S = 30.0
"""How much longer than its deadline a recording may take on a busy machine; what hangs,
hangs for longer.
"""
LONG_S = 60.0


@pytest.fixture(autouse=True)
def _nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for the threads that a deadline left running,
    so that they do not end in another test.
    """
    monkeypatch.setattr(time_limits, "PARENT_DEATH_TIMEOUT_SECONDS", 0.0)
    yield
    _await_uploads()


def _await_uploads() -> None:
    for thread in threading.enumerate():
        if thread.name == "firstfault-call":
            thread.join(LONG_S)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return a URI of a storage that takes a request and never answers."""
    release = threading.Event()
    monkeypatch.setattr(recorder, "_write_file", lambda *_: release.wait(2 * LONG_S))
    yield "s3://bucket/attempt"
    release.set()


@pytest.fixture
def blocked(prefix: Prefix) -> str:
    """Return an output prefix with a file in the place of the folder."""
    prefix.errors.parent.mkdir(parents=True)
    prefix.errors.touch()
    return prefix.uri


@pytest.fixture
def as_worker(
    prefix: Prefix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """Make this process look like rank 1 of a node; return its error.json's path."""

    def become(uri: str = prefix.uri, deadline_seconds: float = LONG_S) -> Path:
        node_context = make_node_context(
            uri, deadline_seconds, node="worker-0", round=2, incarnation=7
        )
        error_file = tmp_path / "1" / "error.json"
        error_file.parent.mkdir(exist_ok=True)
        ranks = {"RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "WORLD_SIZE": "2"}
        for name, value in {
            **node_context.to_environment(),
            **ranks,
            "TORCHELASTIC_ERROR_FILE": str(error_file),
        }.items():
            monkeypatch.setenv(name, value)
        return error_file

    return become


@pytest.fixture(autouse=True)
def error_file(as_worker: Callable[..., Path]) -> Path:
    """Make this process look like rank 1 of a node, also for tests that do not care;
    return its error.json's path.
    """
    return as_worker()


def _failure(**fields: Any) -> WorkerError:
    return make_error(1, monotonic_ns=time.monotonic_ns(), **fields)


# --- where documents wait -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error_file", "there"),
    [(None, False), ("", False), ("/dev/null", False), ("/job/0/error.json", True)],
)
def test_the_spool_is_in_the_nodes_folder(
    error_file: str | None,
    there: bool,
    prefix: Prefix,
    tmp_path: Path,
) -> None:
    """It lies in the node's folder, without a recorder beside torch's error.json;
    without an agent there is none.
    """
    spool = recorder.open_worker_spool(prefix.node_context(), 1, error_file)
    assert (spool is not None) is there
    assert spool is None or str(spool.folder) == "/job/0/firstfault"
    assert recorder.spool_for_agent(prefix.node_context()) is None
    node_context = replace(prefix.node_context(), round=2, node_folder=str(tmp_path))
    spools = (
        recorder.open_worker_spool(node_context, 1, error_file),
        recorder.spool_for_agent(node_context),
    )
    assert [spool and spool.folder for spool in spools] == [
        tmp_path / "spool" / "2-1",
        tmp_path / "spool" / "agent",
    ]


# --- one document ---------------------------------------------------------------------------------


def test_a_failing_store_is_logged_once(
    blocked: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The agent, and not its workers, logs the first document that can't be uploaded;
    further ones, and other failures of the same folder, only for debugging.
    """
    recorder.record_error(_failure(), make_node_context(blocked), Spool(tmp_path / "spool"), LONG_S)
    assert caplog.messages == []
    monkeypatch.delenv("FIRSTFAULT_AGENT")
    for _ in range(3):
        recorder.record_error(
            _failure(), make_node_context(blocked), Spool(tmp_path / "spool"), LONG_S
        )
    with suppress_internal_errors("reading"):
        raise StoreError(f"cannot read {blocked}/firstfault/errors")
    with suppress_internal_errors("reading"):
        raise StoreError("cannot read another folder")
    first, other = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("firstfault") and record.levelno >= logging.WARNING
    ]
    assert f" in {blocked} was not uploaded: " in first
    assert "another folder" in other


@pytest.mark.parametrize("store", ["hanging", "blocked"])
def test_a_failed_upload_stays_in_the_spool(
    store: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A failed upload keeps its deadline; receipt and log report it,
    and the spool keeps the document.
    """
    monkeypatch.delenv("FIRSTFAULT_AGENT")  # which logs for its workers
    uri = request.getfixturevalue(store)
    spool = Spool(tmp_path / "spool")
    began = time.monotonic()
    seconds = 1 if store == "hanging" else LONG_S  # a busy machine may load the client for a second
    _, receipt = recorder.record_error(_failure(), make_node_context(uri), spool, seconds)
    assert time.monotonic() - began < seconds + TOLERANCE_S
    (line,) = [record for record in caplog.records if record.name.startswith("firstfault")]
    assert not receipt.durable
    assert receipt.fault_to_durable_ns is None
    text = line.getMessage()
    assert text.startswith(f"firstfault: a document in {uri} was not uploaded: ")
    assert len(text) < len(uri) + 300
    # a slow disk, on which the document is spooled first, may have taken a part of the second
    assert (
        "cannot write" if store == "blocked" else "the storage did not answer within "
    ) in receipt.error
    (spooled,) = spool.documents()
    assert spooled.receipt == receipt


def test_a_hanging_disk_and_storage_share_one_deadline(
    hanging: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the node's disk hangs as well as the storage, the wait is one deadline,
    not one for each.
    """
    release = threading.Event()
    monkeypatch.setattr(Spool, "add", lambda *_, **__: release.wait(2 * LONG_S))
    began = time.monotonic()
    _, receipt = recorder.record_error(_failure(), make_node_context(hanging), Spool(tmp_path), 1)
    took = time.monotonic() - began
    release.set()
    assert receipt.error == "the storage did not answer within 0.0 s", (
        "the disk has taken all the time"
    )
    assert 1 <= took < 1 + TOLERANCE_S


# --- what leaves a task function ------------------------------------------------------------------


def _recorded(prefix: Prefix) -> tuple[WorkerError, ExceptionInfo]:
    (failure,) = prefix.failures()
    assert failure.exception is not None
    return failure, failure.exception


def _raise(error: BaseException) -> None:
    raise error


def _leaving(error: BaseException) -> BaseException:
    with (
        pytest.raises(BaseException) as caught,  # noqa: PT011 - any exception may
        recorded(PlainEngine()),
    ):
        raise error
    return caught.value


def test_an_exception_is_recorded_before_it_leaves(prefix: Prefix, error_file: Path) -> None:
    """Place, time, traceback and kind are recorded before the exception leaves,
    and in torch's file too.
    """
    before_ns = time.time_ns()
    _leaving(ValueError("bad batch"))
    after_ns = time.time_ns()
    failure, exception = _recorded(prefix)
    assert failure.writer is Writer.WORKER
    assert (failure.place.rank, failure.place.round, failure.place.incarnation) == (1, 2, 7)
    assert failure.node == failure.worker == "worker-0"
    assert (failure.code, failure.kind) == ("USER:ValueError", Kind.NON_RECOVERABLE)
    assert before_ns <= (failure.timestamp_ns or 0) <= after_ns
    assert exception.type == "ValueError"
    assert exception.frames[-1].function == "_leaving"
    assert failure.message.endswith("ValueError: bad batch")
    word = json.loads(error_file.read_text())["message"]
    assert word["message"] == "ValueError: bad batch"
    assert word["extraInfo"]["timestamp"] == str((failure.timestamp_ns or 0) // 1_000_000_000)


@pytest.mark.parametrize(
    ("error", "limit"), [(MemoryError(), 7), (KeyError("label"), None)], ids=["memory", "key"]
)
def test_the_containers_memory_is_recorded_if_it_may_explain(
    error: Exception,
    limit: int | None,
    prefix: Prefix,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The recorder is asked for the container's memory if a limit may explain the exception."""
    monkeypatch.setattr(RecorderClient, "resources", lambda *_: Resources(memory_limit_bytes=7))
    with recorder.node_recorder(prefix.node_context()) as node_context:
        told = NodeContext.from_environment()
        assert told is not None
        for name, value in (
            replace(told, node_folder=node_context.node_folder).to_environment().items()
        ):
            monkeypatch.setenv(name, value)
        _leaving(error)
    failure, _ = _recorded(prefix)
    assert failure.resources.memory_limit_bytes == limit


class _HostileError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


ERRORS = [
    ValueError("bad batch"),
    KeyboardInterrupt(),
    SystemExit(["a", "list"]),
    _HostileError(),
    BaseException("bare"),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("store", ["works", "blocked", "hanging", "off"])
def test_the_exception_is_the_users(
    error: BaseException,
    store: str,
    request: pytest.FixtureRequest,
    as_worker: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same object leaves, with the same cause, context and innermost frame,
    also if recording failed.
    """
    if store == "off":
        monkeypatch.delenv("FIRSTFAULT_RECORDING")
    elif store != "works":
        as_worker(request.getfixturevalue(store), deadline_seconds=0.3)
    cause = KeyError("cause")
    context = IndexError("context")
    error.__traceback__, error.__cause__, error.__context__ = None, cause, context
    left = _leaving(error)
    assert left is error
    assert (left.__cause__, left.__context__, cause.__context__, context.__context__) == (
        cause,
        context,
        None,
        None,
    )
    assert traceback.extract_tb(left.__traceback__)[-1].line == "raise error"


@pytest.mark.parametrize("gone", [False, True], ids=["agent lives", "agent has died"])
@pytest.mark.parametrize("code", [None, 0, False])
def test_a_clean_exit_is_no_failure(
    code: object,
    gone: bool,
    prefix: Prefix,
    error_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clean sys.exit() uploads nothing; its document stays on the node."""
    if gone:
        _agent_dies(monkeypatch)
    assert isinstance(_leaving(SystemExit(code)), SystemExit)
    assert prefix.failures() == []
    assert not error_file.exists()
    (held,) = Spool(error_file.parent / "firstfault").documents()
    failure = decode(held.path.read_bytes(), DocumentRef(held.name))
    assert isinstance(failure, WorkerError)
    assert (failure.category, failure.subject, failure.rank) == ("exit", Subject.WORKER, 1)


def _agent_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let os.getppid() return another parent at the next call."""
    parents = [4711]
    monkeypatch.setattr(worker.os, "getppid", lambda: parents.pop() if parents else 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_a_death_of_the_agent_is_documented_by_its_worker(
    error: BaseException, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that its agent's death terminates documents that death, and not its own."""
    _agent_dies(monkeypatch)
    assert _leaving(error) is error
    (failure,) = prefix.failures()
    assert (failure.subject, failure.category, failure.kind) == (
        Subject.AGENT,
        "node_lost",
        Kind.RECOVERABLE,
    )
    assert (failure.node, failure.place.pid, failure.rank) == ("worker-0", 4711, None)
    assert failure.exception is None
    _agent_dies(monkeypatch)
    _leaving(ValueError("the training's own"))
    assert {failure.subject for failure in prefix.failures()} == {Subject.AGENT, Subject.WORKER}


def test_an_exit_with_an_error_is_a_failure(prefix: Prefix) -> None:
    """A sys.exit() with an error is documented as an exit."""
    _leaving(SystemExit("a text"))
    failure, exception = _recorded(prefix)
    assert (failure.category, exception.type) == ("exit", "SystemExit")


@pytest.mark.parametrize("detached", [False, True], ids=["context", "from None"])
def test_an_exit_made_of_an_exception_is_about_that_exception(
    detached: bool, prefix: Prefix
) -> None:
    """The document is about the exception, notes that the program exited,
    and takes the exception's kind.
    """

    def train() -> None:
        try:
            _raise(RecoverableError("shard 7"))
        except Exception:  # noqa: BLE001 - as frameworks do
            if detached:
                raise SystemExit(3) from None
            sys.exit(3)

    with pytest.raises(SystemExit, match="3"), recorded(PlainEngine()):
        train()
    failure, exception = _recorded(prefix)
    assert exception.message.endswith("shard 7")
    assert exception.notes == ("The program then called sys.exit(3).",)
    assert (failure.kind, failure.category) == (Kind.RECOVERABLE, "recoverable")


def test_an_exit_made_by_a_library_has_the_programs_frames(prefix: Prefix) -> None:
    """An exception that never left argparse has the program's frames,
    which are in the traceback of the exit.
    """

    def parse() -> None:
        parser = argparse.ArgumentParser("train")
        parser.add_argument("--epochs", type=int)
        parser.parse_args(["--epochs", "many"])

    with pytest.raises(SystemExit, match="2"), recorded(PlainEngine()):
        parse()
    _, exception = _recorded(prefix)
    assert exception.type == "argparse.ArgumentError"
    assert find_own_frames(exception)[-1].function == "parse"


@pytest.mark.parametrize("how", ["raise", "exit 1", "exit 0", "return"])
def test_nothing_is_recorded_about_a_forked_child(how: str, prefix: Prefix) -> None:
    """It is the child's own end: nothing is recorded about the child, the worker or its agent."""

    def train() -> None:
        child = os.fork()
        if child == 0 and how == "raise":
            raise ValueError("of the child")
        if child == 0 and how != "return":
            sys.exit(int(how[-1]))
        if child:
            os.waitpid(child, 0)

    worker_process = os.getpid()
    try:
        with recorded(PlainEngine()):
            train()
    finally:
        if os.getpid() != worker_process:
            os._exit(0)
    assert not prefix.failures()
    assert not [file for file in prefix.folder.parent.rglob("*.pb*") if "roster" not in file.parts]


class _NoTruthError(Exception):
    """A user's exception that has a length, of something that is not there yet."""

    def __len__(self) -> int:
        raise AttributeError("shards")


def test_an_exception_whose_bool_raises_is_recorded(prefix: Prefix) -> None:
    """It is recorded as any other, also as a cause and as what a program made an exit of."""
    error = ValueError("bad batch")
    error.__cause__ = _NoTruthError("no shards")
    _leaving(error)
    program = SystemExit(3)
    program.__context__ = _NoTruthError("no shards")
    _leaving(program)
    first, second = sorted(prefix.failures(), key=lambda failure: failure.timestamp_ns or 0)
    assert first.message.endswith("ValueError: bad batch")
    assert second.exception.message == "no shards"


def _cleans_up() -> None:
    try:
        raise InterruptedError("terminated by the scheduler")
    finally:
        torch.distributed.destroy_process_group(torch.distributed.GroupMember.NON_GROUP_MEMBER)


@pytest.mark.parametrize(
    "handler",
    [partial(_raise, OSError("broken")), _cleans_up, partial(_raise, SystemExit(0))],
    ids=["raises", "cleans up", "succeeds"],
)
def test_a_new_exception_after_the_agents_question_answers_its_signal(
    handler: Callable[[], None], prefix: Prefix
) -> None:
    """After the agent's question an exception that was not there before is
    an answer to its signal.
    """

    def train(monitor: WorkerMonitor) -> None:
        monitor.answer()
        handler()

    with pytest.raises((OSError, SystemExit)), recorded(PlainEngine()) as monitor:
        train(monitor)
    assert not list(prefix.folder.parent.rglob("*.pb*"))


class _Finalised:
    """An iterator whose finaliser calls something, as a data loader's joins its processes."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def __iter__(self) -> _Finalised:
        return self

    def __next__(self) -> int:
        return 0

    def __del__(self) -> None:
        run_in_thread(self._call)


def test_an_unwinding_exception_is_recorded_when_it_has_left(prefix: Prefix) -> None:
    """The answer tells where it was raised; when it has left it is recorded,
    with the frames of any other.
    """
    answers = []

    def train(monitor: WorkerMonitor) -> None:
        for _ in _Finalised(lambda: answers.append(monitor.answer())):
            raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad"), recorded(PlainEngine()) as monitor:
        train(monitor)
    failure, exception = _recorded(prefix)
    raised = exception.frames[-1]
    assert (failure.what, failure.in_flight) == ("ValueError", False)
    assert answers[0]["raised_at"] == (raised.file, raised.line, raised.function)


def test_an_exception_in_flight_keeps_one_fingerprint(prefix: Prefix) -> None:
    """It is recorded then, and again when it has left, with one fingerprint:
    two ranks' faults are compared.
    """

    def inner() -> None:
        monitor = current_monitor()
        assert monitor is not None
        try:
            raise ValueError("bad batch")
        finally:
            run_in_thread(monitor.answer)

    def train() -> None:
        inner()

    with pytest.raises(ValueError, match="bad"):
        run_recorded(PlainEngine(), train)
    early, late = prefix.failures()
    assert early.fingerprint == late.fingerprint
    assert {early.in_flight, late.in_flight} == {True, False}
    assert early.what == late.what == "ValueError"


class _AskedError(Exception):
    """The agent asks for this process's state when its text is read."""

    def __init__(self, answer: Callable[[], None]) -> None:
        super().__init__()
        self._answer = answer

    def __str__(self) -> str:
        run_in_thread(self._answer)
        return "bad batch"


def test_the_agent_waits_for_an_exception_being_recorded(prefix: Prefix) -> None:
    """The answer tells where it was raised, so that the agent waits for its document,
    of which there is one.
    """
    answers: list[dict[str, Any]] = []
    with recorded(PlainEngine()) as monitor:
        with pytest.raises(_AskedError) as left:
            _raise(_AskedError(lambda: answers.append(monitor.answer())))
        # outside of the handler, as where a program's exception is recorded
        worker.record_end(monitor, left.value, os.getppid())
    _, exception = _recorded(prefix)
    raised = exception.frames[-1]
    assert answers[0]["raised_at"] == (raised.file, raised.line, raised.function)


class _SignalledError(Exception):
    """Raises the agent's signal when its text is read."""

    def __str__(self) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        return "bad batch"


def test_the_agents_signal_does_not_cut_a_document(
    prefix: Prefix, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent's signal to a forked worker, which has torch's handler,
    does not cut its document.
    """
    before = signal.signal(signal.SIGTERM, _terminate_process_handler)
    try:
        left = _leaving(_SignalledError())
        assert signal.getsignal(signal.SIGTERM) is _terminate_process_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert type(left) is _SignalledError
    _, exception = _recorded(prefix)
    assert exception.message == "bad batch"
    assert caplog.text == ""


def test_a_text_that_blocks_is_given_up(prefix: Prefix, as_worker: Callable[..., Path]) -> None:
    """A __str__ that never returns is given up after half of the deadline;
    the document has no text.
    """
    release = threading.Event()

    class BlockingError(Exception):
        def __str__(self) -> str:
            release.wait(2 * LONG_S)
            return "late"

    as_worker(deadline_seconds=2.0)
    began = time.monotonic()
    _leaving(BlockingError())
    took = time.monotonic() - began
    release.set()
    _await_uploads()
    _, exception = _recorded(prefix)
    assert exception.type.endswith("BlockingError")
    assert exception.message == "<no text: reading the exception took too long>"
    assert 1 <= took < 2 + TOLERANCE_S
