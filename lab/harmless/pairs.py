"""Runs a plan under plain torchrun and under firstfault, side by side, and lists what differs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread

from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.run import main as run_torchrun

from firstfault.cli import main as run_firstfault
from lab.harmless.machines import Cleaner, enter_machine
from lab.harmless.plans import Plan, SentSignal
from tests.nodes import forkserver
from tests.processes import (
    Process,
    find_leftover_processes,
    find_running_processes,
    kill,
    read_processes,
)
from tests.torch_agent.hostile import NotAllowedError

PROGRAM = Path(__file__).with_name("program.py")
SIDES = ("torchrun", "firstfault")
LONGEST_SECONDS = 150.0
READY_SECONDS = 90.0
_NOT_POSSIBLE = 77
"""The exit code of a node whose machine can't be made here."""
_POLL_SECONDS = 0.02


class NotPossibleError(Exception):
    """This machine can't run the plan, for instance without root."""


class InvalidPlanError(Exception):
    """The plan doesn't work without firstfault."""


@dataclass(frozen=True)
class Ended:
    """What a job left."""

    codes: tuple[int | None, ...]
    """The exit code of each node; negative: the signal that ended it; None: it had to be killed."""
    files: dict[str, str]
    """Digest of each file that the program wrote, by name; names of starts,
    checkpoints and results are among them.
    """
    output: tuple[str, ...]
    """The sorted lines of standard output of all nodes."""
    errors: tuple[str, ...]
    """The sorted lines that ranks wrote to standard error."""
    leftovers: tuple[str, ...]
    """Command lines of processes, and files in the temporary folder, that outlived the job."""
    seconds: float


@dataclass(frozen=True)
class _Side:
    """How the nodes of one side of a pair are started."""

    plan: Plan
    side: str
    folder: Path
    number: int
    """For a user id of its own."""
    port: int
    uses_forks: bool
    """Whether a node is a fork of a process that has loaded torch, and needs no imports;
    otherwise a new process.
    """

    def build_environment(self, node: int) -> dict[str, str]:
        """Return the variables of a node."""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("FIRSTFAULT")
        }
        environment |= {
            "HARMLESS_OUT": str(self.folder / "out"),
            "HARMLESS_PLAN": self.plan.to_json(),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder / "tmp"),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        # With a shared store, torch 2.13 doesn't publish its address again for a node that joins
        # later
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.plan.joins else {}
        if self.side == "firstfault":
            environment |= {"FIRSTFAULT_NODE": f"host-{node}"}
            environment |= {"FIRSTFAULT": "1"} if self.plan.door != "firstfault" else {}
            environment |= (
                {"FIRSTFAULT_DECISIONS": self.plan.decisions} if self.plan.decisions else {}
            )
            environment |= {"FIRSTFAULT_HANG": "warn:1"} if self.plan.native_wait else {}
        return environment

    def build_command(self, node: int) -> list[str]:
        """Return what Python runs on a node, after the interpreter's name."""
        if self.plan.door == "ranks":
            return [
                str(Path(__file__).with_name("launcher.py")),
                str(self.plan.workers),
                str(self.port),
                str(PROGRAM),
            ]
        uses_door = self.side == "firstfault" and self.plan.door == "firstfault"
        return [
            "-m",
            *(("firstfault", "torchrun") if uses_door else ("torch.distributed.run",)),
            *self.build_arguments(node),
        ]

    def build_arguments(self, node: int) -> list[str]:
        """Return torchrun's arguments on a node."""
        plan = self.plan
        nodes = f"1:{plan.nodes}" if plan.joins else str(plan.nodes)
        return [
            f"--nnodes={nodes}",
            f"--nproc-per-node={plan.workers}",
            f"--max-restarts={plan.max_restarts}",
            "--monitor-interval=0.1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            # a job that more nodes may join waits for them, by default for 30 s
            f"--rdzv-conf=is_host={int(node == 0)},last_call_timeout=1",
            "--rdzv-id=harmless",
            "--local-addr=127.0.0.1",
            str(PROGRAM),
        ]


