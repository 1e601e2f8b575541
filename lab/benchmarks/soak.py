"""Many attempts with random faults through the real ``firstfault run``, and what they leave:
``make soak``.

    python lab/benchmarks/soak.py [--attempts N] [--seed S]

Half of the attempts are executions of their own; the others are retries in executions of `SERIES`
attempts, so that one engine lives long. Beside them, for each 100 attempts one more restarts its
workers `ROUNDS` times under one agent and one recorder. After each attempt no process, no socket
and no folder of ours may be left, and the verdict and the exit code must be right. Engine, agent
and recorder must not grow. torch's and flytekit's own files are counted. The exit code is 1 if
anything was wrong; build/soak/ then keeps what that execution stored and printed.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # started as a script

from tests.processes import Process, read_processes  # noqa: E402 - only now it is found

JOBS = ROOT / "tests" / "plugin" / "jobs" / "soaking.py"
KEPT = ROOT / "build" / "soak"
"""Stores, marks and output of the executions in which something was wrong."""
SERIES = 20
ROUNDS = 20
LIMIT_S = 300.0
"""Longest attempt, and longest wait for the workers of a round."""
_END_S = 10.0
"""How long processes may still end after the command's exit."""
_GROWN_FILES, _GROWN_THREADS, _GROWN_KIB = 2, 3, 300
"""What a process may have more after warming up: files and threads in all, KiB of memory for each
attempt or round. An agent reads all earlier rounds to judge one, which takes about 170 KiB for each
round of two workers.
"""
_GROWN_ONCE_KIB = 16 << 10
"""What all attempts together may add: the first big message, and what is imported late."""


@dataclass(frozen=True)
class Expected:
    """What the verdict says of one kind of fault."""

    text: str
    """A pattern in the verdict's message or headline."""
    retry: bool = False
    """By the default policy."""
    category: str = ""
    """Empty: not compared."""
    is_node: bool = False
    """The root cause is a node, not a rank."""


