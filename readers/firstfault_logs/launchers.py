"""What launchers, schedulers, shells and kernels print before lines,
and about processes that aren't their own.
"""

from __future__ import annotations

import enum
import re
import signal as signals
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from firstfault.evidence.signatures import Pattern, widen
from firstfault.model.failure import SIGNALS_BY_DESCRIPTION, get_shell_signal
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault.utils.toml import parse_toml


class ReportKind(enum.Enum):
    """What a report is about."""

    ENDED = "a process that ended by itself, or wasn't killed by its launcher"
    STOPPED = "a process that its launcher ended because of another one's failure"
    REST_STOPPED = "all other processes, which their launcher ended"
    TERMINATED = "a launcher, a task or a job that was terminated from outside"
    LOST = "a node that is gone"
    BLOCKED = "a process that waits in the kernel, perhaps for a file system"
    OOM = "a kernel that killed a process for its memory"
    GPU = "a GPU, about which its driver reported an error in the kernel's log"
    RESTARTED = "a launcher that starts its processes again"
    SUCCEEDED = "a job that its scheduler reports as successful, perhaps above the job's output"


class ReportPattern(NamedTuple):
    """One form of what launchers print; names of groups: see `LauncherReport`."""

    kind: ReportKind
    pattern: str
    reason: str = ""
    """For a termination: "time limit" and the like, or the name of a group in the pattern."""
    is_of_job: bool = False
    """Whether the scheduler ended the whole job: the machine that reports it isn't the reason."""


@dataclass(frozen=True, slots=True)
class LauncherReport:
    """What one line reports about processes."""

    kind: ReportKind
    number: int
    """Number of the line."""
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
    xid: int = 0
    """Number of a GPU driver's error."""
    reason: str = ""
    is_of_job: bool = False
    """Whether it's about the whole job, whichever machine reports it."""
    time_ns: int | None = None
    """Time of the line, or a time in it."""


class LauncherTable:
    """The rows of ``launchers.toml``.

    Args:
        without: names of launchers and collectors to leave out, to measure how logs of unknown
            launchers are read.
    """

    def __init__(self, without: Collection[str] = ()) -> None:
        table = parse_toml(Path(__file__).with_suffix(".toml").read_text("utf-8"))
        prefixes = [row["pattern"] for row in table["prefix"] if row["launcher"] not in without]
        # each row has its own numbered groups, because one expression can't have a name twice
        numbered = (
            re.sub(r"\?P<(\w+)>", rf"?P<\1_{number}>", pattern)
            for number, pattern in enumerate(prefixes)
        )
        self.prefix = re.compile("|".join(numbered))
        """Matches what any launcher puts before a line; see `read_prefix`."""
        self.reports = tuple(
            ReportPattern(
                ReportKind[row["kind"]],
                row["pattern"],
                row.get("reason", ""),
                row.get("of_job", False),
            )
            for row in table["report"]
            if row["launcher"] not in without
        )
        self.any_report = Pattern(
            "|".join(re.sub(r"\?P<\w+>", "?:", widen(row.pattern)) for row in self.reports)
        )
        """Found in each line that a report pattern fits, and in few others; fast in all lines."""

    def read_prefix(self, prefix: str) -> dict[str, str]:
        """Return the named parts of a prefix that `prefix` matches."""
        match = self.prefix.match(prefix)
        named = match.groupdict() if match is not None else {}
        return {name.rpartition("_")[0]: value for name, value in named.items() if value}


TABLE = LauncherTable()
_compile = cache(re.compile)  # most logs need few of the patterns
_MAX_TASKS = 16_384
_MAX_REPORT_CHARACTERS = 4096
"""Characters of a line in which reports are looked for."""


def parse_report(number: int, text: str) -> LauncherReport | None:
    """Return what a line reports about other processes, or None if it reports nothing."""
    text = text[:_MAX_REPORT_CHARACTERS]
    if TABLE.any_report.search(text) is None:
        return None
    matches = ((row, _compile(row.pattern).search(text)) for row in TABLE.reports)
    row, match = next((pair for pair in matches if pair[1] is not None), (None, None))
    if row is None or match is None:
        return None
    named = {name: value for name, value in match.groupdict().items() if value}
    ended_by = named.get("signal", named.get("only", "SIGKILL" if "oom" in named else ""))
    signal = SIGNALS_BY_DESCRIPTION.get(ended_by, ended_by)
    signal = get_signal_name(int(signal)) if signal.isdecimal() else signal
    code = next((int(named[name]) for name in ("code", "code_of_status") if name in named), None)
    return add_code(
        LauncherReport(
            row.kind,
            number,
            text.strip(),
            ranks=(int(named["rank"]),) if "rank" in named else (),
            tasks=tuple(parse_ranges(named.get("tasks", ""))),
            local_rank=int(named["local"]) if "local" in named else None,
            node=named.get("node", named.get("nodes", "")).removeprefix("error:").strip(),
            ip=named.get("ip", ""),
            pid=int(named["pid"]) if "pid" in named else None,
            signal=signal,
            xid=int(named.get("xid", 0)),
            is_oom="oom" in named or row.kind is ReportKind.OOM,
            reason=named.get(row.reason, row.reason).lower() if row.reason != "signal" else "",
            is_of_job=row.is_of_job,
        ),
        code,
    )


# The exit code or signal in the line below a launcher's report.
_CODE_BELOW = LazyPattern(r"""
  ^\W*(?:(?:Exit[ ]code|EXIT[ ]CODE):\s+|with[ ]errorcode[ ])(?P<code>-?\d+)
| ^\W*KILLED[ ]BY[ ]SIGNAL:[ ](?P<signal>\d+)
""")

# Found, in less time, in each line that has such a code.
MAYBE_CODE_BELOW = LazyPattern(
    r"(?:Exit[ ]code|EXIT[ ]CODE|KILLED[ ]BY[ ]SIGNAL):|with[ ]errorcode[ ]"
)


def code_below(report: LauncherReport, text: str) -> LauncherReport:
    """Return a statement with the exit code in the line below it, if it has none itself."""
    code = _CODE_BELOW.match(text)
    has_none = report.kind is ReportKind.ENDED and report.exit_code is None and not report.signal
    if code is None or not has_none:
        return report
    return add_code(report, int(code["code"]) if code["code"] else -int(code["signal"]))


def add_code(report: LauncherReport, code: int | None) -> LauncherReport:
    """Return a statement with an exit code as launchers print it."""
    if code is None:
        return report
    exit_code, signal = interpret_code(code)
    return replace(report, exit_code=exit_code, signal=signal)


def interpret_code(code: int) -> tuple[int | None, str]:
    """Return the exit code and the signal for a code as launchers print it: negative, or a shell's,
    for a signal.
    """
    if code < 0:
        return None, get_signal_name(-code)
    by_shell = get_shell_signal(code)
    return (None, by_shell) if by_shell else (code, "")


def get_signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def parse_ranges(text: str) -> Iterator[int]:
    """Yield the numbers in a list of ranges, "0,2-5"; of each range at most 16,384."""
    for part in filter(None, text.strip("[]").split(",")):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            yield from range(int(first), min(int(last or first), int(first) + _MAX_TASKS) + 1)