class _Job:
    """One side of a pair while it runs."""

    def __init__(self, side: _Side) -> None:
        self.side = side
        self.plan = side.plan
        self.folder = side.folder
        for name in ("out", "tmp", "runs"):
            (self.folder / name).mkdir(parents=True)
        self.nodes: dict[int, BaseProcess] = {}
        self.began = time.monotonic()
        self.cleaner = Cleaner(self.folder / "tmp") if self.plan.machine == "cleaner" else None

    def start(self) -> None:
        """Start the nodes, but not one that joins later."""
        for node in range(self.plan.nodes):
            if node == 0 or not self.plan.joins:
                self.start_node(node)

    def start_node(self, node: int) -> None:
        """Start a node's launcher in a session of its own."""
        environment = self.side.build_environment(node)
        process = forkserver().Process(target=_be_node, args=(self.side, node, environment))
        process.start()
        self.nodes[node] = process

    def await_ready(self, number: int) -> bool:
        """Wait until so many ranks train; False if the job ended before."""
        deadline = time.monotonic() + READY_SECONDS
        while len(list((self.folder / "out").glob("ready-*"))) < number:
            if time.monotonic() > deadline or not any(
                process.is_alive() for process in self.nodes.values()
            ):
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def drive(self) -> None:
        """Send the plan's signals, and start the node that joins."""
        if self.plan.joins and self.await_ready(self.plan.workers):
            self.start_node(1)
        if not self.plan.signals or not self.await_ready(self.plan.nodes * self.plan.workers):
            return
        began = time.monotonic()
        for sent in self.plan.signals:
            time.sleep(max(0.0, began + sent.seconds - time.monotonic()))
            self._send(sent)

    def _send(self, sent: SentSignal) -> None:
        agent = self.nodes[sent.node].pid
        pids = [agent]
        if sent.to_all_processes:
            # each worker has a session of its own, so they are found by their parents
            found = read_processes()
            pids += [
                pid
                for pid, process in found.items()
                if _descends(pid, agent or 0, found) and process.state != "Z"
            ]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid or 0, signal.Signals[sent.name])

    def end(self) -> Ended:
        """Wait for the end of the nodes, and for what they left."""
        deadline = self.began + LONGEST_SECONDS
        for process in self.nodes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        codes = tuple(process.exitcode for process in self.nodes.values())
        seconds = time.monotonic() - self.began
        variable = f"HARMLESS_OUT={self.folder / 'out'}"
        left = find_leftover_processes({process.pid for process in self.nodes.values()}, variable)
        kill(find_running_processes({process.pid for process in self.nodes.values()}, variable))
        for process in self.nodes.values():
            process.join()
        if self.cleaner is not None:
            self.cleaner.stop()
        if _NOT_POSSIBLE in codes:
            raise NotPossibleError((self.folder / "err-0").read_text().strip())
        temporary = [path.name for path in (self.folder / "tmp").glob("firstfault-*")]
        return Ended(
            codes,
            {path.name: _describe(path) for path in sorted((self.folder / "out").iterdir())},
            tuple(sorted(self._lines("out"))),
            tuple(sorted(line for line in self._lines("err") if line.startswith(("rank ", "yyy")))),
            (*left.values(), *temporary),
            seconds,
        )

    def _lines(self, stream: str) -> Iterator[str]:
        for path in sorted(self.folder.glob(f"{stream}-*")):
            yield from path.read_text(errors="replace").splitlines()


def _descends(pid: int, ancestor: int, found: dict[int, Process]) -> bool:
    while pid in found:
        pid = found[pid].parent
        if pid == ancestor:
            return True
    return False


def _describe(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.stat().st_size else "empty"


def _be_node(side: _Side, node: int, environment: dict[str, str]) -> None:
    """Be the launcher of a node."""
    os.setsid()
    os.chdir(side.folder / "runs")
    for descriptor, name in ((0, os.devnull), (1, f"out-{node}"), (2, f"err-{node}")):
        path = name if name == os.devnull else str(side.folder / name)
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    try:
        if side.plan.machine not in {"", "cleaner"}:
            enter_machine(side.plan.machine, side.folder, side.number)
    except NotAllowedError as error:
        print(error, file=sys.stderr)
        sys.exit(_NOT_POSSIBLE)
    if not side.uses_forks or side.plan.door != "firstfault":
        # our own words
        os.execve(sys.executable, [sys.executable, *side.build_command(node)], dict(os.environ))  # noqa: S606
    if side.side == "torchrun":
        run_torchrun(side.build_arguments(node))
    else:
        sys.argv = ["firstfault", "torchrun", *side.build_arguments(node)]
        run_firstfault(sys.argv[1:])


def run_pair(plan: Plan, folder: Path, *, uses_forks: bool = False) -> tuple[Ended, Ended]:
    """Run a plan on both sides at the same time; return what plain torchrun left,
    and what firstfault left.

    Raises:
        NotPossibleError: this machine can't run it.
        InvalidPlanError: under torchrun the job didn't end as planned, so the pair shows nothing.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder = folder.absolute()
    jobs = [
        _Job(_Side(plan, side, folder / side, 2 * plan.seed + index, get_free_port(), uses_forks))
        for index, side in enumerate(SIDES)
    ]
    for job in jobs:
        job.start()
    # Each job has a driver: its ranks are ready at their own time.
    drivers = [Thread(target=job.drive) for job in jobs]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join()
    plain, ours = [job.end() for job in jobs]
    expected = {1} if plan.signals else {0}
    if {*plain.codes} != expected:
        raise InvalidPlanError(
            f"under torchrun the nodes exited with {plain.codes}: {jobs[0].folder}/err-0"
        )
    return plain, ours


def find_differences(plain: Ended, ours: Ended) -> list[str]:
    """Return a line for each thing that a job under firstfault did in another
    way than under torchrun.
    """
    found = []
    if plain.codes != ours.codes:
        found.append(f"exit codes {list(plain.codes)} became {list(ours.codes)}")
    for name in sorted(plain.files.keys() | ours.files.keys()):
        before = plain.files.get(name, "missing")
        after = ours.files.get(name, "missing")
        if before != after:
            found.append(f"file {name}: {before} became {after}")
    found += _compare_lines("stdout", plain.output, ours.output)
    found += _compare_lines("stderr of a rank", plain.errors, ours.errors)
    found += [
        f"left behind: {line[:100]}" for line in ours.leftovers if line not in plain.leftovers
    ]
    return found


def _compare_lines(stream: str, before: Sequence[str], after: Sequence[str]) -> list[str]:
    if before == after:
        return []
    missing = [line for line in before if line not in after]
    new = [line for line in after if line not in before]
    shown = [f"-{line[:80]}" for line in missing[:2]] + [f"+{line[:80]}" for line in new[:2]]
    return [f"{stream}: {len(before)} lines became {len(after)} {' '.join(shown)}"]
