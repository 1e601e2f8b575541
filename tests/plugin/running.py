"""Runs ``firstfault run`` in the background,
so that a test can signal its workers and wait for its end.
"""

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstfault import MultiErrorFileOutputReader
from firstfault.model import JobErrors, WorkerError
from tests.processes import find_running_processes

DEADLINE_S = 280
"""A run of four processes takes a minute and a half on a busy machine with two slow cores."""


@dataclass(frozen=True)
class Ended:
    status: int
    """The command's exit code."""
    result: dict[str, Any]
    stderr: str

    @property
    def attempt(self) -> dict[str, Any]:
        last: dict[str, Any] = self.result["attempts"][-1]
        return last

    @property
    def verdict(self) -> dict[str, Any]:
        verdict: dict[str, Any] = self.attempt["verdict"]
        return verdict

    @property
    def prefix(self) -> Path:
        return Path(self.attempt["errors"]).parents[1]

    @property
    def job(self) -> JobErrors:
        """The attempt's documents, as our reader assembles them."""
        return MultiErrorFileOutputReader(str(self.prefix)).job()

    def find_failure(self, rank: int) -> WorkerError:
        (failure,) = [failure for failure in self.job.failures if failure.rank == rank]
        return failure

    @property
    def logs(self) -> str:
        return "\n".join(Path(log).read_text(errors="replace") for log in self.attempt["logs"])

    def flyte_saw_the_verdict(self) -> None:
        """Check that stock Flyte, when the job ended, read the sealed verdict."""
        seen, decision = self.attempt["engine"]["error_seen"], self.attempt["decision"]
        verdict = self.verdict
        assert self.attempt["engine"]["job"] == "Succeeded"
        root = MultiErrorFileOutputReader(str(self.prefix)).conclude().verdict.root
        assert (seen["code"], seen["worker"]) == (
            root.code if root else verdict["code"],
            verdict["node"] or "",
        )
        assert seen["timestamp"] == verdict["timestamp"]
        assert (seen["kind"], seen["origin"]) == (decision["kind"], decision["origin"])


@dataclass(frozen=True)
class Running:
    """A running `firstfault run`, and the folder in which its workers write their marks."""

    process: subprocess.Popen[str]
    marks: Path
    temporary: Path

    def mark(self, name: str) -> dict[str, Any]:
        """Wait until a worker has written a mark; return its content."""
        path = self.marks / f"{name}.json"
        deadline = time.monotonic() + DEADLINE_S
        while not path.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"{name} never came"
            time.sleep(0.01)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def end(self) -> Ended:
        """Wait for the end; return the result."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        assert out, err
        return Ended(self.process.returncode, json.loads(out.splitlines()[-1]), err)

    def find_leftovers(self) -> list[str]:
        """Return this run's remaining processes, sockets, FIFOs and folders."""
        return [
            *find_running_processes(variable=f"MARKS={self.marks}").values(),
            *map(str, self.temporary.glob("firstfault-*")),
        ]


@contextlib.contextmanager
def running(
    file: Path,
    task: str,
    folder: Path,
    inputs: dict[str, Any],
    *options: str,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[Running]:
    """Start a run without retries and with its own temporary folder; end it if the test does not.

    The caller's options override those that are set here, and its variables those of this process.
    The pods' logs lie in `cwd` if the store is remote.
    """
    marks = folder / "marks"
    temporary = short_folder()
    marks.mkdir()
    arguments = [
        sys.executable,
        "-m",
        "firstfault",
        "run",
        str(file),
        task,
        "--store",
        str(folder / "store"),
    ]
    arguments += [
        "--inputs",
        json.dumps(inputs),
        "--json",
        "--retries",
        "0",
        "--system-retries",
        "0",
    ]
    process = subprocess.Popen(
        [*arguments, "--env", f"MARKS={marks}", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), **(environment or {})},
        cwd=cwd,
    )
    try:
        yield Running(process, marks, temporary)
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate()


def short_folder() -> Path:
    """Return a new folder with so short a path that a socket in it has a valid address;
    it is removed at exit.
    """
    folder = Path(tempfile.mkdtemp(prefix="ff-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
