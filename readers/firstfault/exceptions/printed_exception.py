"""Reads the last exception that a process printed: Python's traceback, also in the forms of rich and loguru."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from firstfault.exceptions.death_text import has_native_reason, thrown
from firstfault.exceptions.first_cause import causes_of
from firstfault.exceptions.remote_traceback import block_of, short_name
from firstfault.model import ExceptionInfo, FrameInfo, Subject
from firstfault.model.failure import signal_of_exit_code
from firstfault.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault.model import WorkerError

_PREFIX = re.compile(r"^(?:\[?(?:rank|default|local_rank)[ _]?\d+\]?:\s?|\d{1,5}: (?=\s|\w))+")
"""What torch, its launcher and srun put before each line."""
_BEGINS = re.compile(
    r"^(?P<gutter>[ |]*)(?P<group>\+ Exception Group )?(?:.{0,80}?\s)?Traceback \(most recent call last\):\s*$"
)
_BOX = re.compile(r"^\s*[╭┌+][─-]+ ?Traceback \(most recent call last\) ?[─-]+[╮┐+]\s*$")
_BOX_ENDS = re.compile(r"^\s*[╰└+][─-]{10,}[╯┘+]\s*$")
_BOX_FRAME = re.compile(r"^(?P<file>.+?):(?P<line>\d{1,9}) in (?P<function>.+)$")
_BOX_CODE = re.compile(r"^❱ ?\s*(?P<line>\d{1,9}) [│|]?(?P<code>.*)$")
_LINK = re.compile(
    r"^\s*(?:(?P<cause>The above exception was the direct cause)|During handling of the above exception, another )"
)
_MEMBER = re.compile(r"^\s*\+?-?\+-+ \d+ -+\s*$")
_BORDER = re.compile(r"^\s*[+-]{9,}\s*$")
_INDENT = 2
"""Of a member, in the text of its group."""
_OF_GROUP = re.compile(r"^\s*(?:[|+] ?)?")
_NOT_A_DEATH = re.compile(
    r"^(?:Exception ignored |--- Logging error ---)|\bWARN(?:ING)?\b"
    r"|\b(?:re-?try(?:ing)?|retried|ignor(?:ed|ing)|recover(?:ed|ing)|skipp(?:ed|ing))\b(?!\s*=)",
    re.IGNORECASE,
)
"""Found in the line above the traceback of an exception that did not end its process."""
_OF_WARNINGS = re.compile(r"^\s|^\S+:\d+: \w*Warning: ")
"""Lines of Python's warnings; the second one is indented source. They are not about a traceback below."""
_NEXT = re.compile(
    r"^(?:Exception ignored |--- Logging|Traceback \(|\[[EWFI]\d|\[rank\d|terminate called|Fatal Python error)"
    r"|^\S+:\d+: \w*Warning: "
    r"|^[\[(]?\d{4}-\d\d-\d\d[ T]\d\d:\d\d|\b(?:INFO|WARNING|ERROR|DEBUG|CRITICAL)\b *[:|\]-]"
)
"""A line that cannot belong to the message of the exception before it."""
_FATAL = re.compile(r"\b(?:fatal|critical|panic|abort\w*|giving up)\b", re.IGNORECASE)
_RAISED = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?::\s(?P<message>.*))?$")
_PYTHONS = re.compile(
    r"(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Iteration|Timeout))(?::\s(?P<message>.*))?$"
)
_AT = re.compile(r"^\s{1,8}(?P<file>/[^\n()]{1,300})\((?P<line>\d{1,9})\): (?P<function>\S{1,200})$", re.MULTILINE)
"""A frame as pybind11 prints it, the innermost first."""
_READ = 32 * 1024
"""Characters of the end of what a process printed that are read."""
_TRIED = 64
"""Tracebacks that are looked at, from the last one back."""
_LATER = 10
"""Lines after a traceback that show that its process lived on."""
_MAX_HEAD = 1000
"""Characters of a path that rich wrapped."""
_WITHIN = 4
"""Lines between the tracebacks of a chain."""


@dataclass(frozen=True, slots=True)
class Printed:
    """An exception whose traceback a process printed."""

    exception: ExceptionInfo
    after: tuple[str, ...]
    """The lines that were printed after it, and are not part of its message."""


