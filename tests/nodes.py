"""Jobs without Flyte: each node is forked from a process that has loaded torch,
and so costs no imports.

The nodes share a folder, in which they leave documents, logs and what the workers tell a test.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig
from typing_extensions import Self

from firstfault import MultiErrorFileOutputReader
from firstfault.conclude import Conclusion
from firstfault.model import JobErrors, Verdict, WorkerError
from firstfault_torch import NodeFailedError, Options, PlainEngine, launch
from tests.plugin.running import DEADLINE_S, short_folder
from tests.ports import get_free_port
from tests.processes import find_leftover_processes, find_running_processes, kill
from tests.s3_server import listening

_LOADED = (
    "torch.distributed.run",
    "tests.nodes",
    "tests.torchrun.nodes",
    "tests.inprocess.training",
)


WAIT_IN_STORE = {"firstfault-outcome", "firstfault-settlement"}
"""Threads of an agent that wait in torch's store, in C++."""


def forkserver() -> ForkServerContext:
    """Return the context of processes that are forked from one that has loaded torch,
    and nothing else.
    """
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # torch reads it when it is loaded
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_LOADED, "tests.torch_agent.trainings", "tests.frozen"])
    return context


def mark(folder: str, name: str, **content: object) -> None:
    """Tell the test something, with the ids of this worker's process and of its agent."""
    part = Path(folder, f"{name}.part")
    part.write_text(json.dumps({"pid": os.getpid(), "agent": os.getppid(), **content}))
    part.rename(part.with_suffix(".json"))


def await_file(folder: str, pattern: str, number: int = 1) -> None:
    while len(list(Path(folder).glob(pattern))) < number:
        time.sleep(0.01)


@dataclass(frozen=True)
class Ended:
    folder: Path
    codes: list[int | None]
    """The nodes' exit codes: 0, and 1 after a failure."""
    reader: MultiErrorFileOutputReader
    conclusion: Conclusion | None
    """None: nothing failed."""
    job: JobErrors

    @property
    def verdict(self) -> Verdict:
        assert self.conclusion is not None, self.logs
        return self.conclusion.verdict

    @property
    def results(self) -> dict[int, Any]:
        found = {}
        for file in self.folder.glob("results-*.json"):
            found |= {int(rank): result for rank, result in json.loads(file.read_text()).items()}
        return found

    @property
    def waiting_threads(self) -> set[str]:
        """The threads that waited in torch's store when the agents' processes ended:
        Python may abort these.
        """
        files = self.folder.glob("threads-*.json")
        return WAIT_IN_STORE.intersection(
            name for file in files for name in json.loads(file.read_text())
        )

    @property
    def logs(self) -> str:
        return "\n".join(
            file.read_text(errors="replace") for file in sorted(self.folder.glob("*.log"))
        )

    def find_failure(self, rank: int) -> WorkerError:
        (failure,) = [failure for failure in self.job.failures if failure.rank == rank]
        return failure


