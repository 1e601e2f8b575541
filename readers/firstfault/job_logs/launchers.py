"""What launchers, schedulers, shells and kernels print about processes that are not their own: one table."""

from __future__ import annotations

import enum
import re
import signal as signals
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from firstfault.evidence.signatures import Pattern
from firstfault.model.failure import signal_of_exit_code


class About(enum.Enum):
    """What a statement is about."""

    ENDED = "a process that ended by itself, or was killed by another one than its launcher"
    STOPPED = "a process that its launcher ended because of another one's failure"
    REST_STOPPED = "all other processes, which their launcher ended"
    TERMINATED = "a launcher, a task or a job that was told to end from outside"
    LOST = "a node that is gone"
    OOM = "a kernel that killed a process for its memory"
    RESTARTED = "a launcher that starts its processes again"


class Statement(NamedTuple):
    """One form of what launchers print; names of groups: see `Told`."""

    about: About
    pattern: re.Pattern[str]
    reason: str = ""
    """For a termination: "time limit" and the like, or the name of a group in the pattern."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one line tells about processes."""

    about: About
    number: int
    """Of the line."""
    text: str
    ranks: tuple[int, ...] = ()
    tasks: tuple[int, ...] = ()
    """Numbers of srun's tasks: ranks, if each task is one process."""
    local_rank: int | None = None
    node: str = ""
    ip: str = ""
    pid: int | None = None
    exit_code: int | None = None
    signal: str = ""
    is_oom: bool = False
    reason: str = ""


_WORDS = {
    "aborted": "SIGABRT",
    "abort": "SIGABRT",
    "bus error": "SIGBUS",
    "floating point exception": "SIGFPE",
    "illegal instruction": "SIGILL",
    "interrupt": "SIGINT",
    "killed": "SIGKILL",
    "out of memory": "SIGKILL",
    "segmentation fault": "SIGSEGV",
    "terminated": "SIGTERM",
    "trace/breakpoint trap": "SIGTRAP",
}
"""Signals as `strsignal` calls them."""
_DIES = (
    r"Aborted|Bus error|Floating point exception|Illegal instruction|Killed|Segmentation fault|Trace/breakpoint trap"
)


def _made(about: About, pattern: str, reason: str = "") -> Statement:
    return Statement(about, re.compile(pattern), reason)