def exception_of(failure: WorkerError) -> ExceptionInfo | None:
    """Return the exception that ended a process: the one that it raised, else the last one that it printed.

    What it printed counts for an exit without a reason, and for an abort without native code's own reason.
    """
    raised = failure.exception
    if raised is not None and short_name(causes_of(raised).first) != "SystemExit":
        return raised
    if (
        failure.sent_signals
        or failure.expired is not None
        or failure.subject is Subject.AGENT
        or not _may_print(failure)
    ):
        return raised
    signal = failure.signal or signal_of_exit_code(failure.exit_code)
    if signal and (hooked := _thrown_exception(failure.log_tail)):
        return hooked
    if signal and has_native_reason(failure.log_tail):
        return raised
    printed = last_printed(failure.log_tail)
    if printed is None or _lived_on(printed):
        return raised
    # `sys.exit` outside of a handler: the program had dealt with the exception, and may tell why it ends
    later = (*printed.exception.message.splitlines()[1:], *printed.after)
    is_dealt_with = raised is not None and any(map(_FATAL.search, later))
    return raised if is_dealt_with else printed.exception


def _lived_on(printed: Printed) -> bool:
    """Whether a process printed so much after a traceback that it cannot have ended because of it.

    Lines without a level or a date cannot be told from the exception's message.
    """
    more = [line for line in printed.exception.message.splitlines()[1:] if line and not line[0].isspace()]
    return len(more) + len(printed.after) > _LATER


def _may_print(failure: WorkerError) -> bool:
    signal = failure.signal or signal_of_exit_code(failure.exit_code)
    if signal:
        return signal == "SIGABRT"
    code = failure.exception.message if failure.exception is not None else str(failure.exit_code)
    return code.lstrip("-").isdigit() and code != "0"


def _thrown_exception(stderr: str) -> ExceptionInfo | None:
    """Return a Python exception that C++ could not handle, as one of an autograd hook; None: it had another reason."""
    match = _PYTHONS.match(thrown(stderr))
    if match is None:
        return None
    frames = [FrameInfo(found["file"], int(found["line"]), found["function"]) for found in _AT.finditer(stderr)]
    return ExceptionInfo(match["type"], match["message"] or "", frames=tuple(reversed(frames)))


def last_printed(stderr: str) -> Printed | None:
    """Return the last exception that a process printed, with those that it was raised from; None if there is none.

    Exceptions that Python ignored, that logging could not write, or that the program reports as survived, do not count.
    """
    return _last_printed(stderr[-_READ:])


@lru_cache(maxsize=256)
def _last_printed(stderr: str) -> Printed | None:
    lines = _plain(stderr)
    begins = [at for at, line in enumerate(lines) if _BEGINS.match(line) and not _begins_of(line)]
    begins = [at for at in begins if not _is_handled(_line_before(lines, at))][-_TRIED:]
    while begins:
        first, last = _chain_at(lines, begins)
        found = _parsed(lines, first, last)
        if found is not None:
            return found
        begins = [at for at in begins if at < first]
    return None


def _begins_of(line: str) -> bool:
    """Whether a traceback is of a member of a group, which is read with its group."""
    match = _BEGINS.match(line)
    return match is not None and "|" in match["gutter"]


def _is_handled(above: str) -> bool:
    """Whether the line above a traceback tells that its exception did not end the process."""
    return _NOT_A_DEATH.search(above) is not None and not _OF_WARNINGS.match(above)


def _line_before(lines: Sequence[str], at: int) -> str:
    return next((line for line in reversed(lines[max(at - 2, 0) : at]) if line.strip()), "")


def _chain_at(lines: Sequence[str], begins: Sequence[int]) -> tuple[int, int]:
    """Return where the last chain of tracebacks begins, and its last traceback."""
    first = last = begins[-1]
    for at in reversed(begins[:-1]):
        if not any(map(_LINK.match, lines[max(first - _WITHIN, 0) : first])):
            break
        first = at
    return first, last


