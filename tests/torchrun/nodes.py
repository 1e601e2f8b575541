"""Runs a job of programs on nodes that torchrun's command line starts,
and says what is wrong with its end.
"""

import itertools
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from firstfault.cli import main
from lab.cascades.cases import Way
from tests.nodes import forkserver
from tests.ports import get_free_port
from tests.processes import find_leftover_processes, find_running_processes, kill

JOB_TIMEOUT_S = 280
_DOORS = {
    "firstfault": ("-m", "firstfault", "torchrun"),
    "variable": ("-m", "torch.distributed.run"),
}
_RENDEZVOUS = {
    "static": "--master-addr=127.0.0.1 --master-port={port} --node-rank={node}",
    "file": (
        "--rdzv-backend=c10d --rdzv-endpoint={folder}/store --rdzv-id=job"
        " --rdzv-conf=store_type=file"
    ),
    "c10d": (
        "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=job"
        " --rdzv-conf=is_host={is_host}"
    ),
}
_TORCH_BOX_TEXTS = (
    "ChildFailedError",
    "Root Cause (first observed failure)",
    "torch.distributed.elastic.multiprocessing",
)
_SHOW_COMMAND_PREFIX = "  More: firstfault show "
_FAILURE_REPORT = re.compile(r"this node's workers.*failed: ")
_FIRST_REPORT = re.compile(r"firstfault: .*this node's .* \(first report, not the verdict\)$")
_MAX_LINES = 12


@dataclass(frozen=True, slots=True)
class Node:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The lines of firstfault, without the one that names this node's folder."""
        lines = self.err.splitlines()
        ends = [
            number for number, line in enumerate(lines) if line.startswith(_SHOW_COMMAND_PREFIX)
        ]
        before = lines[: ends[-1]] if ends else []
        starts = [number for number, line in enumerate(before) if line.startswith("firstfault: ")]
        return before[starts[-1] :] if starts else []

    @property
    def prefix(self) -> str:
        """The output prefix that it prints; empty if it prints none."""
        return self.err.rpartition(_SHOW_COMMAND_PREFIX)[2].split("\n")[0] if self.lines else ""

    @property
    def headline(self) -> str:
        """What failed, and where; empty if the node says nothing."""
        lines = self.lines
        more = itertools.takewhile(lambda line: line.startswith("    "), lines[1:])
        return (
            " ".join([lines[0].removeprefix("firstfault: "), *map(str.strip, more)])
            if lines
            else ""
        )


@dataclass(frozen=True, slots=True)
class Job:
    nodes: list[Node]
    truths: list[dict[str, Any]]
    """The injector's truth, by rank."""
    prefixes: list[str]
    """Output prefixes: the common one, or each node's, as the nodes print them if the job failed.
    """
    left: list[str]
    """Command lines of processes that did not end."""

    @property
    def alive(self) -> list[Node]:
        """The nodes whose agent was not killed."""
        return [node for node in self.nodes if node.code != -signal.SIGKILL]

    def find_problems(self, killed: int = 0) -> list[str]:
        """Return what is wrong with the end of a job that failed,
        of whose agents so many were killed.
        """
        found = [f"left behind: {line}" for line in self.left]
        if len(self.alive) != len(self.nodes) - killed:
            found.append("an agent was killed that should not have been, or the other way round")
        found += [f"exit code {node.code}" for node in self.alive if node.code != 1]
        found += [
            f"printed {text}"
            for node in self.alive
            for text in _TORCH_BOX_TEXTS
            if text in node.err
        ]
        told = [
            line
            for node in self.alive
            for line in node.err.splitlines()
            if _FAILURE_REPORT.search(line)
        ]
        found += [
            f"looks like the verdict: {line}" for line in told if not _FIRST_REPORT.match(line)
        ]
        if any(not node.lines or len(node.lines) >= _MAX_LINES for node in self.alive):
            found.append("a node has no lines, or too many")
        if len({tuple(node.lines) for node in self.alive}) > 1:
            found.append("the nodes differ: " + " | ".join(node.headline for node in self.alive))
        return found


def run_job(
    folder: Path,
    program: Sequence[str],
    way: Way,
    *,
    nodes: int = 2,
    options: Sequence[str] = (),
    environments: Mapping[int, Mapping[str, str]] | None = None,
    common: str = "",
    longest_s: float = JOB_TIMEOUT_S,
) -> Job:
    """Run a job to its end, each node in a folder of its own,
    and with two workers if the options do not say else.

    `program` is what torchrun starts: a script and its arguments, or options and these.
    `environments` has variables of some nodes; `common` is the URI of the common folder, if it is
    not local.
    """
    port = get_free_port()
    marks, temporary = folder / "marks", folder / "temporary"
    for new in (marks, temporary):
        new.mkdir(exist_ok=True)
    started: list[BaseProcess] = []
    for node in range(nodes):
        own = folder / f"node-{node}"
        own.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "FIRSTFAULT_NODE": f"host-{node}",
            "HOSTNAME": f"host-{node}",
            "MARKS": str(marks),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **({"FIRSTFAULT": "1"} if way.door == "variable" else {}),
            **(
                {"FIRSTFAULT_FOLDER": common or str(folder / "common")}
                if way.folder == "common"
                else {}
            ),
            **(environments or {}).get(node, {}),
        }
        given = {"port": port, "node": node, "is_host": int(node == 0), "folder": folder}
        rendezvous = _RENDEZVOUS[way.rendezvous].format(**given).split()
        arguments = [f"--nnodes={nodes}", "--nproc-per-node=2", *rendezvous, *options, *program]
        process = forkserver().Process(
            target=_launcher, args=(own, environment, way.door, arguments)
        )
        process.start()
        started.append(process)
    sessions = {process.pid for process in started}
    try:
        deadline = time.monotonic() + longest_s
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        left = find_leftover_processes(sessions, f"MARKS={marks}")
    finally:
        kill(find_running_processes(sessions, f"MARKS={marks}"))
        for process in started:
            process.join()
    ended = [
        Node(
            process.exitcode or 0,
            *((folder / f"node-{node}" / name).read_text() for name in ("out", "err")),
        )
        for node, process in enumerate(started)
    ]
    told = [json.loads(path.read_text()) for path in sorted(marks.glob("truth-*.json"))]
    shown = dict.fromkeys(node.prefix for node in ended if node.prefix)
    found = [*shown] or [str(found.parent) for found in folder.glob("**/0/firstfault")]
    return Job(ended, told, found, [*left.values()])


def _launcher(folder: Path, environment: dict[str, str], door: str, arguments: list[str]) -> None:
    """Be a node's launcher: a new process of Python, or, behind the door "forked", this one,
    which has loaded torch.
    """
    os.setsid()
    os.chdir(folder)
    for descriptor, name in enumerate((os.devnull, "out", "err")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), descriptor)
    if door != "forked":
        # our own words
        os.execve(sys.executable, [sys.executable, *_DOORS[door], *arguments], environment)  # noqa: S606
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.argv = ["firstfault", "torchrun", *arguments]
    main(sys.argv[1:])