@dataclass
class Job:
    """The nodes of a job, which run ``function(folder, *arguments)`` in their workers.

    The folder exists; `function` is of a module that the nodes import. `config` has fields of
    torch's LaunchConfig, and `store` is the URI of the documents' folder, if it is not the job's.
    `engine` makes a node's engine.
    """

    folder: Path
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    options: Options | None = None
    config: dict[str, Any] = field(default_factory=dict)
    store: str = ""
    attempt: int = 0
    engine: Callable[..., PlainEngine] = PlainEngine
    processes: list[BaseProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.temporary = short_folder()
        endpoint = {
            "rdzv_backend": "c10d",
            "rdzv_endpoint": f"127.0.0.1:{get_free_port()}",
            "local_addr": "127.0.0.1",
        }
        common = {
            "start_method": "fork",
            "max_restarts": 0,
            "monitor_interval": 0.1,
            "run_id": "job",
        }
        self.config = {"nproc_per_node": 1, **endpoint, **common, **self.config}

    def start(self, number: int = 1) -> Job:
        for _ in range(number):
            environment = {**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
            work = (self.function, (str(self.folder), *self.arguments), self.options, self.config)
            engine = self.engine(
                self.store or str(self.folder), self.attempt, f"node-{len(self.processes)}"
            )
            self.processes.append(
                forkserver().Process(target=_node, args=(self.folder, engine, environment, *work))
            )
            self.processes[-1].start()
        return self

    def await_mark(self, name: str) -> dict[str, Any]:
        """Wait until a worker has told something; return it."""
        path = self.folder / f"{name}.json"
        self.await_files(path.name)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def host(self, agents: dict[int, int]) -> int:
        """Return the rank whose agent hosts the store that the agents share."""
        port = self.config["rdzv_endpoint"].rpartition(":")[2]
        is_host = {
            rank: any(it.endswith(f":{port}") for it in listening(pid))
            for rank, pid in agents.items()
        }
        return next(rank for rank in agents if is_host[rank])

    def go(self, rank: int) -> None:
        """Write a rank into the file "go", for which the workers wait."""
        (self.folder / "part").write_text(str(rank))
        (self.folder / "part").rename(self.folder / "go")

    def await_files(self, pattern: str) -> None:
        """Wait until there is such a file in the job's folder."""
        deadline = time.monotonic() + DEADLINE_S
        while not list(self.folder.glob(pattern)):
            assert any(process.is_alive() for process in self.processes), (
                f"no {pattern}: {_logs(self.folder)}"
            )
            assert time.monotonic() < deadline, f"no {pattern}: {_logs(self.folder)}"
            time.sleep(0.01)

    def end(self, **reading: Any) -> Ended:
        """Wait for the end of all nodes, after which nothing of them may remain;
        return what became of the job.
        """
        deadline = time.monotonic() + DEADLINE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, _logs(self.folder)
        left = self.find_leftovers()
        assert left == [], left
        reader = MultiErrorFileOutputReader(
            f"{self.store or self.folder}/{self.attempt}", **reading
        )
        conclusion = reader.conclude()
        job = conclusion.job if conclusion is not None else reader.job()
        return Ended(
            self.folder,
            [process.exitcode for process in self.processes],
            reader,
            conclusion,
            job,
        )

    def find_leftovers(self) -> list[str]:
        """Return which processes of the job remain after a while, and which of their sockets,
        FIFOs and folders.
        """
        processes = find_leftover_processes(*self._ours)
        return [*processes.values(), *map(str, self.temporary.glob("firstfault-*"))]

    @property
    def _ours(self) -> tuple[set[int | None], str]:
        """What the job's processes have in common: their sessions, or a variable."""
        return {process.pid for process in self.processes}, f"TMPDIR={self.temporary}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        kill(find_running_processes(*self._ours))
        for process in self.processes:
            process.join()


def _logs(folder: Path) -> str:
    return "\n".join(
        file.read_text(errors="replace")[-5000:] for file in sorted(folder.glob("*.log"))
    )


def _node(  # noqa: PLR0917 - arguments of a process
    folder: Path,
    engine: PlainEngine,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: Options | None,
    config: dict[str, Any],
) -> None:
    """Run one node's agent and its workers, in the control group of a variable."""
    os.setsid()
    if "MEMORY_GROUP" in environment:
        Path(environment["MEMORY_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    os.chdir(folder)
    for descriptor, stream in ((1, "out"), (2, "err")):
        os.dup2(
            os.open(folder / f"{engine.node}.{stream}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
            descriptor,
        )
    settings = LaunchConfig(**{"min_nodes": 2, "max_nodes": 2, **config})
    try:
        results = launch(settings, function, *arguments, engine=engine, options=options)
    except NodeFailedError:
        sys.exit(1)
    finally:
        names = [thread.name for thread in threading.enumerate()]
        Path(folder, f"threads-{engine.node}.json").write_text(json.dumps(names))
    Path(folder, f"results-{engine.node}.json").write_text(json.dumps(results))