def _parsed(lines: Sequence[str], first: int, last: int) -> Printed | None:
    links: list[ExceptionInfo] = []
    relation, at = "", first
    after: Sequence[str] = ()
    while at <= last:
        end = next((number for number in range(at + 1, len(lines)) if _LINK.match(lines[number])), len(lines))
        end = end if at < last else len(lines)
        link, after = _one(lines[at:end])
        if link is None:
            return None
        links.insert(0, replace(link, relation=relation))
        between = _LINK.match(lines[end]) if end < len(lines) else None
        relation = "cause" if between is not None and between["cause"] else "context"
        at = next((number for number in range(end, last + 1) if _BEGINS.match(lines[number])), last + 1)
    # the relation of a link is to the one that was raised after it
    nearest_first = [replace(link, relation=outer.relation) for outer, link in itertools.pairwise(links)]
    return Printed(replace(links[0], relation="", causes=tuple(nearest_first)), tuple(after))


def _one(lines: Sequence[str]) -> tuple[ExceptionInfo | None, Sequence[str]]:
    """Return the exception of one traceback, or of a group, and the lines after it."""
    match = _BEGINS.match(lines[0])
    if match is not None and match["group"]:
        return _group(lines, len(match["gutter"]))
    raised = next((at for at, line in enumerate(lines[1:], 1) if line.strip() and not line[:1].isspace()), len(lines))
    end = next((at for at in range(raised + 1, len(lines)) if _NEXT.search(lines[at])), len(lines))
    return block_of("\n".join(lines[1:end])) or _bare(lines[raised:end]), lines[end:]


def _bare(lines: Sequence[str]) -> ExceptionInfo | None:
    """Return the exception of a traceback whose frames are missing."""
    match = _RAISED.match(lines[0]) if lines else None
    return ExceptionInfo(match["type"], match["message"] or "") if match is not None else None


def _group(lines: Sequence[str], indent: int) -> tuple[ExceptionInfo | None, Sequence[str]]:
    end = next((at for at, line in enumerate(lines[1:], 1) if not line.startswith((" ", "|", "+"))), len(lines))
    inner = [_OF_GROUP.sub("", line[indent:], count=1) if line.strip() else "" for line in lines[1:end]]
    borders = [
        at for at, line in enumerate(lines[1:end]) if _MEMBER.match(line) and _indent_of(line) <= indent + _INDENT
    ]
    own = block_of("\n".join(inner[: borders[0]] if borders else inner))
    if own is None:
        return None, lines[end:]
    members = []
    for border, until in itertools.pairwise([*borders, len(inner)]):
        body = [_OF_GROUP.sub("", line[indent + _INDENT :], count=1) for line in lines[border + 2 : until + 1]]
        found = last_printed("\n".join(line for line in body if not _BORDER.match(line)))
        if found is not None:
            members.append(found.exception)
    return replace(own, members=tuple(members)), lines[end:]


def _indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def _plain(stderr: str) -> list[str]:
    """Return the lines as Python prints tracebacks: without colours, prefixes, boxes and the marks of loguru."""
    found: list[str] = []
    in_box, indent, head = False, 0, ""
    for whole in stderr.splitlines():
        line = _PREFIX.sub("", printable(whole))
        indent = indent if line[:indent].isspace() or not line.strip() else 0
        line = line[indent:]
        if _BOX.match(line):
            in_box, indent = True, indent or _indent_of(line)
            found.append("Traceback (most recent call last):")
        elif in_box and _BOX_ENDS.match(line):
            in_box = False
        elif in_box:
            head, texts = _of_box(head, line)
            found += texts
        else:
            found.append(f"  {line[2:]}" if line.startswith("> File ") else line)
    return found


def _of_box(head: str, line: str) -> tuple[str, list[str]]:
    """Return the line of a frame as far as it is known, which rich may wrap, and the lines that Python prints."""
    text = line.strip().rstrip("│|").rstrip()
    text = text[2:] if text.startswith(("│ ", "| ")) else ""
    if code := _BOX_CODE.match(text):
        return "", [f"    {code['code'].strip()}"]
    if not text or text[0].isspace():
        return "", []
    # rich wraps a long frame before or after its "in", or within the path
    head += f" {text}" if head.endswith(" in") or text.startswith("in ") else text
    frame = _BOX_FRAME.match(head)
    if frame is None:
        return head[:_MAX_HEAD], []
    return "", [f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}']
