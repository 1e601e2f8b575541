"""The end of a worker's stderr: real processes that write through real FIFOs to an agent."""

import contextlib
import ctypes
import faulthandler
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from firstfault.exceptions.printed_tracebacks import remove_traceback
from firstfault.model import ExceptionInfo
from firstfault.recorder.folder import NodeFolder
from firstfault_torch.node import stderr_relay
from firstfault_torch.node.stacks import register_stacks
from firstfault_torch.node.stderr_relay import StderrRelay, redirect_stderr
from tests.nodes import forkserver
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.forks]

ROUND = 1
RANK = 1
PATIENCE_S = 60.0
"""A spawned process imports torch, which takes two seconds of a core;
a busy machine gives it a twentieth of one.
"""
MANY = 200_000


def one_line() -> None:
    """Write as Python does: pytest has replaced sys.stderr."""
    with os.fdopen(2, "w", closefd=False) as stderr:
        stderr.write("a line\n")


def without_an_end() -> None:
    os.write(2, b"half a li")
    os.kill(os.getpid(), signal.SIGKILL)


def uncaught() -> None:
    os.write(2, b"before\n")
    ctypes.CDLL("libstdc++.so.6")["_ZSt9terminatev"]()


def in_a_child() -> None:
    subprocess.run(
        [sys.executable, "-c", "import sys; sys.stderr.write('from a child\\n')"], check=True
    )


def a_lot() -> None:
    """Write more than a FIFO holds, and more than is kept."""
    for number in range(MANY):
        os.write(2, b"line %d\n" % number)


def not_text() -> None:
    os.write(2, b"\xff\xfe\n")


def a_long_traceback() -> None:
    """Print a traceback of more than is kept, and a line after it."""
    frames = "".join(
        f'  File "train.py", line {number}, in layer\n    return layer(batch)\n'
        for number in range(400)
    )
    os.write(2, f"Traceback (most recent call last):\n{frames}ValueError: boom\nbye\n".encode())


@pytest.fixture
def tails(tmp_path: Path) -> Iterator[StderrRelay]:
    """An agent's relay for two workers."""
    opened = StderrRelay(NodeFolder(tmp_path), ROUND, {0: "", 1: ""})
    yield opened
    opened.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "firstfault-stderr"]


def _run(
    folder: Path,
    write: Callable[[], None],
    tails: StderrRelay | None,
    method: str = "fork",
) -> None:
    worker = multiprocessing.get_context(method).Process(target=_worker, args=(folder, write))
    worker.start()
    if tails is not None:
        tails.start()
    worker.join(PATIENCE_S)
    assert worker.exitcode is not None


def _worker(folder: Path, write: Callable[[], None]) -> None:
    faulthandler.disable()  # pytest's
    redirect_stderr(NodeFolder(folder).worker(ROUND, RANK))
    write()


def _wait_until_stderr_has(size: int) -> None:
    """Wait for so many bytes in capfd's file; capfd itself loses what comes while it is read."""
    wait_until(lambda: os.fstat(2).st_size >= size)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_a_worker_writes_is_passed_on_and_kept(
    tmp_path: Path,
    tails: StderrRelay,
    capfd: pytest.CaptureFixture[str],
    method: str,
) -> None:
    """Every byte goes to the agent's stderr; its end is there as soon as the worker is gone."""
    _run(tmp_path, one_line, tails, method)
    assert tails.tail(RANK) == "a line"
    assert tails.tail(0) == ""
    tails.close()
    assert capfd.readouterr().err == "a line\n"
    assert tails.tail(RANK) == "a line", "also later"


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (without_an_end, "half a li"),
        (uncaught, "before\nterminate called without an active exception"),
        (in_a_child, "from a child"),
        (not_text, "\N{REPLACEMENT CHARACTER}" * 2),
    ],
)
def test_the_end_of_stderr_is_kept_however_a_worker_dies(
    tmp_path: Path,
    tails: StderrRelay,
    write: Callable[[], None],
    said: str,
) -> None:
    """The end is kept however a worker dies and whichever process writes."""
    _run(tmp_path, write, tails)
    assert tails.tail(RANK) == said


