"""torch elastic's box: the failed workers of one node, as its launcher prints them at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.launchers import interpret_code


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
