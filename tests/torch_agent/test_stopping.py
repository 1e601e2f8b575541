"""Stopping real processes, with real signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from firstfault.model import Place
from firstfault_torch.agent import local_workers as workers
from firstfault_torch.agent.local_workers import LocalWorkers, stop_processes
from firstfault_torch.agent.reporter import Death, Reporter
from firstfault_torch.compat.torch_agent import unfinished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.prefix import Prefix

_ONLY_ITS_MAIN_THREAD_EXITS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
_fork = multiprocessing.get_context("fork")
LONG_S = 60.0


def _ignores_sigterm(ready: Any) -> None:
    """Ignore SIGTERM and wait for ever."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    threading.Event().wait()


def _plain(ready: Any) -> None:
    """Wait for ever."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ready.set()
    threading.Event().wait()


def _leaving(ready: Any) -> None:
    """Take a moment for the exit; a SIGTERM meanwhile would be seen in the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ready.set()
    time.sleep(0.5)
    raise SystemExit(7)


def _exit_codes(processes: list[Any]) -> list[int | None]:
    """Return how processes ended; the kernel may take long to end one that was killed on a busy machine."""
    for process in processes:
        process.join(LONG_S)
    return [process.exitcode for process in processes]


@pytest.fixture
def start() -> Iterator[Callable[..., list[Any]]]:
    """Start a process for each function, and wait until they run."""
    started = []

    def begin(*functions: Callable[[Any], None]) -> list[Any]:
        for function in functions:
            ready = _fork.Event()
            process = _fork.Process(target=function, args=(ready,))
            process.start()
            started.append(process)
            assert ready.wait(LONG_S)
        return list(started)

    yield begin
    for process in started:
        process.kill()
        process.join()


@pytest.mark.parametrize(("second", "seconds", "code"), [(_plain, LONG_S, -15), (_ignores_sigterm, 0.3, -9)])
def test_a_signal_ends_them(
    second: Callable[[Any], None], seconds: float, code: int, start: Callable[..., list[Any]]
) -> None:
    """The signal ends processes at once; one that ignores it is killed after the time limit."""
    processes = start(_plain, second)
    began = time.monotonic()
    stop_processes(processes, signal.SIGTERM, seconds=seconds)
    assert _exit_codes(processes) == [-15, code]
    assert (0.3 if code == -9 else 0.0) <= time.monotonic() - began < LONG_S / 2


def test_one_that_failed_ends_by_itself(start: Callable[..., list[Any]]) -> None:
    """A failed worker gets no signal, and its exit handlers have more time than stopped workers."""
    processes = start(_leaving, _plain)
    stop_processes(processes, signal.SIGTERM, spare=frozenset({0}), seconds=0.2)
    assert _exit_codes(processes) == [7, -signal.SIGTERM]


def test_one_that_failed_and_does_not_end(start: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose exit hangs is killed."""
    monkeypatch.setattr(workers, "EXIT_S", 0.5)
    processes = start(_plain)
    began = time.monotonic()
    stop_processes(processes, signal.SIGTERM, spare=frozenset({0}), seconds=0.2)
    assert time.monotonic() - began >= 0.5
    assert _exit_codes(processes) == [-signal.SIGKILL]


def test_one_that_is_exiting() -> None:
    """The kernel marks a process from the moment its exit begins; such a process is not stopped any more."""
    with subprocess.Popen([sys.executable, "-c", _ONLY_ITS_MAIN_THREAD_EXITS]) as process:
        stat = Path(f"/proc/{process.pid}/stat")
        deadline = time.monotonic() + LONG_S
        while (fields := stat.read_text().rpartition(")")[2].split())[0] != "Z" and time.monotonic() < deadline:
            time.sleep(0.01)

        assert int(fields[1 + workers._FLAGS]) & workers._EXITING
        assert not workers._is_running(process.pid)
        assert workers._is_running(os.getpid())
        process.kill()


def test_a_signal_from_elsewhere(start: Callable[..., list[Any]], prefix: Prefix) -> None:
    """A worker that SIGTERM ended before its agent sent one was not stopped, even if its death is noticed later."""
    processes = start(_plain, _plain)
    processes[0].terminate()
    _exit_codes(processes[:1])
    local = LocalWorkers(
        prefix.recording(),
        Reporter(prefix.recording(), lambda rank: Place(node="worker-0", local_rank=rank)),
        LONG_S,
        lambda: None,
    )
    local._context = SimpleNamespace(_pc=SimpleNamespace(processes=processes))

    local.stop("another worker of this node had failed")

    assert _exit_codes(processes) == [-signal.SIGTERM, -signal.SIGTERM]
    now = time.monotonic_ns()
    assert local.stopped is not None
    assert [local.stopped.ended(Death(rank, 1, -15, time.time_ns(), now)) for rank in (0, 1)] == [False, True]


def test_unfinished() -> None:
    """A worker that handed over its result, read or not, is finished."""

    class Context:
        _return_values = {0: "taken"}  # noqa: RUF012 - torch's, of an instance
        _ret_vals = {rank: _fork.SimpleQueue() for rank in range(3)}  # noqa: RUF012 - as above

    Context._ret_vals[1].put("waiting")
    assert unfinished(Context()) == {2}
    assert unfinished(object()) == frozenset()
