"""Tracebacks that a process printed to stderr, in the forms of Python, rich and loguru."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from firstfault.exceptions.exceptions_in_text import RAISED, parse_traceback
from firstfault.exceptions.first_cause import find_causes
from firstfault.exceptions.stderr_lines import strip_rank_prefix
from firstfault.model import ExceptionInfo

TRACEBACK_HEADER = re.compile(
    r"^(?P<gutter>[ |]*)(?P<group>\+ Exception Group )?(?P<above>.{0,80}?\s)?Traceback \(most recent call last\):\s*$"
)
_BOX = re.compile(r"^\s*[╭┌+][─-]+ ?Traceback \(most recent call last\) ?[─-]+[╮┐+]\s*$")
_BOX_ENDS = re.compile(r"^\s*[╰└+][─-]{10,}[╯┘+]\s*$")
_BOX_FRAME = re.compile(r"^(?P<file>.+?):(?P<line>\d{1,9}) in (?P<function>.+)$")
_BOX_CODE = re.compile(r"^❱ ?\s*(?P<line>\d{1,9}) [│|]?(?P<code>.*)$")
CHAIN_SENTENCE = re.compile(
    r"^\s*(?:(?P<cause>The above exception was the direct cause)|During handling of the above exception, another )"
)
_MEMBER = re.compile(r"^\s*\+?-?\+-+ \d+ -+\s*$")
_BORDER = re.compile(r"^\s*[+-]{9,}\s*$")
_INDENT = 2
"""Of a member, in the text of its group."""
GROUP_GUTTER = re.compile(r"^\s*(?:[|+] ?)?")
_NOT_A_DEATH = re.compile(
    r"^(?:Exception ignored |--- Logging error ---)"
    r"|\b(?:re-?try(?:ing)?|retried|ignor(?:ed|ing)|recover(?:ed|ing)|skipp(?:ed|ing))\b(?!\s*=)",
    re.IGNORECASE,
)
"""Found in the line above the traceback of an exception that didn't end its process."""
_WARNS = re.compile(r"\bWARN(?:ING)?\b")
"""Found there, too; but such a line may also be about something else, if the process printed nothing more."""
_OF_WARNINGS = re.compile(r"^\s|^\S+:\d+: \w*Warning: ")
"""Lines of Python's warnings; the second one is indented source. They aren't about a traceback below."""
_NEXT = re.compile(
    r"^(?:Exception ignored |--- Logging|Traceback \(|\[[EWFI]\d|\[rank\d|terminate called|Fatal Python error)"
    r"|^\S+:\d+: \w*Warning: "
    r"|^[\[(]?\d{4}-\d\d-\d\d[ T]\d\d:\d\d|\b(?:INFO|WARNING|ERROR|DEBUG|CRITICAL)\b *[:|\]-]"
)
"""A line that can't belong to the message of the exception before it."""
_SECOND_TRY = "trying to initialize the default process group twice"
"""What torch raises if a program tries again after an error that left the process group behind."""
STDERR_CHARS_READ = 32 * 1024
"""Characters of the end of what a process printed that are read."""
_TRIED = 64
"""Tracebacks that are looked at, from the last one back."""
_MAX_HEAD = 1000
"""Characters of a path that rich wrapped."""
_WITHIN = 4
"""Lines between the tracebacks of a chain."""


@dataclass(frozen=True, slots=True)
class PrintedException:
    """An exception whose traceback a process printed."""

    exception: ExceptionInfo
    after: tuple[str, ...]
    """The lines that were printed after it, and aren't part of its message."""


@lru_cache(maxsize=256)
def find_printed_exception(stderr: str) -> PrintedException | None:
    """Return the last exception that a process printed, with those that it was raised from; None if there is none.

    Exceptions that Python ignored, that logging could not write, or that the program reports as survived, don't count.
    """
    lines = to_plain_lines(stderr[-STDERR_CHARS_READ:])
    for first, found in _chains(
        lines, [at for at in find_tracebacks(lines) if not _is_handled(lines, at, _NOT_A_DEATH)]
    ):
        if any(map(str.strip, found.after)) and _is_handled(lines, first, _WARNS):
            continue
        is_second = is_double_init_error(found.exception)
        return replace(found, exception=add_first_try(found.exception, lines[:first])) if is_second else found
    return None


def find_tracebacks(lines: Sequence[str]) -> list[int]:
    """Return where tracebacks begin; that of a member of a group is read with its group."""
    return [
        at for at, line in enumerate(lines) if (match := TRACEBACK_HEADER.match(line)) and "|" not in match["gutter"]
    ]


def is_double_init_error(exception: ExceptionInfo) -> bool:
    """Whether an exception only tells that a program tried again, with the process group of its first try."""
    return _SECOND_TRY in find_causes(exception).first.message


