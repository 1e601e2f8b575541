"""Messages between an agent and its workers, over real sockets and between real processes;
the workers' start.
"""

import json
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

from firstfault.recorder.folder import NodeFolder
from firstfault_torch import time_limits
from firstfault_torch.node import channel
from firstfault_torch.node.channel import AgentChannel, WorkerChannel
from firstfault_torch.node.fork_gate import hold_forked_workers, wait_until_all_forked

pytestmark = pytest.mark.forks

LONG_S = 60.0
OpenChannel: TypeAlias = Callable[..., WorkerChannel]
LIMIT_S = 0.3
TOLERANCE_S = 20.0
"""What waits, although it should not, waits for `LONG_S`."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder with a path that is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ff-", dir="/tmp", ignore_cleanup_errors=True) as path:
        yield Path(path)


class Agent:
    """An agent's channel, and how often it was woken."""

    def __init__(self, folder: Path) -> None:
        self.woken = threading.Semaphore(0)
        self.channel = AgentChannel(NodeFolder(folder), self.woken.release)


@pytest.fixture
def agent(folder: Path) -> Iterator[Agent]:
    """Open an agent's channel; its thread does not outlive the test."""
    before = set(threading.enumerate())
    one = Agent(folder)
    (thread,) = {
        thread for thread in threading.enumerate() if thread.name == "firstfault-channel"
    } - before
    yield one
    one.channel.close()
    thread.join(LONG_S)
    assert not thread.is_alive()


@pytest.fixture
def worker(folder: Path) -> Iterator[Callable[..., WorkerChannel]]:
    """Open workers' channels; their threads do not outlive the test."""
    made: list[WorkerChannel] = []

    def begin(
        local_rank: int, answer: Callable[..., dict[str, Any]] = lambda _: {}, round_: int = 0
    ) -> WorkerChannel:
        made.append(WorkerChannel(NodeFolder(folder), round_, local_rank, answer))
        return made[-1]

    yield begin
    for one in made:
        one._listener.close()


def test_each_worker_that_is_asked_answers_for_itself(agent: Agent, worker: OpenChannel) -> None:
    """Each worker that is asked answers for itself, at once; one that is not asked does not."""
    for local_rank in range(3):
        worker(
            local_rank,
            lambda _, local_rank=local_rank: {"collectives": [["group", "op", local_rank, 0]]},
        )
    began = time.monotonic()
    agent.channel.ask([1], LONG_S)
    assert agent.channel.get_states().keys() == {1}
    answers = agent.channel.ask([0, 2], LONG_S)
    assert time.monotonic() - began < TOLERANCE_S
    assert {rank: answer["collectives"] for rank, answer in answers.items()} == {
        rank: [["group", "op", rank, 0]] for rank in (0, 2)
    }
    assert agent.channel.failed() == {}
    assert not agent.woken.acquire(blocking=False), "an answer is not a failure"


def test_a_round_has_messages_of_its_own_workers_only(
    agent: Agent, worker: OpenChannel, folder: Path
) -> None:
    """A round has the messages of its own workers only, whenever the others come;
    a failure report wakes the agent.
    """
    content = {"what": "ValueError", "document": "e1-x.pb", "monotonic_ns": 12}
    late = worker(1)
    for round_ in range(2):
        agent.channel.begin(round_)
        one = worker(0, lambda _: {"stack": "x"}, round_)
        assert agent.channel.failed() == {}
        late.report_failure(content)
        one.report_failure(content)
        for _ in range(2 - round_):
            assert agent.woken.acquire(timeout=LONG_S)
        assert list(agent.channel.ask([0], LONG_S)) == [0]
        one._listener.close()
        NodeFolder(folder).worker(round_, 0).socket.unlink()
        # a worker whose socket is gone keeps the answer that it gave before
        assert list(agent.channel.ask([0], 0)) == [0]
        failed = agent.channel.failed()
        assert set(failed) == set(range(2 - round_))
        assert {**failed[0], **content} == failed[0]


