"""What launchers, schedulers, shells and kernels print before lines, about processes that aren't
their own, and in boxes.
"""

from __future__ import annotations

import enum
import re
import signal as signals
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
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


@dataclass(slots=True)
class Entry:
    """One worker in a box."""

    number: int
    """Number of its first line."""
    last: int = 0
    time: str = ""
    """Time in torch's format: "2025-03-18_13:21:50", whole seconds of the node's time zone."""
    host: str = ""
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    exit_code: int | None = None
    signal: str = ""
    traceback: list[str] = field(default_factory=list)
    """Traceback in its error file, if it wrote one."""
    is_first: bool = False
    """Whether torch observed this failure first."""


_BOX_BEGIN = LazyPattern(
    r"\bFAILED\s*$|^\s*Failures:\s*$|^\s*Root[ ]Cause(?:[ ]\(first[ ]observed[ ]failure\))?:\s*$"
)
_BOX_ENTRY = LazyPattern(r"^\s*\[\d{1,6}\]:\s*$")
_BOX_FIELD = LazyPattern(
    r"^\s{0,8}(?P<name>time|host|rank|exitcode|error_file|traceback|msg)\s*:[ ]?(?P<value>.*)$"
)
_BOX_RULE = LazyPattern(r"^\s*[=*-]{20,}\s*$")
_BOX_RANK = LazyPattern(r"(?P<rank>-?\d{1,7})(?:[ ]\(local_rank:[ ](?P<local>-?\d{1,5})\))?")
_BOX_CODE = LazyPattern(r"(?P<code>-?\d{1,5})(?:[ ]\(pid:[ ](?P<pid>\d{1,10})\))?")
_BOX_SIGNAL = LazyPattern(r"Signal[ ]\d+[ ]\((?P<signal>SIG\w+)\)")


class Boxes:
    """Finds the boxes in the lines of one node."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.ended = False
        """Whether a whole box was read since this was last set to False."""
        self._is_within = self._is_first = self._in_traceback = False

    @property
    def first_rank(self) -> int | None:
        """Rank of the node's first worker, according to the last box."""
        last = self.entries[-1]
        return (
            last.rank - last.local_rank
            if last.rank is not None and last.local_rank is not None
            else None
        )

    def take(self, number: int, line: str) -> bool:
        """Look at a line; return whether it belongs to a box."""
        if ("FAILED" in line or "Failures:" in line or "Root Cause" in line) and _BOX_BEGIN.search(
            line
        ):
            self._is_within, self._in_traceback = True, False
            self._is_first = "Root Cause" in line
            return True
        if not self._is_within:
            return False
        if _BOX_ENTRY.match(line):
            self.entries.append(Entry(number, number, is_first=self._is_first))
            self._in_traceback = False
            return True
        if _BOX_RULE.match(line):
            # the last rule is below the root cause
            last = self.entries[-1] if self.entries else Entry(0)
            is_end = self._is_first and last.is_first and last.rank is not None
            self._is_within = not is_end
            self.ended = self.ended or is_end
            self._in_traceback = False
            return True
        box_field = _BOX_FIELD.match(line)
        if self.entries and box_field is not None:
            self.entries[-1].last = number
            self._take_field(self.entries[-1], box_field["name"], box_field["value"].strip())
            return True
        if self._in_traceback and (line.startswith("  ") or not line.strip()):
            self.entries[-1].traceback.append(line.removeprefix("  "))
            self.entries[-1].last = number
            return True
        return not line.strip() or "<NO_OTHER_FAILURES>" in line

    def _take_field(self, entry: Entry, name: str, value: str) -> None:
        self._in_traceback = False
        if name == "rank" and (rank := _BOX_RANK.match(value)):
            entry.rank = int(rank["rank"]) if int(rank["rank"]) >= 0 else None
            entry.local_rank = int(rank["local"]) if rank["local"] else None
        elif name == "exitcode" and (code := _BOX_CODE.match(value)):
            entry.exit_code, entry.signal = interpret_code(int(code["code"]))
            entry.pid = int(code["pid"]) if code["pid"] else None
        elif name in {"time", "host"}:
            setattr(entry, name, value)
        elif name in {"traceback", "msg"}:
            if signal := _BOX_SIGNAL.match(value):
                entry.signal = signal["signal"]
            elif value.startswith("Traceback"):
                entry.traceback, self._in_traceback = [value], True
