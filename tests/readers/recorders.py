"""Recorders as processes, agents that start them, and a storage whose writes can be held up;
fixtures of conftest.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

import pytest

from firstfault.recorder import time_limits
from firstfault.recorder.folder import NodeFolder
from firstfault.recorder.process import RecorderProcess, start_recorder
from tests.prefix import Prefix
from tests.processes import is_gone
from tests.waiting import wait_until

Start: TypeAlias = Callable[..., "RecorderProcess"]
StartAgent: TypeAlias = Callable[..., "Agent"]

HANG_S = 60.0
"""Longest wait for an expected event."""
SHORT_S = 0.5
"""A deadline that a test lets pass."""
TOLERANCE_S = 20.0
"""Tolerance on a deadline on a busy machine."""


@pytest.fixture
def out(tmp_path: Path) -> Prefix:
    """Return an empty output prefix."""
    return Prefix(tmp_path / "out")


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return a folder for temporary files with a path that is short enough for a socket;
    `tmp_path` lies elsewhere.
    """
    folder = tempfile.mkdtemp(prefix="ff-", dir="/tmp")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    # on a busy machine a recorder takes seconds to start, and then a client would do without it
    monkeypatch.setattr(time_limits, "REQUEST_RECEIPT_TIMEOUT_SECONDS", HANG_S)
    monkeypatch.setenv("TMPDIR", folder)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start(short: str) -> Iterator[Start]:
    """Start recorders, and kill those that are left after the test."""
    started: list[RecorderProcess] = []

    def run(uri: str) -> RecorderProcess:
        started.append(start_recorder(uri, deadline_seconds=HANG_S))
        return started[-1]

    yield run
    for process in started:
        if process.alive():
            os.kill(process.pid, signal.SIGKILL)
        process.end()


def add_modules(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@dataclass(frozen=True)
class Gate:
    """A storage, installed as an fsspec plug-in, whose writes wait until its gate is opened."""

    folder: Path

    def uri(self, out: Prefix) -> str:
        """Return the URI of an output prefix behind the gate."""
        return f"gated://{out.folder}"

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
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Return a storage whose gate is closed, for recorders that are started later."""
    folder = tmp_path / "plugins"
    (folder / "gated-1.0.dist-info").mkdir(parents=True)
    (folder / "gated-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: gated\nVersion: 1.0\n"
    )
    (folder / "gated-1.0.dist-info" / "entry_points.txt").write_text(
        "[fsspec.specs]\ngated = gated.Gated\n"
    )
    (folder / "gated.py").write_text(_GATED)
    gate = Gate(folder)
    add_modules(monkeypatch, folder)
    monkeypatch.setenv("GATE", str(folder))
    yield gate
    gate.open()


_AGENT = """
import sys
from firstfault.recorder.process import start_recorder
process = start_recorder(sys.argv[1], deadline_seconds=float(sys.argv[2]), left_seconds=0.5)
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
        wait_until(lambda: is_gone(self.recorder_pid), "the recorder's end")
        assert not self.folder.path.exists()


@pytest.fixture
def agent(short: str) -> Iterator[StartAgent]:
    """Start agents, and kill those that are left after the test, with their recorders."""
    started: list[Agent] = []

    def run(uri: str, deadline_seconds: float = HANG_S, stderr: IO[bytes] | None = None) -> Agent:
        command = [sys.executable, "-c", _AGENT, uri, str(deadline_seconds)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
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