def test_a_finish_report_counts_and_wakes_no_agent(agent: Agent, worker: OpenChannel) -> None:
    """What a worker reports before it dies counts, of this round, and doesn't wake the agent."""
    late = worker(1)
    agent.channel.begin(1)
    late.report_finished()
    worker(0, round_=1).report_finished()
    finished = agent.channel.finished(LONG_S)
    assert finished.keys() == {0}
    assert finished[0]["pid"] == os.getpid()
    assert finished[0]["monotonic_ns"] <= time.monotonic_ns()
    assert agent.channel.failed() == {}
    assert not agent.woken.acquire(blocking=False), "an end is not a failure"
    agent.channel.begin(2)
    assert agent.channel.finished(LONG_S) == {}


def test_an_exit_report_counts_and_wakes_no_agent(agent: Agent, worker: OpenChannel) -> None:
    """A program's report that it exits is known to the round, and doesn't wake the agent."""
    agent.channel.begin(1)
    worker(0, round_=1).report_exit()
    assert agent.channel.finished(LONG_S) == {}  # all that was sent before has been read
    exiting = agent.channel.exiting()
    assert exiting.keys() == {0}
    assert exiting[0]["pid"] == os.getpid()
    assert not agent.woken.acquire(blocking=False), "torch sees the exit itself"
    agent.channel.begin(2)
    assert agent.channel.exiting() == {}


