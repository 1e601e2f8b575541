"""What launchers, schedulers, shells and kernels print about processes that are not their own: one table."""

from __future__ import annotations

import enum
import re
import signal as signals
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from firstfault.evidence.signatures import Pattern
from firstfault.model.failure import get_shell_signal
from firstfault.utils.toml import parse_toml


class ReportKind(enum.Enum):
    """What a statement is about."""

    ENDED = "a process that ended by itself, or was killed by another one than its launcher"
    STOPPED = "a process that its launcher ended because of another one's failure"
    REST_STOPPED = "all other processes, which their launcher ended"
    TERMINATED = "a launcher, a task or a job that was report to end from outside"
    LOST = "a node that is gone"
    OOM = "a kernel that killed a process for its memory"
    GPU = "a GPU, about which its driver reported an error in the kernel's log"
    RESTARTED = "a launcher that starts its processes again"


class ReportPattern(NamedTuple):
    """One form of what launchers print; names of groups: see `LauncherReport`."""

    kind: ReportKind
    pattern: str
    reason: str = ""
    """For a termination: "time limit" and the like, or the name of a group in the pattern."""


@dataclass(frozen=True, slots=True)
class LauncherReport:
    """One line's statement about processes."""

    kind: ReportKind
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
    xid: int = 0
    """Number of a GPU driver's error."""
    reason: str = ""


_SIGNALS = {
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
    "Killed": "SIGKILL",
    "Segmentation fault": "SIGSEGV",
    "Trace/breakpoint trap": "SIGTRAP",
}
"""Signals as `strsignal` calls them."""
REPORT_PATTERNS = tuple(
    ReportPattern(ReportKind[row["kind"]], row["pattern"], row.get("reason", ""))
    for row in parse_toml(Path(__file__).with_suffix(".toml").read_text("utf-8"))["report"]
)
_ANY = Pattern("|".join(re.sub(r"\?P<\w+>", "?:", pattern_row.pattern) for pattern_row in REPORT_PATTERNS))
"""Found in each line that a statement fits; fast in the others, too."""
_compile = cache(re.compile)  # most logs need few of the patterns
_MOST_TASKS = 16_384
_LONGEST = 4096
"""Characters of a line in which statements are looked for."""
_CODE_BELOW = re.compile(
    r"^\W*(?:(?:Exit code|EXIT CODE):\s+|with errorcode )(?P<code>-?\d+)|^\W*KILLED BY SIGNAL: (?P<signal>\d+)"
)


def parse_report(number: int, text: str) -> LauncherReport | None:
    """Return a line's statement about its launcher's processes; None: it has none."""
    text = text[:_LONGEST]
    matches = (
        ((one, _compile(one.pattern).search(text)) for one in REPORT_PATTERNS) if _ANY.search(text) is not None else ()
    )
    pattern_row, found = next((pair for pair in matches if pair[1] is not None), (REPORT_PATTERNS[0], None))
    if found is None:
        return None
    named = {name: value for name, value in found.groupdict().items() if value}
    record = named.get("signal", named.get("only", "SIGKILL" if "oom" in named else ""))
    signal = (
        get_signal_name(int(record))
        if record.isdecimal()
        else {**_SIGNALS, "Terminated": "SIGTERM"}.get(record, record)
    )
    code = int(named["code"]) if "code" in named else None
    return add_code(
        LauncherReport(
            pattern_row.kind,
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
            is_oom="oom" in named or pattern_row.kind is ReportKind.OOM,
            reason=named.get(pattern_row.reason, pattern_row.reason).lower() if pattern_row.reason != "signal" else "",
        ),
        code,
    )


def code_below(report: LauncherReport, text: str) -> LauncherReport:
    """Return a statement with the exit code in the line below it, if it has none itself."""
    found = _CODE_BELOW.match(text)
    has_none = report.kind is ReportKind.ENDED and report.exit_code is None and not report.signal
    if found is None or not has_none:
        return report
    return add_code(report, int(found["code"]) if found["code"] else -int(found["signal"]))


def add_code(report: LauncherReport, code: int | None) -> LauncherReport:
    """Return a statement with an exit code as launchers print it."""
    if code is None:
        return report
    exit_code, signal = interpret_code(code)
    return replace(report, exit_code=exit_code, signal=signal)


def interpret_code(code: int) -> tuple[int | None, str]:
    """Return the exit code and the signal for a code as launchers print it: negative, or a shell's, for a signal."""
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
            yield from range(int(first), min(int(last or first), int(first) + _MOST_TASKS) + 1)