def add_first_try(exception: ExceptionInfo, lines: Sequence[str]) -> ExceptionInfo:
    """Return the exception of a second try with the last one printed before it, handled or not, as its cause."""
    cut = itertools.takewhile(lambda line: not line or line[0].isspace(), lines)
    if any(line.lstrip().startswith('File "') for line in cut):  # the lines begin within a traceback
        lines = ["Traceback (most recent call last):", *lines]
    for _, found in _chains(lines, find_tracebacks(lines)):
        if not is_double_init_error(found.exception):
            cause = replace(found.exception, relation="context", causes=())
            return replace(exception, causes=(*exception.causes, cause, *found.exception.causes))
    return exception


def _is_handled(lines: Sequence[str], at: int, tells: re.Pattern[str]) -> bool:
    """Whether the line above a traceback tells that its exception didn't end the process."""
    above = next((line for line in reversed(lines[max(at - 2, 0) : at]) if line.strip()), "")
    return tells.search(above) is not None and not _OF_WARNINGS.match(above)


def _chains(lines: Sequence[str], begins: list[int]) -> Iterator[tuple[int, PrintedException]]:
    """Yield where chains of tracebacks begin, and their exceptions, from the last one back."""
    for first, last in reversed(find_chain_spans(lines, begins)):
        if (found := parse_chain(lines, first, last)) is not None:
            yield first, found


def find_chain_spans(lines: Sequence[str], begins: list[int]) -> list[tuple[int, int]]:
    """Return where the first and the last traceback of each chain begin."""
    spans: list[tuple[int, int]] = []
    for at in begins[-_TRIED:]:
        if spans and any(map(CHAIN_SENTENCE.match, lines[max(at - _WITHIN, 0) : at])):
            spans[-1] = (spans[-1][0], at)
        else:
            spans.append((at, at))
    return spans


def parse_chain(lines: Sequence[str], first: int, last: int) -> PrintedException | None:
    """Return the exception of a chain whose tracebacks begin at the lines `first` to `last`; None if one is cut."""
    links: list[ExceptionInfo] = []
    after: Sequence[str] = ()
    at = first
    while at <= last:
        ends = range(at + 1, len(lines)) if at < last else ()
        end = next((number for number in ends if CHAIN_SENTENCE.match(lines[number])), len(lines))
        link, after = _one(lines[at:end])
        if link is None:
            return None
        between = CHAIN_SENTENCE.match(lines[end]) if end < len(lines) else None
        # the relation of a link is to the one that was raised after it
        links.insert(0, replace(link, relation="cause" if between is not None and between["cause"] else "context"))
        at = next((number for number in range(end, last + 1) if TRACEBACK_HEADER.match(lines[number])), last + 1)
    return PrintedException(replace(links[0], relation="", causes=tuple(links[1:])), tuple(after))


def _one(lines: Sequence[str]) -> tuple[ExceptionInfo | None, Sequence[str]]:
    """Return the exception of one traceback, or of a group, and the lines after it."""
    match = TRACEBACK_HEADER.match(lines[0])
    if match is not None and match["group"]:
        return _group(lines, len(match["gutter"]))
    raised = next((at for at, line in enumerate(lines[1:], 1) if line.strip() and not line[:1].isspace()), len(lines))
    end = next((at for at in range(raised + 1, len(lines)) if _NEXT.search(lines[at])), len(lines))
    found = parse_traceback("\n".join(lines[1:end]))
    if found is None and raised < end and (named := RAISED.match(lines[raised])):
        found = ExceptionInfo(named["type"], named["message"] or "")  # its frames are missing
    return found, lines[end:]


def _group(lines: Sequence[str], indent: int) -> tuple[ExceptionInfo | None, Sequence[str]]:
    end = next((at for at, line in enumerate(lines[1:], 1) if not line.startswith((" ", "|", "+"))), len(lines))
    inner = [GROUP_GUTTER.sub("", line[indent:], count=1) if line.strip() else "" for line in lines[1:end]]
    borders = [
        at for at, line in enumerate(lines[1:end]) if _MEMBER.match(line) and _indent_of(line) <= indent + _INDENT
    ]
    own = parse_traceback("\n".join(inner[: borders[0]] if borders else inner))
    if own is None:
        return None, lines[end:]
    members = []
    for border, until in itertools.pairwise([*borders, len(inner)]):
        body = [GROUP_GUTTER.sub("", line[indent + _INDENT :], count=1) for line in lines[border + 2 : until + 1]]
        found = find_printed_exception("\n".join(line for line in body if not _BORDER.match(line)))
        if found is not None:
            members.append(found.exception)
    return replace(own, members=tuple(members)), lines[end:]


def _indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def to_plain_lines(stderr: str) -> list[str]:
    """Return the lines as Python prints tracebacks: without colours, prefixes, boxes and the marks of loguru."""
    found: list[str] = []
    in_box, indent, head = False, 0, ""
    for whole in stderr.splitlines():
        line = strip_rank_prefix(whole)
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
    """Return the line of a frame if known, which rich may wrap, and the lines that Python prints."""
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