@pytest.mark.parametrize("others", [0, 1])
def test_the_agent_waits_for_a_busy_worker_up_to_the_limit(
    others: int,
    agent: Agent,
    worker: OpenChannel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent waits for a busy worker up to the time limit,
    and returns the other workers' answers.
    """
    release = threading.Event()
    # a clock that stands until the others have answered
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() if len(agent.channel._answers) == others else 0.0
    )
    monkeypatch.setattr(channel, "time", clock)

    def busy(_: str) -> dict[str, Any]:
        release.wait(LONG_S)
        return {}

    worker(0, busy)
    for other in range(others):
        worker(1 + other, lambda _: {"ok": True})
    began = time.monotonic()
    answers = agent.channel.ask([0, 1], LIMIT_S)
    assert (0 if others else LIMIT_S) <= time.monotonic() - began < TOLERANCE_S
    assert set(answers) == set(range(1, 1 + others))
    release.set()


def test_nothing_waits_for_an_end_that_is_gone(
    folder: Path, worker: OpenChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for workers that ended or never opened a channel,
    nor a failing worker for an agent that died.
    """
    monkeypatch.setattr(time_limits, "SEND_TIMEOUT_SECONDS", LONG_S)
    began = time.monotonic()
    worker(5).report_failure({"what": "ValueError"})
    agent = AgentChannel(NodeFolder(folder), lambda: None)
    assert agent.ask([0, 1], LONG_S) == {}
    agent.close()
    assert time.monotonic() - began < TOLERANCE_S


def test_a_worker_whose_answer_raises_sends_an_empty_state(
    agent: Agent, worker: OpenChannel, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker whose answer raises sends an empty state, logs a warning, and can be asked again."""
    answers = iter([ZeroDivisionError("ours"), None])

    def answer(_: str) -> dict[str, Any]:
        if error := next(answers):
            raise error
        return {"ok": True}

    worker(0, answer)
    assert "ok" not in agent.channel.ask([0], LONG_S)[0]
    assert "firstfault: failed while answering the agent (ZeroDivisionError: ours)" in caplog.text
    assert agent.channel.ask([0], LONG_S)[0]["ok"]


def test_a_busy_agent_receives_all_simultaneous_reports(folder: Path, worker: OpenChannel) -> None:
    """A busy agent receives the reports of all workers of a large node that
    fail at the same moment.
    """
    busy = threading.Event()
    free = threading.Event()
    heard = threading.Semaphore(0)

    def wake() -> None:
        busy.set()
        free.wait(LONG_S)
        heard.release()

    line = AgentChannel(NodeFolder(folder), wake)
    lines = [worker(local_rank) for local_rank in range(16)]
    threads = [
        threading.Thread(target=one.report_failure, args=({"what": "ValueError"},)) for one in lines
    ]
    for thread in threads:
        thread.start()
    assert busy.wait(LONG_S)
    free.set()
    for thread in threads:
        thread.join(LONG_S)
    try:
        for _ in lines:
            assert heard.acquire(timeout=LONG_S), sorted(line.failed())
    finally:
        line.close()


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"no json",
        b"\xff\xfe",
        b'"a text"',
        b"[1, 2]",
        b"null",
        pytest.param(b"[" * 4_095, id="nested too deep"),
        b'{"kind": "failed"',
        b"{}",
        b'{"kind": "failed", "round": "x", "local_rank": 0}',
        b'{"round": 0, "local_rank": 0}',
    ],
    ids=repr,
)
def test_both_ends_skip_an_invalid_message(
    message: bytes,
    agent: Agent,
    folder: Path,
    worker: OpenChannel,
) -> None:
    """Both ends skip an invalid or incomplete message and receive the next one."""
    line = worker(0, lambda _: {"ok": True})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for end in ("agent.line", "worker-0-0.line"):
            stranger.sendto(message, str(folder / end))
    line.report_failure({"what": "ValueError"})
    assert agent.woken.acquire(timeout=LONG_S)
    assert set(agent.channel.failed()) == {0}
    assert agent.channel.ask([0], LONG_S)[0]["ok"]


def test_the_largest_state_arrives(agent: Agent, worker: OpenChannel) -> None:
    """The largest state arrives: ten dead threads with all their frames."""
    frames = [["/" + "x" * 300, 1, "function", "code " * 20] for _ in range(20)]
    failures = [["thread", 1, "ValueError", "m" * 2000, frames] for _ in range(10)]
    worker(0, lambda _: {"thread_failures": failures})
    answer = agent.channel.ask([0], LONG_S)
    assert json.dumps(answer[0]["thread_failures"]) == json.dumps(failures)


SOON_S = 30.0
"""The longest wait for what happens, on a busy machine;
what does not happen is waited for `LONG_S`.
"""
PAUSE_S = 0.5
_fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker wait for its siblings for longer than a busy machine needs."""
    monkeypatch.setattr(time_limits, "SIBLING_FORK_TIMEOUT_SECONDS", LONG_S)


def _begin(folder: Path, began: Any) -> None:
    wait_until_all_forked(NodeFolder(folder))
    began.put(time.monotonic())


def test_forked_workers_begin_after_the_last_fork(tmp_path: Path) -> None:
    """The first worker waits for the last fork, whenever that is;
    one that is killed meanwhile delays none.
    """
    began = _fork.SimpleQueue()
    workers = [_fork.Process(target=_begin, args=(tmp_path, began)) for _ in range(3)]
    with hold_forked_workers(NodeFolder(tmp_path)):
        for worker in workers[:2]:
            worker.start()
        time.sleep(PAUSE_S)
        workers[1].kill()
        last = time.monotonic()
        workers[2].start()
    for worker in workers:
        worker.join(SOON_S)
    assert [worker.exitcode for worker in workers] == [0, -signal.SIGKILL, 0]
    assert all(began.get() > last for _ in range(2))
    assert list(tmp_path.iterdir()) == []
    began.close()
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("name", ["", "gone"], ids=["started before", "the folder is gone"])
def test_a_worker_begins_at_once_if_no_fork_follows(name: str, tmp_path: Path) -> None:
    """A worker that no fork follows begins at once; so does one whose agent died,
    and whose folder is gone.
    """
    files = NodeFolder(tmp_path / name)
    began = time.monotonic()
    with hold_forked_workers(files):
        pass
    wait_until_all_forked(files)
    assert time.monotonic() - began < SOON_S
    with hold_forked_workers(None):
        pass


def _await_receive(number: int) -> None:
    """Wait until the channel's thread is in a system call about a descriptor:
    between two calls it may lose it.
    """
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        for thread in threading.enumerate():
            if thread.name == "firstfault-channel":
                call = (
                    Path(f"/proc/self/task/{thread.native_id}/syscall")
                    .read_text(encoding="ascii")
                    .split()
                )
                if len(call) > 1 and int(call[1], 16) == number:
                    return
        time.sleep(0.001)
    raise AssertionError("the channel's thread doesn't wait for a message")


def test_a_program_may_take_the_channels_descriptor(agent: Agent, worker: OpenChannel) -> None:
    """A program's socket under the number of the channel keeps its messages,
    and the worker still answers.
    """
    one = worker(0, lambda _: {"stack": "x"})
    number = one._listener._socket.fileno()
    _await_receive(number)
    mine, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    os.dup2(mine.fileno(), number)  # closes the channel's
    with mine, peer, socket.socket(fileno=number) as own:
        for _ in range(3):
            deadline = time.monotonic() + SOON_S
            while not (asked := agent.channel.ask([0], LONG_S)) and time.monotonic() < deadline:
                time.sleep(0.001)  # the worker is binding its new socket
            assert list(asked) == [0]
            peer.send(b"the program's")
            own.settimeout(LONG_S)
            assert own.recv(100) == b"the program's"
        one._listener.close()
        peer.send(b"still open")
        assert own.recv(100) == b"still open"


def test_a_channel_survives_missing_threads_and_failed_reads(
    agent: Agent, worker: OpenChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts although no thread is free at first, and answers after a read that failed."""
    start, failures = threading.Thread.start, [1, 2]

    def fail_at_first(thread: threading.Thread) -> None:
        if failures and thread.name == "firstfault-channel":
            failures.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_at_first)
    monkeypatch.setattr(time_limits, "CHANNEL_RETRY_SECONDS", 0.05)
    one = worker(0, lambda _: {"stack": "x"})
    assert not failures
    # Each wait for a message then ends with an error.
    one._listener._socket.settimeout(0.001)
    for _ in range(3):
        assert list(agent.channel.ask([0], LONG_S)) == [0]


def test_a_closed_channel_ends_at_once_and_binds_no_socket(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A channel that is closed while its thread looks at its socket ends at once,
    and binds no new one.
    """
    closed = threading.Event()
    is_ours = vars(channel.KeptDescriptor)["is_ours"].fget

    def close_meanwhile(kept: channel.KeptDescriptor) -> Any:
        if threading.current_thread() in threads and not closed.is_set():
            closed.set()
            line.close()
        return is_ours(kept)

    before = set(threading.enumerate())
    line = AgentChannel(NodeFolder(folder), lambda: None)
    threads = set(threading.enumerate()) - before
    (thread,) = threads
    monkeypatch.setattr(channel.KeptDescriptor, "is_ours", property(close_meanwhile))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"no json", str(folder / "agent.line"))
    thread.join(SOON_S)
    assert closed.is_set()
    assert not thread.is_alive()


def test_a_worker_answers_again_after_its_socket_was_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose socket's file, or folder, was removed answers again;
    another process's file stays.
    """
    monkeypatch.setattr(time_limits, "CHANNEL_CHECK_SECONDS", 0.2)
    minutes = threading.Semaphore(0)
    files = NodeFolder(folder / "node")
    files.path.mkdir()
    one = WorkerChannel(files, 0, 0, lambda _: {"whose": "first"}, minutes.release)
    path = files.worker(0, 0).socket
    for remove in (
        path.unlink,
        lambda: (
            files.path.rename(folder / "gone"),
            minutes.acquire(timeout=SOON_S),
            files.path.mkdir(),
        ),
    ):
        remove()
        deadline = time.monotonic() + SOON_S
        while not path.exists() and time.monotonic() < deadline:
            assert minutes.acquire(timeout=SOON_S)
        agent = AgentChannel(files, lambda: None)
        assert agent.ask([0], LONG_S)[0]["whose"] == "first"
        agent.close()
        files.agent_socket.unlink()
    other = WorkerChannel(files, 0, 0, lambda _: {"whose": "second"})
    for _ in range(2):
        assert minutes.acquire(timeout=SOON_S)
    agent = AgentChannel(files, lambda: None)
    assert agent.ask([0], LONG_S)[0]["whose"] == "second"
    for line in (one._listener, other._listener, agent):
        line.close()
