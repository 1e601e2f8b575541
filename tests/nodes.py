"""Jobs without Flyte: each node is forked from a process that has loaded torch, and so costs no imports.

The nodes share a folder, in which they leave documents, logs and what the workers tell a test.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.launcher.api import LaunchConfig

from firstfault import MultiErrorFileOutputReader
from firstfault_torch import NodeFailedError, PlainEngine, launch
from tests.plugin.running import DEADLINE_S, short_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import ForkServerContext
    from multiprocessing.process import BaseProcess

    from typing_extensions import Self

    from firstfault import Conclusion
    from firstfault.model import JobErrors, Verdict, WorkerError
    from firstfault_torch import Options

LEFT_S = 30.0
"""How long a process may outlive its agent."""


def forkserver() -> ForkServerContext:
    """Return the context of processes that are forked from one that has loaded torch, and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.nodes", "tests.inprocess.training", "tests.torch_agent.trainings"])
    return context


# --- for the workers --------------------------------------------------------------------------------------------------


def mark(folder: str, name: str, **content: object) -> None:
    """Tell the test something, with the ids of this worker's process and of its agent."""
    part = Path(folder, f"{name}.part")
    part.write_text(json.dumps({"pid": os.getpid(), "agent": os.getppid(), **content}))
    part.rename(part.with_suffix(".json"))


def await_file(folder: str, pattern: str, number: int = 1) -> None:
    """Wait until there are so many files."""
    while len(list(Path(folder).glob(pattern))) < number:
        time.sleep(0.01)


# --- for the tests ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """What became of a job."""

    folder: Path
    codes: list[int | None]
    """The nodes' exit codes: 0, and 1 after a failure."""
    conclusion: Conclusion | None
    """None: nothing failed."""
    job: JobErrors

    @property
    def verdict(self) -> Verdict:
        """The verdict on the failure."""
        assert self.conclusion is not None, self.logs
        return self.conclusion.verdict

    @property
    def results(self) -> dict[int, Any]:
        """What the workers returned, by rank."""
        found = {}
        for file in self.folder.glob("results-*.json"):
            found |= {int(rank): result for rank, result in json.loads(file.read_text()).items()}
        return found

    @property
    def logs(self) -> str:
        """The output of all nodes."""
        return "\n".join(file.read_text(errors="replace") for file in sorted(self.folder.glob("*.log")))

    def of_rank(self, rank: int) -> WorkerError:
        """Return the only recorded failure of a rank."""
        (failure,) = [failure for failure in self.job.failures if failure.rank == rank]
        return failure


@dataclass
class Job:
    """The nodes of a job, which run ``function(folder, *arguments)`` in their workers.

    Args:
        folder: for what the job leaves; it exists.
        function: of a module that the nodes import.
        arguments: further ones.
        options: of `launch`.
        config: fields of torch's LaunchConfig.
    """

    folder: Path
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    options: Options | None = None
    config: dict[str, Any] = field(default_factory=dict)
    processes: list[BaseProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.temporary = short_folder()
        endpoint = {"rdzv_backend": "c10d", "rdzv_endpoint": f"127.0.0.1:{get_free_port()}", "local_addr": "127.0.0.1"}
        common = {"start_method": "fork", "max_restarts": 0, "monitor_interval": 0.1, "run_id": "job"}
        self.config = {"nproc_per_node": 1, **endpoint, **common, **self.config}

    def start(self, number: int = 1) -> Job:
        """Start so many nodes."""
        for _ in range(number):
            environment = {**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
            work = (self.function, (str(self.folder), *self.arguments), self.options, self.config)
            place = (self.folder, len(self.processes), environment)
            self.processes.append(forkserver().Process(target=_node, args=(*place, *work)))
            self.processes[-1].start()
        return self

    def told(self, name: str) -> dict[str, Any]:
        """Wait until a worker has told something; return it."""
        path = self.folder / f"{name}.json"
        self.await_files(path.name)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def await_files(self, pattern: str) -> None:
        """Wait until there is such a file in the job's folder."""
        deadline = time.monotonic() + DEADLINE_S
        while not list(self.folder.glob(pattern)):
            assert any(process.is_alive() for process in self.processes), f"no {pattern}: {_logs(self.folder)}"
            assert time.monotonic() < deadline, f"no {pattern}: {_logs(self.folder)}"
            time.sleep(0.01)

    def end(self, **reading: Any) -> Ended:
        """Wait for the end of all nodes, after which nothing of them may remain; return what became of the job."""
        deadline = time.monotonic() + DEADLINE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, _logs(self.folder)
        left = self.left_over()
        assert left == [], left
        reader = MultiErrorFileOutputReader(str(self.folder / "0"), **reading)
        conclusion = reader.conclude()
        job = conclusion.job if conclusion is not None else reader.job()
        return Ended(self.folder, [process.exitcode for process in self.processes], conclusion, job)

    def left_over(self) -> list[str]:
        """Return which processes, sockets, FIFOs and folders of the job remain after a while."""
        deadline = time.monotonic() + LEFT_S
        while (
            left := [*self._running(), *map(str, self.temporary.glob("firstfault-*"))]
        ) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _running(self) -> Iterator[str]:
        sessions = {str(process.pid) for process in self.processes}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                is_ours = fields[3] in sessions or f"TMPDIR={self.temporary}\0" in (folder / "environ").read_text()
                if is_ours and fields[0] != "Z":
                    yield f"{folder.name} {(folder / 'cmdline').read_text()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(running.partition(" ")[0]), signal.SIGKILL)
        for process in self.processes:
            process.join()


def _logs(folder: Path) -> str:
    return "\n".join(file.read_text(errors="replace")[-5000:] for file in sorted(folder.glob("*.log")))


def _node(  # noqa: PLR0917 - arguments of a process
    folder: Path,
    number: int,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: Options | None,
    config: dict[str, Any],
) -> None:
    """Run one node's agent and its workers."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    os.chdir(folder)
    for descriptor, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"node-{number}.{stream}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    settings = LaunchConfig(**{"min_nodes": 2, "max_nodes": 2, **config})
    engine = PlainEngine(str(folder), node=f"node-{number}")
    try:
        results = launch(settings, function, *arguments, engine=engine, options=options)
    except NodeFailedError:
        sys.exit(1)
    Path(folder, f"results-{number}.json").write_text(json.dumps(results))
