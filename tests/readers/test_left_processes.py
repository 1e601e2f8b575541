"""Processes that the workers of a node left are found and ended; others of the same session are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from firstfault.recorder.left_behind import end_left_processes, left_processes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 30.0
SLEEPS = "import signal, sys, time\nprint('ready', flush=True)\ntime.sleep(60)"
STUBBORN = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SLEEPS}"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Collect processes; end them after the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def _start(started: list[subprocess.Popen[str]], code: str = SLEEPS, **more: object) -> subprocess.Popen[str]:
    process: subprocess.Popen[str] = subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, **more
    )
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _of_worker(folder: Path) -> dict[str, str]:
    return {**os.environ, "FIRSTFAULT_LOCAL_RANK": "1", "FIRSTFAULT_NODE_FOLDER": str(folder)}


def test_what_a_worker_started(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    """A program has its worker's variables, and a fork its worker's files, wherever its stderr goes."""
    program = _start(started, env=_of_worker(tmp_path))
    with (tmp_path / "stacks-0-1.txt").open("a", encoding="utf-8") as file:
        fork = _start(started, pass_fds=(file.fileno(),))
    with (tmp_path / "stderr-0-1.fifo").open("w", encoding="utf-8") as file:
        talks = _start(started, stderr=file)
    assert left_processes(tmp_path) == {program.pid, fork.pid, talks.pid}


def test_what_others_started(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    """A daemon, the agent's own children, and the workers of another node are left alone."""
    node, other = tmp_path / "node", tmp_path / "other"
    for folder in (node, other):
        folder.mkdir()
    _start(started, env=_of_worker(node), start_new_session=True)
    _start(started, env=_of_worker(other))
    _start(started, env={**os.environ, "FIRSTFAULT_NODE_FOLDER": str(node)})
    (node / "stderr-0-1.fifo").touch()
    with (node / "stderr-0-1.fifo").open(encoding="utf-8") as file:
        _start(started, pass_fds=(file.fileno(),))
    with (node / "recorder.log").open("w", encoding="utf-8") as file:
        _start(started, pass_fds=(file.fileno(),))
    assert left_processes(node) == set()
    end_left_processes(node, 0.1)
    assert [process.poll() for process in started] == [None] * 5


def test_how_they_end(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    """They end by SIGTERM, and by SIGKILL if they ignore that for too long."""
    _start(started, env=_of_worker(tmp_path))
    end_left_processes(tmp_path, PATIENCE_S)
    assert left_processes(tmp_path) == set()
    _start(started, STUBBORN, env=_of_worker(tmp_path))
    stopped = _start(started, env=_of_worker(tmp_path))
    stopped.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    end_left_processes(tmp_path, 0.5)
    assert time.monotonic() - began < PATIENCE_S
    assert left_processes(tmp_path) == set()