STATEMENTS = (
    # torch elastic
    _made(About.ENDED, r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)"),
    _made(About.STOPPED, r"Sending process (?P<pid>\d+) closing signal (?P<signal>SIG\w+)"),
    _made(About.STOPPED, r"Unable to shutdown process (?P<pid>\d+) via (?:Signals\.)?(?P<signal>SIG\w+|\d+)"),
    _made(
        About.RESTARTED,
        r"will restart worker group|\bRestarting worker group\b"
        r"|Worker group FAILED\. [1-9]\d*/\d+ attempts left",
    ),
    _made(About.TERMINATED, r"Received (?:Signals\.)?(?P<signal>SIG\w+|\d+) death signal", "signal"),
    _made(About.TERMINATED, r"SignalException: Process (?P<pid>\d+) got signal: (?P<signal>\d+)", "signal"),
    # Slurm
    _made(
        About.TERMINATED,
        r"\*\*\* (?P<what>JOB|STEP) \S+ ON (?P<node>\S+) CANCELLED AT \S+ DUE TO (?P<due>[A-Z ]+?)(?: \*|$"
        r"|,)",
        "due",
    ),
    _made(About.TERMINATED, r"\*\*\* JOB \S+ ON (?P<node>\S+) CANCELLED AT", "cancelled"),
    _made(
        About.REST_STOPPED,
        r"\*\*\* STEP \S+ ON \S+ CANCELLED AT|srun: (?:launch/slurm: _step_signal: )?Terminating "
        r"|srun: Force Terminated|srun: Job step aborted",
    ),
    _made(About.TERMINATED, r"srun: interrupt \(one more within|srun: sending Ctrl-C|^\^C$", "signal SIGINT"),
    _made(About.LOST, r"srun: error: Node failure on (?P<nodes>\S+)"),
    _made(About.ENDED, r"(?P<node>\S+): tasks? (?P<tasks>[\d,\[\]-]+): (?P<oom>Out Of Memory)"),
    _made(About.ENDED, r"(?P<node>\S+): tasks? (?P<tasks>[\d,\[\]-]+): Exited with exit code (?P<code>\d+)"),
    _made(About.STOPPED, r"(?P<node>\S+): tasks? (?P<tasks>[\d,\[\]-]+): (?P<signal>Terminated)"),
    _made(About.ENDED, rf"(?P<node>\S+): tasks? (?P<tasks>[\d,\[\]-]+): (?P<signal>{_DIES})"),
    _made(About.OOM, r"slurmstepd(?:-(?P<node>\S+))?: error: Detected [1-9]\d* oom[_-]kill events? in"),
    # mpirun, prterun, Hydra
    _made(
        About.ENDED,
        r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<node>\S+) exited on signal"
        r" (?P<signal>\d+)",
    ),
    _made(About.ENDED, r"Process name: \[[^\]\s]*?,(?:\d+\],)?(?P<rank>\d+)\](?:\s*Exit code:\s+(?P<code>-?\d+))?"),
    _made(About.ENDED, r"RANK (?P<rank>\d+) PID (?P<pid>\d+) RUNNING AT (?P<node>\S+)"),
    _made(
        About.REST_STOPPED,
        r"thus causing the job to be terminated|job to be terminated\. The first process"
        r"|terminated normally, but \d+ process|^MPI_ABORT was invoked",
    ),
    # DeepSpeed, Lightning, torch.multiprocessing, accelerate, Horovod
    _made(About.ENDED, r"sigkill_handler\].*exits with return code = (?P<code>-?\d+)"),
    _made(
        About.ENDED,
        r"Child process with PID (?P<pid>\d+) terminated with code (?P<code>-?\d+)",
    ),
    _made(About.ENDED, r"ProcessExitedException: process (?P<rank>\d+) terminated with signal (?P<signal>SIG\w+)"),
    _made(About.ENDED, r"ProcessExitedException: process (?P<rank>\d+) terminated with exit code (?P<code>\d+)"),
    _made(About.ENDED, r"Process (?P<rank>\d+) exit with status code (?P<code>[1-9]\d*)\."),
    # Ray
    _made(
        About.ENDED,
        r"worker died or was killed[^\n]*?Worker IP address: (?P<ip>[\w.:]+)[^\n]*?Worker PID: (?P<pid>\d+)",
    ),
    _made(About.OOM, r"Memory on the node \(IP: (?P<ip>[\w.:]+),[^\n]*?where the task \([^\n]*?pid=(?P<pid>\d+)"),
    _made(About.LOST, r"[Nn]ode with node id:? \w+ and address:? (?P<ip>[\w.:]+)[^\n]*has been marked dead"),
    # the kernel and the shell
    _made(About.OOM, r"(?:Memory cgroup out of memory|Out of memory): Kill(?:ed)? process (?P<pid>\d+)"),
    _made(About.OOM, r"oom-kill:[^\n]*\bpid=(?P<pid>\d+)"),
    _made(About.ENDED, rf"line \d+:\s+(?P<pid>\d+) (?P<signal>{_DIES})\b"),
    _made(About.ENDED, rf"^(?P<signal>{_DIES})(?: \(core dumped\))?$"),
    # Kubernetes
    _made(About.OOM, r"[Rr]eason:? ?\"?OOMKilled"),
    _made(
        About.TERMINATED,
        r"\bThe node was low on resource: \S+|[Rr]eason:? ?\"?Evicted\b|\bDeletionByTaintManager\b",
        "evicted",
    ),
    _made(
        About.TERMINATED,
        r"[Pp]od \S+ (?:was|has been) (?:preempted|evicted)|[Rr]eason:? ?\"?Preempt(?:ed|ing)\b",
        "preempted",
    ),
)
_HINT = Pattern(
    r"^(?:Killed|Aborted|Bus error|Segmentation fault)"
    r"|exitcode|closing signal|Unable to shutdown|estart(?:ing)? worker group|attempts left|death signal"
    r"|got signal|CANCELLED|srun: |: tasks? [\d\[]|slurmstepd|exited on signal|Process name:|RANK \d"
    r"|job to be terminated|terminated normally|MPI_ABORT|sigkill_handler"
    r"|Child process with PID|ProcessExited|status code|worker died or|Memory on the node|marked dead"
    r"|ut of memory:|oom-kill|line \d+: |OOMKilled|low on resource|Evicted|TaintManager|[Pp]reempt"
    r"|evicted|\^C"
)
"""Found in each line that a statement fits."""
_MOST_TASKS = 16_384
_LONGEST = 4096
"""Characters of a line in which statements are looked for."""
_CODE_BELOW = re.compile(r"^\W*(?:Exit code|EXIT CODE):\s+(?P<code>-?\d+)")