FAULTS = {
    "none": Expected(""),
    "exception": Expected("ValueError: asked for: exception", category="user_code"),
    "recoverable": Expected("asked for: recoverable", retry=True),
    "worker SIGKILL": Expected("SIGKILL"),
    "worker SIGABRT": Expected("SIGABRT"),
    "worker SIGTERM": Expected("SIGTERM|got signal: 15"),
    "bad pointer": Expected("SIGSEGV"),
    "exit": Expected("SystemExit.*3"),
    "memory": Expected("MemoryError: asked for: memory"),
    "message": Expected("ValueError: asked for: message big big"),
    "stderr": Expected("ValueError: asked for: stderr"),
    "files": Expected("asked for: files, 200 of them"),
    "child": Expected("ValueError: asked for: child"),
    "recorder SIGKILL": Expected("ValueError: asked for: recorder SIGKILL"),
    "recorder SIGSTOP": Expected("ValueError: asked for: recorder SIGSTOP"),
    "agent SIGTERM": Expected("SIGTERM", retry=True, category="preemption", is_node=True),
    "agent SIGKILL": Expected("", retry=True, category="node_lost", is_node=True),
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One fault, and the rank on which or beside which it happens."""

    kind: str
    rank: int

    def __str__(self) -> str:
        return f"{self.kind}@{self.rank}"


@dataclass(frozen=True)
class Execution:
    """One call of ``firstfault run``."""

    task: str
    faults: tuple[Fault, ...]
    """One for each attempt, or for each round of `restarted`."""

    @property
    def has_rounds(self) -> bool:
        """Whether the faults are those of rounds in one attempt."""
        return self.task == "restarted"

    @property
    def attempts(self) -> int:
        return 1 if self.has_rounds else len(self.faults)


def planned(attempts: int, seed: int) -> list[Execution]:
    """Return executions with so many attempts in all, and those that restart;
    equal for equal seeds.
    """
    rng = random.Random(seed)

    def faults(count: int) -> tuple[Fault, ...]:
        # only the last attempt of a series may succeed
        failing = [kind for kind in FAULTS if kind != "none"]
        kinds = [*rng.choices(failing, k=count - 1), rng.choice(list(FAULTS))]
        return tuple(Fault(kind, rng.randrange(2)) for kind in kinds)

    alone = (attempts + 1) // 2
    found = [
        Execution(rng.choice(("forked", "spawned", "two_nodes")), faults(1)) for _ in range(alone)
    ]
    rest = attempts - alone
    sizes = [SERIES] * (rest // SERIES) + ([rest % SERIES] if rest % SERIES else [])
    found += [Execution(rng.choice(("forked", "two_nodes")), faults(size)) for size in sizes]
    for _ in range(max(1, attempts // 100)):
        rounds = [Fault("recoverable", rng.randrange(2)) for _ in range(ROUNDS)]
        found.append(Execution("restarted", (*rounds, Fault("none", 0))))
    rng.shuffle(found)
    return found


# --- processes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    kib: int
    files: int
    threads: int


def held(pid: int) -> Held | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - names only
        kib, threads = (
            int(status.partition(f"{name}:")[2].split()[0]) for name in ("VmRSS", "Threads")
        )
    except (OSError, IndexError):  # gone, or a zombie
        return None
    return Held(kib, files, threads)


def of_run(marks: Path) -> dict[int, Process]:
    """Return the processes of a run's pods, by variables in their environment;
    a zombie has none.
    """
    return {
        pid: process
        for pid, process in read_processes().items()
        if process.environment.get("MARKS") == str(marks)
        and "FLYTE_ATTEMPT_NUMBER" in process.environment
    }


def grown(samples: Sequence[Held]) -> str:
    """Return how a process has grown from its first samples, without the very first two,
    to its last; empty: not.
    """
    warm = samples[2:]
    part = len(warm) // 3
    if not part:
        return ""
    first, last = warm[:part], warm[-part:]
    files = min(item.files for item in last) - max(item.files for item in first)
    threads = min(item.threads for item in last) - max(item.threads for item in first)
    each = statistics.median(after.kib - before.kib for before, after in itertools.pairwise(warm))
    kib = min(item.kib for item in last) - max(item.kib for item in first)
    wrong = [f"{files} more files"] if files > _GROWN_FILES else []
    wrong += [f"{threads} more threads"] if threads > _GROWN_THREADS else []
    wrong += [f"{each:.0f} KiB more each time"] if each > _GROWN_KIB else []
    wrong += [f"{kib >> 10} MiB more in all"] if kib > _GROWN_ONCE_KIB else []
    return ", ".join(wrong)


# --- verdicts -------------------------------------------------------------------------------------


def wrong_verdict(fault: Fault, attempt: dict[str, Any], nodes: dict[int, str]) -> str:
    """Return what is wrong with an attempt's verdict; empty: nothing."""
    expected, verdict = FAULTS[fault.kind], attempt["verdict"]
    if fault.kind == "none":
        return (
            ""
            if (attempt["status"], verdict) == ("succeeded", None)
            else "an attempt without a fault failed"
        )
    if verdict is None:
        return "no verdict"
    wrong = []
    if verdict["node"] != nodes.get(fault.rank):
        wrong.append(f"node {verdict['node']} instead of {nodes.get(fault.rank)}")
    if not expected.is_node and verdict["ranks"] != [fault.rank]:
        wrong.append(f"ranks {verdict['ranks']} instead of [{fault.rank}]")
    if not re.search(expected.text, f"{verdict['headline']}\n{verdict['message']}"):
        wrong.append(f"the message does not say {expected.text!r}")
    if expected.category not in {"", verdict["category"]}:
        wrong.append(f"category {verdict['category']} instead of {expected.category}")
    return f"{', '.join(wrong)}: {verdict['headline']}" if wrong else ""


def exit_code(execution: Execution) -> int:
    last = execution.faults[-1].kind
    if last == "none":
        return 0
    return 11 if FAULTS[last].retry or len(execution.faults) > 1 else 10


def budgets(execution: Execution) -> tuple[int, int]:
    """Return the user's and the system's retries that are just enough:
    a wrong payer changes how many attempts run.
    """
    paid = execution.faults[:-1] if not execution.has_rounds else ()
    system = sum(FAULTS[fault.kind].is_node for fault in paid)
    return len(paid) - system, system


# --- one execution --------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of one execution."""

    execution: Execution
    seconds: float = 0.0
    wrong: list[tuple[Fault, str]] = field(default_factory=list)
    """Wrong verdicts and exit codes."""
    left: dict[str, str] = field(default_factory=dict)
    """What remained, each with its kind first ("process", "zombie", "socket" or "folder"),
    and when it was seen.
    """
    samples: dict[str, list[Held]] = field(default_factory=dict)
    """Of "engine", and of "agent" and "recorder" if it has rounds."""

    def problems(self) -> list[str]:
        growth = [
            f"{who} grew: {how}" for who, seen in self.samples.items() if (how := grown(seen))
        ]
        return (
            [f"{fault}: {what}" for fault, what in self.wrong]
            + [" ".join(item) for item in self.left.items()]
            + growth
        )


class Run:
    """One call of ``firstfault run``, with its faults injected and its processes watched."""

    def __init__(self, execution: Execution, temporary: Path, folder: Path) -> None:
        self._execution = execution
        self._temporary = temporary
        self._marks = folder / "marks"
        self._marks.mkdir(parents=True)
        self._out, self._err = folder / "stdout", folder / "stderr"
        inputs = json.dumps({"faults": [str(fault) for fault in execution.faults]})
        command = [
            sys.executable,
            "-m",
            "firstfault",
            "run",
            str(JOBS),
            execution.task,
            "--inputs",
            inputs,
            "--json",
        ]
        user, system = budgets(execution)
        command += [
            "--store",
            str(folder / "store"),
            "--retries",
            str(user),
            "--system-retries",
            str(system),
        ]
        command += ["--timeout", str(LIMIT_S), "--env", f"MARKS={self._marks}"]
        again = {"SOAK_RETRY": "1"} if execution.attempts > 1 else {}
        with self._out.open("w") as out, self._err.open("w") as err:
            environment = {**os.environ, "TMPDIR": str(temporary), **again}
            self._process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
        self._outcome = Outcome(execution)
        self._nodes: list[dict[int, str]] = []
        self._folders: set[Path] = set()

    def outcome(self) -> Outcome:
        """Run it to its end."""
        began = time.monotonic()
        try:
            for index, fault in enumerate(self._execution.faults):
                if not self._step(index, fault):
                    break
            self._judge()
        finally:
            if self._process.poll() is None:
                self._process.terminate()
                self._process.wait()
        self._look_after()
        self._outcome.seconds = time.monotonic() - began
        return self._outcome

    def _step(self, index: int, fault: Fault) -> bool:
        """Wait for an attempt's or a round's workers, look at all processes,
        and let the fault happen.
        """
        attempt, restart = (0, index) if self._execution.has_rounds else (index, 0)
        files = [self._marks / f"{attempt}-{restart}-{rank}.json" for rank in range(2)]
        deadline = time.monotonic() + LIMIT_S
        while not all(file.exists() for file in files):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._outcome.wrong.append(
                    (fault, f"the workers of attempt {attempt}, round {restart} never ran")
                )
                return False
            time.sleep(0.02)
        marks = [json.loads(file.read_text()) for file in files]
        self._nodes.append({rank: mark["node"] for rank, mark in enumerate(marks)})
        agent = marks[fault.rank]["agent"]
        children = {pid: one for pid, one in read_processes().items() if one.parent == agent}
        recorder = next(
            (pid for pid, one in children.items() if "-m firstfault.recorder" in one.command), None
        )
        pids = {"engine": self._process.pid, "agent": agent, "recorder": recorder}
        self._look(attempt, pids)
        who, _, name = fault.kind.partition(" ")
        if who in pids:
            target = pids[who]
            if target is None:
                self._outcome.wrong.append((fault, f"attempt {attempt} has no {who}"))
            else:
                os.kill(target, signal.Signals[name])
        (self._marks / f"{attempt}-{restart}.go").touch()
        return True

    def _look(self, attempt: int, pids: dict[str, int | None]) -> None:
        """Sample the processes, and find what earlier attempts of this execution have left."""
        for who, pid in pids.items():
            if who == "engine" or self._execution.has_rounds:
                found = held(pid) if pid is not None else None
                if found is not None:
                    self._outcome.samples.setdefault(who, []).append(found)
        for pid, one in of_run(self._marks).items():
            number = int(one.environment["FLYTE_ATTEMPT_NUMBER"])
            if number < attempt:
                self._leave(
                    f"process {pid}", f"of attempt {number} during attempt {attempt}: {one.command}"
                )
        for pid, one in read_processes().items():
            if (one.parent, one.state) == (self._process.pid, "Z"):
                self._leave(f"zombie {pid}", f"of the engine during attempt {attempt}")
        folders = set(self._temporary.glob("firstfault-*"))
        if not self._execution.has_rounds:
            for folder in folders & self._folders:
                self._leave(
                    f"folder {folder.name}", f"of an earlier attempt during attempt {attempt}"
                )
        self._folders |= folders

    def _leave(self, what: str, how: str = "after the end") -> None:
        self._outcome.left.setdefault(what, how)

    def _judge(self) -> None:
        """Wait for the end, and compare the verdicts and the exit code."""
        faults = self._execution.faults
        try:
            status = self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._outcome.wrong.append((faults[-1], "the command did not end"))
            return
        try:
            result = json.loads(self._out.read_text().splitlines()[-1])
        except (IndexError, ValueError):
            last = (self._err.read_text().splitlines() or ["nothing on stderr"])[-1]
            self._outcome.wrong.append((faults[-1], f"no result, exit code {status}: {last}"))
            return
        judged = faults[-1:] if self._execution.has_rounds else faults
        attempts = result["attempts"]
        if len(attempts) != len(judged):
            self._outcome.wrong.append(
                (faults[-1], f"{len(attempts)} attempts instead of {len(judged)}")
            )
        for fault, attempt, nodes in zip(judged, attempts, self._nodes, strict=False):
            wrong = wrong_verdict(fault, attempt, nodes)
            if wrong:
                self._outcome.wrong.append((fault, wrong))
        if status != exit_code(self._execution):
            self._outcome.wrong.append(
                (faults[-1], f"exit code {status} instead of {exit_code(self._execution)}")
            )

    def _look_after(self) -> None:
        """Find what is left after the command's exit."""
        deadline = time.monotonic() + _END_S
        while of_run(self._marks) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid, one in of_run(self._marks).items():
            self._leave(f"process {pid}", f"after the end: {one.command}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for line in Path("/proc/net/unix").read_text().splitlines():
            if str(self._temporary) in line:
                self._leave(f"socket {line.split()[-1]}")
        for folder in self._temporary.glob("firstfault-*"):
            self._leave(f"folder {folder.name}")
            shutil.rmtree(folder, ignore_errors=True)


# --- the report -----------------------------------------------------------------------------------


def kinds_of_files(names: Iterable[str]) -> dict[str, int]:
    """Count the names of temporary files by their beginning:
    what `tempfile` appended is left out.
    """
    return dict(
        collections.Counter(
            re.sub(r"[a-z0-9_]{8}(?=$|\.)", "*", name, count=1) for name in sorted(names)
        ).most_common()
    )


def report(outcomes: Sequence[Outcome], files: dict[str, int]) -> list[str]:
    faults = collections.Counter(
        fault.kind
        for item in outcomes
        if not item.execution.has_rounds
        for fault in item.execution.faults
    )
    wrong = collections.Counter(
        fault.kind
        for item in outcomes
        if not item.execution.has_rounds
        for fault in {fault for fault, _ in item.wrong}
    )
    lines = [f"{'fault':18}{'attempts':>9}{'right':>7}"]
    lines += [
        f"{kind:18}{count:9}{count - wrong[kind]:7}" for kind, count in sorted(faults.items())
    ]
    lines.append(f"{'all':18}{faults.total():9}{(faults - wrong).total():7}")
    left = collections.Counter(what.split()[0] for item in outcomes for what in item.left)
    counts = ", ".join(f"{kind} {left[kind]}" for kind in ("process", "zombie", "socket", "folder"))
    lines += ["", f"left over: {counts}"]
    counted = ", ".join(f"{kind} {count}" for kind, count in files.items()) or "none"
    lines += [f"files of torch, flytekit and others in TMPDIR: {counted}", ""]
    lines.append("long-lived  times  MiB first   last  files  last  threads  last")
    for item in outcomes:
        for who, seen in item.samples.items():
            if len(item.execution.faults) > 1:
                first, last = seen[0], seen[-1]
                lines.append(
                    f"{who:11}{len(seen):6}{first.kib / 1024:11.1f}{last.kib / 1024:7.1f}"
                    f"{first.files:7}{last.files:6}{first.threads:9}{last.threads:6}"
                )
    return lines


def soak(attempts: int, seed: int) -> int:
    """Run the soak and print what it found; return the exit code."""
    began = time.monotonic()
    outcomes = []
    shutil.rmtree(KEPT, ignore_errors=True)
    # a short path, because sockets lie below it
    with tempfile.TemporaryDirectory(prefix="so-") as temporary:
        for number, execution in enumerate(planned(attempts, seed)):
            outcome = Run(execution, Path(temporary), KEPT / str(number)).outcome()
            outcomes.append(outcome)
            what = (
                str(execution.faults[0])
                if len(execution.faults) == 1
                else f"{len(execution.faults)} faults"
            )
            problems = outcome.problems()
            said = "; ".join([*problems, f"kept in {KEPT / str(number)}"]) if problems else "right"
            print(f"{execution.task:10} {what:18} {outcome.seconds:6.1f} s  {said}", flush=True)
            if not problems:
                shutil.rmtree(KEPT / str(number))
        files = kinds_of_files(path.name for path in Path(temporary).iterdir())
    problems = [problem for outcome in outcomes for problem in outcome.problems()]
    print("", *report(outcomes, files), sep="\n")
    said = f"{len(problems)} problems" if problems else "all right"
    print(f"\n{time.monotonic() - began:.0f} s, seed {seed}: {said}", *problems, sep="\n")
    return 1 if problems else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attempts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.attempts < 1:
        parser.error("--attempts must be 1 or more")
    sys.exit(soak(given.attempts, given.seed))


if __name__ == "__main__":
    main()
