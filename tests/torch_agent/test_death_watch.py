"""Which of a node's workers died, when, and by which code or signal: real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from firstfault_torch.agent.local_workers import DeathWatch
from firstfault_torch.agent.reporter import Death, signal_name
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

# Python 3.12 and later warn of a fork beside threads; an agent forks before it has any, these tests do not
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

LONG_S = 60.0


def _act(orders: Connection, answers: Connection) -> None:
    """Do what the parent orders, after sending the (wall, monotonic) nanoseconds of that moment."""
    action = orders.recv()
    if action == "with a child of its own":
        # it inherits every descriptor of this process, as a data loader's workers do
        child = os.fork()
        if child == 0:
            time.sleep(LONG_S)
            os._exit(0)
        answers.send(child)
    answers.send((time.time_ns(), time.monotonic_ns()))
    if action == "exit 3":
        os._exit(3)
    elif action == "raise":
        raise SystemExit(4)
    elif action != "end":
        os.kill(os.getpid(), signal.SIGKILL)


class _Worker:
    """A child process that ends on order, in the way of the order."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        # two pipes rather than a socket, which may be reset when its other end is killed
        orders, self.orders = context.Pipe(duplex=False)
        self.answers, answers = context.Pipe(duplex=False)
        self.process = context.Process(target=_act, args=(orders, answers))
        self.process.start()
        orders.close()
        answers.close()

    def end(self, action: str) -> Any:
        """Order it to end; return its last answer."""
        self.orders.send(action)
        said = self.answers.recv()
        if action == "with a child of its own":
            self.answers.recv()
        return said


def _deaths(watch: DeathWatch) -> list[Death]:
    return [death for death in watch.ended() if death.exit_code != 0]


@pytest.fixture
def start() -> Iterator[Callable[..., _Worker]]:
    """Start worker processes; none survives the test."""
    workers: list[_Worker] = []

    def begin() -> _Worker:
        workers.append(_Worker())
        return workers[-1]

    yield begin
    for worker in workers:
        worker.process.kill()
        worker.process.join()


def _noted(watch: DeathWatch, index: int = 0) -> int:
    """Wait until a death is noted, and return its moment; reading the watch later does not change it."""
    until(partial(watch._ended.__contains__, index))
    return time.monotonic_ns()


@pytest.mark.parametrize(
    ("action", "exit_code", "name"), [("kill", -9, "SIGKILL"), ("exit 3", 3, ""), ("raise", 4, "")]
)
def test_a_death(start: Callable[..., _Worker], action: str, exit_code: int, name: str) -> None:
    """A death is noted with local rank, pid, exit code, signal and the moment by both clocks."""
    workers = [start(), start()]
    watch = DeathWatch([worker.process for worker in workers])
    assert _deaths(watch) == []
    wall_ns, monotonic_ns = workers[1].end(action)
    workers[1].process.join()  # torch may have waited for it first
    noted_ns = _noted(watch, 1)
    (death,) = _deaths(watch)
    watch.stop()
    assert (death.local_rank, death.pid, death.exit_code) == (1, workers[1].process.pid, exit_code)
    assert death.signal == name
    assert monotonic_ns <= death.monotonic_ns <= noted_ns
    assert wall_ns <= death.wall_ns


def test_a_signal_without_a_name() -> None:
    """It is told by its number."""
    assert [signal_name(number) for number in (9, 99)] == ["SIGKILL", "SIG99"]


def test_success_is_no_death(start: Callable[..., _Worker]) -> None:
    """A process that exits with 0 has not died, and the watch ends with its last process."""
    worker = start()
    watch = DeathWatch([worker.process])
    worker.end("end")
    worker.process.join()
    assert _deaths(watch) == []
    until(lambda: not watch._thread.is_alive())


def test_the_order_is_that_of_the_deaths(start: Callable[..., _Worker]) -> None:
    """Deaths come in the order in which they happened, not in that of the ranks."""
    workers = [start() for _ in range(3)]
    watch = DeathWatch([worker.process for worker in workers])
    for index in (2, 0, 1):
        workers[index].end("kill")
        _noted(watch, index)
        workers[index].process.join()
    assert [death.local_rank for death in _deaths(watch)] == [2, 0, 1]
    watch.stop()


def test_a_death_before_the_watch(start: Callable[..., _Worker]) -> None:
    """A process that ended and was reaped before the watch began is recorded."""
    worker = start()
    worker.end("kill")
    worker.process.join()
    began_ns = time.monotonic_ns()
    watch = DeathWatch([worker.process])
    (death,) = _deaths(watch)
    watch.stop()
    assert death.signal == "SIGKILL"
    assert death.monotonic_ns >= began_ns


def test_a_death_with_a_child_alive(start: Callable[..., _Worker]) -> None:
    """The children of a worker, such as a data loader's, do not hide its death."""
    worker = start()
    watch = DeathWatch([worker.process])
    child = worker.end("with a child of its own")
    try:
        worker.process.join()
        noted_ns = _noted(watch)
        (death,) = _deaths(watch)
        assert death.monotonic_ns <= noted_ns
    finally:
        os.kill(child, signal.SIGKILL)
        watch.stop()


@pytest.mark.parametrize("lacks", ["kernel", "Python"])
def test_without_pidfds(lacks: str, start: Callable[..., _Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a kernel, or with a Python, without pidfds the watch uses multiprocessing's sentinels."""

    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    if lacks == "kernel":
        monkeypatch.setattr(os, "pidfd_open", refuse)
    else:
        monkeypatch.delattr(os, "pidfd_open")
    worker = start()
    watch = DeathWatch([worker.process])
    _, monotonic_ns = worker.end("kill")
    until(lambda: _deaths(watch))
    noted_ns = _noted(watch)
    (death,) = _deaths(watch)
    watch.stop()
    assert monotonic_ns <= death.monotonic_ns <= noted_ns


def _descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_stop_leaves_nothing(start: Callable[..., _Worker]) -> None:
    """A stopped watch has no thread and no descriptor, so that the agent may fork again."""
    worker = start()
    before = _descriptors()
    watch = DeathWatch([worker.process])
    assert _descriptors() > before
    watch.stop()
    assert _descriptors() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "firstfault-deaths"]
    assert worker.process.is_alive(), "it only watches"