def told_by(number: int, text: str) -> Iterator[Told]:
    """Yield what a line tells about processes of its launcher."""
    text = text[:_LONGEST]
    if _HINT.search(text) is None:
        return
    for statement in STATEMENTS:
        found = statement.pattern.search(text)
        if found is None:
            continue
        named = {name: value for name, value in found.groupdict().items() if value}
        code, signal = _end_of(named)
        yield Told(
            statement.about,
            number,
            text.strip(),
            ranks=(int(named["rank"]),) if "rank" in named else (),
            tasks=tuple(numbers_of(named.get("tasks", ""))),
            local_rank=int(named["local"]) if "local" in named else None,
            node=named.get("node", named.get("nodes", "")).removeprefix("error:").strip(),
            ip=named.get("ip", ""),
            pid=int(named["pid"]) if "pid" in named else None,
            exit_code=code,
            signal=signal,
            is_oom="oom" in named or statement.about is About.OOM,
            reason=named.get(statement.reason, statement.reason).lower() if statement.reason != "signal" else "",
        )
        return


def with_code_below(told: Told, text: str) -> Told:
    """Return a statement with the exit code that stands in the line below it, if it has none itself."""
    found = (
        _CODE_BELOW.match(text) if told.about is About.ENDED and told.exit_code is None and not told.signal else None
    )
    code, signal = end_of_code(int(found["code"])) if found is not None else (told.exit_code, told.signal)
    return replace(told, exit_code=code, signal=signal)


def _end_of(named: dict[str, str]) -> tuple[int | None, str]:
    """Return the exit code and the signal of a process that ended."""
    said = named.get("signal", "")
    signal = f"SIG{said}" if said.startswith("TERM") else said
    if said.isdecimal():
        signal = name_of(int(said))
    elif said:
        signal = _WORDS.get(said.lower(), said)
    if "oom" in named:
        signal = "SIGKILL"
    code = int(named["code"]) if named.get("code") else None
    return end_of_code(code) if code is not None else (None, signal)


def end_of_code(code: int) -> tuple[int | None, str]:
    """Return the exit code and the signal for a code as launchers print it: negative, or a shell's, for a signal."""
    if code < 0:
        return None, name_of(-code)
    by_shell = signal_of_exit_code(code)
    return (None, by_shell) if by_shell else (code, "")


def name_of(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def numbers_of(text: str) -> Iterator[int]:
    """Yield the numbers in a list of ranges, "0,2-5"; of each range at most 16,384."""
    for part in filter(None, text.strip("[]").split(",")):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            yield from range(int(first), min(int(last or first), int(first) + _MOST_TASKS) + 1)