def test_much_is_passed_on_and_its_end_kept(
    tmp_path: Path, tails: StderrRelay, capfd: pytest.CaptureFixture[str]
) -> None:
    """A long log is passed on completely; the kept end is bounded and begins with a whole line."""
    _run(tmp_path, a_lot, tails)
    kept = tails.tail(RANK).splitlines()
    tails.close()
    lines = [f"line {number}" for number in range(MANY)]
    assert capfd.readouterr().err.splitlines() == lines
    assert 100 < len(kept) < 1000
    assert kept == lines[-len(kept) :]


def test_lines_of_two_workers_stay_whole(
    tmp_path: Path,
    tails: StderrRelay,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where one worker's turn ends within a line,
    the rest of the line comes before the other worker's lines.
    """
    monkeypatch.setattr(stderr_relay, "_MAX_CHUNKS_PER_TURN", 1)
    monkeypatch.setattr(stderr_relay, "_CHUNK_BYTES", 150)
    lines = [f"{rank}" * 99 for rank in (0, 1) for _ in range(40)]
    for rank in (0, 1):
        with NodeFolder(tmp_path).worker(ROUND, rank).stderr.open("wb", buffering=0) as fifo:
            fifo.write(
                "".join(f"{line}\n" for line in lines if line.startswith(str(rank))).encode()
            )
    tails.start()
    _wait_until_stderr_has(sum(len(line) + 1 for line in lines))
    tails.close()
    assert sorted(capfd.readouterr().err.splitlines()) == lines


def test_the_end_of_a_long_traceback_is_recognised(tmp_path: Path, tails: StderrRelay) -> None:
    """Of a traceback longer than the kept end, nothing is taken for a log:
    its first line keeps its indentation.
    """
    _run(tmp_path, a_long_traceback, tails)
    kept = tails.tail(RANK)
    assert len(kept) > 7000
    assert remove_traceback(kept, ExceptionInfo("ValueError", "boom")) == "bye"


def test_without_an_agent_stderr_stays_where_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a FIFO, or without a reader, stderr is left as it is."""
    _run(tmp_path, one_line, None)
    StderrRelay(NodeFolder(tmp_path), ROUND, {RANK: ""}).close()
    _run(tmp_path, one_line, None)
    assert capfd.readouterr().err == "a line\n" * 2


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("agent_lives", [True, False])
def test_output_after_the_round_is_still_passed_on(
    tmp_path: Path, shown: bool, agent_lives: bool
) -> None:
    """What it writes is passed on, also after the agent's end;
    it neither blocks nor gets SIGPIPE.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    go = fork.Event()
    log = tmp_path / "log"

    def outlive() -> None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in a program that is not Python
        redirect_stderr(NodeFolder(tmp_path).worker(ROUND, RANK))
        sender.send("open")
        go.wait(PATIENCE_S)
        for number in range(MANY):
            os.write(2, b"line %d\n" % number)
        sender.send("written")

    def agent() -> None:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        tails = StderrRelay(NodeFolder(tmp_path), ROUND, {RANK: "" if shown else os.devnull})
        if not os.fork():
            outlive()
            os._exit(0)
        tails.start()
        assert receiver.poll(PATIENCE_S)
        assert receiver.recv() == "open"
        tails.close()
        if agent_lives:
            go.set()
            os.wait()

    process = fork.Process(target=agent)
    process.start()
    # `join` would wait for the other process, too, which has its sentinel
    wait_until(lambda: process.exitcode is not None)
    assert process.exitcode == 0
    go.set()
    assert receiver.poll(PATIENCE_S), "it is blocked or dead"
    assert receiver.recv() == "written"
    last = f"line {MANY - 1}\n" if shown else ""
    wait_until(lambda: log.read_text().endswith(last))
    assert log.read_text().splitlines() == [f"line {number}" for number in range(MANY)] * shown


def test_another_process_reads_if_no_thread_is_free(
    tmp_path: Path,
    tails: StderrRelay,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the system refuses the thread, another process reads:
    a worker that writes much does not wait without end.
    """
    opened = multiprocessing.get_context("fork").Event()
    go = multiprocessing.get_context("fork").Event()

    def work() -> None:
        redirect_stderr(NodeFolder(tmp_path).worker(ROUND, RANK))
        opened.set()
        go.wait(PATIENCE_S)
        a_lot()

    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    assert opened.wait(PATIENCE_S)
    with monkeypatch.context() as patched:
        patched.setattr(
            threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread"))
        )
        with pytest.raises(RuntimeError, match="new thread"):
            tails.start()
    go.set()
    worker.join(PATIENCE_S)
    assert worker.exitcode == 0
    lines = [f"line {number}" for number in range(MANY)]
    _wait_until_stderr_has(sum(len(line) + 1 for line in lines))
    assert capfd.readouterr().err.splitlines() == lines


@pytest.mark.parametrize("what", ["no object", "closed", "terminal"])
def test_a_closed_stderr_stays_closed(tmp_path: Path, tails: StderrRelay, what: str) -> None:
    """sys.stderr may be None; a closed stderr stays closed, as no file of ours takes its number;
    so does a terminal.
    """
    leader, follower = os.openpty()
    worker = os.fork()
    if not worker:
        code = 1
        with contextlib.suppress(Exception):
            sys.stderr = None
            if what == "closed":
                os.close(2)
            if what == "terminal":
                os.dup2(follower, 2)
            redirect_stderr(NodeFolder(tmp_path).worker(ROUND, RANK))
            register_stacks(NodeFolder(tmp_path).worker(ROUND, RANK))
            with contextlib.suppress(OSError):
                code = 2 if os.write(2, b"a line\n") and what == "closed" else 0
            code = 0 if what == "closed" and code == 1 else code
            code = 3 if os.isatty(2) is not (what == "terminal") else code
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0
    assert tails.tail(RANK) == ("a line" if what == "no object" else "")
    for descriptor in (leader, follower):
        os.close(descriptor)


def _agent_that_cannot_write(folder: Path, sender: Any) -> None:
    """Ask for what two workers wrote while stderr is full; send that,
    and what comes once stderr is read.
    """
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.set_blocking(2, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(2, b"full\n")
    os.set_blocking(2, True)
    files = NodeFolder(folder)
    tails = StderrRelay(files, ROUND, {0: "", RANK: ""})
    tails.start()
    with files.worker(ROUND, RANK).stderr.open("wb", buffering=0) as fifo:
        fifo.write(b"its last\n")
        # now the agent has it, and cannot pass it on
        wait_until(lambda: fcntl.ioctl(fifo, termios.FIONREAD, bytes(4)) == bytes(4))
        fifo.write(b"words\n")
    with files.worker(ROUND, 0).stderr.open("wb", buffering=0) as fifo:
        fifo.write(b"of a process that lives\n")
        kept = tails.tail(RANK), tails.tail(0)
        passed_on = b""
        while not passed_on.endswith(b"lives\n"):
            passed_on += os.read(reader, 2**16)
    sender.send((*kept, passed_on.replace(b"full\n", b"")))


def test_a_slow_reader_of_the_agents_stderr_loses_nothing(tmp_path: Path) -> None:
    """While an agent cannot write its own stderr, it keeps all the same what its workers write,
    and writes it later.
    """
    # a fork of this process would inherit what threads of other tests hold
    receiver, sender = forkserver().Pipe(duplex=False)
    process = forkserver().Process(target=_agent_that_cannot_write, args=(tmp_path, sender))
    process.start()
    answered = receiver.poll(PATIENCE_S)
    process.kill()
    process.join()
    assert answered
    of_dead, of_living = "its last\nwords", "of a process that lives"
    assert receiver.recv() == (of_dead, of_living, f"{of_dead}\n{of_living}\n".encode())
