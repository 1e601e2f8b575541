"""Tracebacks that a process printed to stderr, in the forms of Python, rich and loguru."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from firstfault.exceptions.exceptions_in_text import (
    EXCEPTION_LINE,
    get_short_name,
    parse_traceback,
    unwrap_remote,
)
from firstfault.exceptions.first_cause import find_causes, iter_exceptions
from firstfault.model import ExceptionInfo
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault.utils.text import printable

# What loggers, NCCL, C++ and Python's interpreter put before a message
_MESSAGE_PREFIX = LazyPattern(r"""
  ^\s*(?:
    what\(\):\s*
    |\[[EWFI]\d{0,4}(?:\s[\d:.]{0,30})?\s[^\]\s]{0,60}\]\s*
    |[EWFI]\d{3,4}\s[\d:.]+\s+\S+\s\S+:\d+\]\s*
    |\d{4}-\d\d-\d\d[ ][\d:.]{8,20}:[ ][EWFI][ ]\S{1,200}:\d+\]\s*   # TensorFlow's and XLA's log
    |\[(?:PG\s[^\]\n]{0,100}\s)?Rank\s\d+\]\s*
    |Process[ ]group[ ]watchdog[ ]thread[ ]terminated[ ]with[ ]exception:\s*
    |\S{1,200}\.(?:cuh?|cpp|cc|h(?:pp)?):\d+:[^\n]{0,200}?(?=Assertion[ ])
    |terminate[ ]called[ ]after[ ]throwing[ ]an[ ]instance[ ]of[ ]'[^']*'\s*
    |(?:/\S{0,200}/)?python[\d.]*:[ ](?=can't[ ]|Error[ ]while[ ]finding[ ]|No[ ]module[ ]named[ ])
  )+
""")

# Put before each line by torch, its launcher or srun
RANK_PREFIX = LazyPattern(
    r"^(?:\[?(?:rank|default|local_rank)[ _]?\d+\]?:\s?|\d{1,5}:[ ](?=\s|\w))+"
)
_TRACEBACK_HEADER = LazyPattern(r"""
  ^(?P<gutter>[ |]*)(?P<group>\+[ ]Exception[ ]Group[ ])?(?P<above>.{0,80}?\s)?
  Traceback[ ]\(most[ ]recent[ ]call[ ]last\):\s*$
""")

# Between two exceptions of a chain
_CHAIN_SENTENCE = LazyPattern(r"""
  ^\s*(?:
    (?P<cause>The[ ]above[ ]exception[ ]was[ ]the[ ]direct[ ]cause)
    |During[ ]handling[ ]of[ ]the[ ]above[ ]exception,[ ]another[ ]
  )
""")


def strip_line_prefixes(line: str) -> str:
    """Return a line without the prefixes of loggers, NCCL, C++ and Python's interpreter."""
    return _MESSAGE_PREFIX.sub("", strip_rank_prefix(line)).strip()


def strip_rank_prefix(line: str) -> str:
    """Return a line without control characters, and without the prefix of torch,
    its launcher or srun.
    """
    return RANK_PREFIX.sub("", printable(line))


_INDENT_COLUMNS = 2
"""Indentation of a member in the text of its exception group."""
GROUP_GUTTER = re.compile(r"^\s*(?:[|+] ?)?")
_GROUP_EXISTS_ERROR = "trying to initialize the default process group twice"
"""Raised by torch if a program tries again after an error that left the process group behind."""
STDERR_CHARS_READ = 32 * 1024
"""Length of the stderr tail that is read."""
_MAX_TRACEBACKS = 64
"""Tracebacks read, from the last one back."""
_MAX_RICH_PATH_CHARS = 1000
_MAX_LINES_BETWEEN = 4


@dataclass(frozen=True, slots=True)
class PrintedException:
    """An exception with its traceback, as a process printed it."""

    exception: ExceptionInfo
    after: tuple[str, ...]
    """Lines printed after the traceback that aren't part of the message."""


# In the line above the traceback of an exception that the process survived
_HANDLED_NOTICE = LazyPattern(r"""(?i)
  ^(?:Exception[ ]ignored[ ]|---[ ]Logging[ ]error[ ]---)
  |\b(?:re-?try(?:ing)?|retried|ignor(?:ed|ing)|recover(?:ed|ing)|skipp(?:ed|ing))\b(?!\s*=)
""")

# In such a line, too; it may be about something else if the process printed nothing more
_WARNING_LEVEL = LazyPattern(r"\bWARN(?:ING)?\b")


@lru_cache(maxsize=256)
def find_printed_exception(stderr: str) -> PrintedException | None:
    """Return the last exception that a process printed, with its causes, or None if there is none.

    Exceptions don't count if Python ignored them, if logging couldn't write them, or if the program
    reports that it continues.
    """
    lines = to_plain_lines(stderr[-STDERR_CHARS_READ:])
    starts = [
        start for start in find_tracebacks(lines) if not _is_handled(lines, start, _HANDLED_NOTICE)
    ]
    for start, printed in _iter_chains(lines, starts):
        # a warning with a traceback, after which the program printed more
        if any(map(str.strip, printed.after)) and _is_handled(lines, start, _WARNING_LEVEL):
            continue
        if is_double_init_error(printed.exception):
            return replace(printed, exception=add_first_try(printed.exception, lines[:start]))
        return printed
    return None


def find_tracebacks(lines: Sequence[str]) -> list[int]:
    """Return the line numbers at which tracebacks begin. A group's members are
    parsed with the group.
    """
    headers = ((number, _TRACEBACK_HEADER.match(line)) for number, line in enumerate(lines))
    return [number for number, match in headers if match and "|" not in match["gutter"]]


def is_double_init_error(exception: ExceptionInfo) -> bool:
    """Whether an exception only shows that a program tried again with the process
    group of its first try.
    """
    return _GROUP_EXISTS_ERROR in find_causes(exception).first.message


def add_first_try(exception: ExceptionInfo, lines: Sequence[str]) -> ExceptionInfo:
    """Return a second try's exception, with the last exception printed before it
    (handled or not) as its cause.
    """
    indented = itertools.takewhile(lambda line: not line or line[0].isspace(), lines)
    # the tail begins within a traceback
    if any(line.lstrip().startswith('File "') for line in indented):
        lines = ["Traceback (most recent call last):", *lines]
    for _, printed in _iter_chains(lines, find_tracebacks(lines)):
        if not is_double_init_error(printed.exception):
            cause = replace(printed.exception, relation="context", causes=())
            return replace(exception, causes=(*exception.causes, cause, *printed.exception.causes))
    return exception


# Both lines of a Python warning; the second line is indented source. Neither is about a traceback
# below
_PYTHON_WARNING = LazyPattern(r"^\s|^\S+:\d+:[ ]\w*Warning:[ ]")


def _is_handled(lines: Sequence[str], start: int, notice: LazyPattern) -> bool:
    """Whether the line above a traceback has a notice that the process survived the exception."""
    above = next((line for line in reversed(lines[max(start - 2, 0) : start]) if line.strip()), "")
    return notice.search(above) is not None and not _PYTHON_WARNING.match(above)


def _iter_chains(lines: Sequence[str], starts: list[int]) -> Iterator[tuple[int, PrintedException]]:
    """Yield the first lines of chains of tracebacks with their exceptions,
    from the last chain back.
    """
    for first, last in reversed(find_chain_spans(lines, starts)):
        if (chain := parse_chain(lines, first, last)) is not None:
            yield first, chain


def find_chain_spans(lines: Sequence[str], starts: list[int]) -> list[tuple[int, int]]:
    """Return the lines at which the first and the last traceback of each chain begin."""
    spans: list[tuple[int, int]] = []
    for start in starts[-_MAX_TRACEBACKS:]:
        # an exception raised from another one is printed after Python's sentence: both are one
        # chain
        if spans and any(
            map(_CHAIN_SENTENCE.match, lines[max(start - _MAX_LINES_BETWEEN, 0) : start])
        ):
            spans[-1] = (spans[-1][0], start)
        else:
            spans.append((start, start))
    return spans


def parse_chain(lines: Sequence[str], first: int, last: int) -> PrintedException | None:
    """Return the exception of a chain of tracebacks, which begin at the lines `first` to `last`;
    None if one is cut.
    """
    links: list[ExceptionInfo] = []
    after: Sequence[str] = ()
    start = first
    while start <= last:
        ends = range(start + 1, len(lines)) if start < last else ()
        end = next((number for number in ends if _CHAIN_SENTENCE.match(lines[number])), len(lines))
        link, after = _parse_link(lines[start:end])
        if link is None:
            return None
        sentence = _CHAIN_SENTENCE.match(lines[end]) if end < len(lines) else None
        # `relation` is the relation of an exception to the exception raised after it
        links.insert(
            0,
            replace(
                link, relation="cause" if sentence is not None and sentence["cause"] else "context"
            ),
        )
        start = next(
            (number for number in range(end, last + 1) if _TRACEBACK_HEADER.match(lines[number])),
            last + 1,
        )
    return PrintedException(replace(links[0], relation="", causes=tuple(links[1:])), tuple(after))


# A line that can't belong to the message of the exception above it
_UNRELATED_LINE = LazyPattern(r"""
  ^(?:
    Exception[ ]ignored[ ]
    |---[ ]Logging
    |Traceback[ ]\(
    |\[[EWFI]\d
    |\[rank\d
    |terminate[ ]called
    |Fatal[ ]Python[ ]error
  )
  |^\S+:\d+:[ ]\w*Warning:[ ]
  |^[\[(]?\d{4}-\d\d-\d\d[ T]\d\d:\d\d
  |\b(?:INFO|WARNING|ERROR|DEBUG|CRITICAL)\b[ ]*[:|\]-]
""")


def _parse_link(lines: Sequence[str]) -> tuple[ExceptionInfo | None, Sequence[str]]:
    """Return the exception of one traceback, or of an exception group, and the lines after it."""
    match = _TRACEBACK_HEADER.match(lines[0])
    if match is not None and match["group"]:
        return _parse_group(lines, len(match["gutter"]))
    raised = next(
        (at for at, line in enumerate(lines[1:], 1) if line.strip() and not line[:1].isspace()),
        len(lines),
    )
    end = next(
        (at for at in range(raised + 1, len(lines)) if _UNRELATED_LINE.search(lines[at])),
        len(lines),
    )
    exception = parse_traceback("\n".join(lines[1:end]))
    if exception is None and raised < end and (match := EXCEPTION_LINE.match(lines[raised])):
        exception = ExceptionInfo(match["type"], match["message"] or "")  # the frames are missing
    return exception, lines[end:]


# Between the members of an exception group, and around them
_GROUP_MEMBER_START = LazyPattern(r"^\s*\+?-?\+-+[ ]\d+[ ]-+\s*$")
_GROUP_BORDER = LazyPattern(r"^\s*[+-]{9,}\s*$")


def _parse_group(lines: Sequence[str], indent: int) -> tuple[ExceptionInfo | None, Sequence[str]]:
    end = next(
        (index for index, line in enumerate(lines[1:], 1) if not line.startswith((" ", "|", "+"))),
        len(lines),
    )
    inner = [
        GROUP_GUTTER.sub("", line[indent:], count=1) if line.strip() else ""
        for line in lines[1:end]
    ]
    starts = [
        (index, line) for index, line in enumerate(lines[1:end]) if _GROUP_MEMBER_START.match(line)
    ]
    borders = [index for index, line in starts if _measure_indent(line) <= indent + _INDENT_COLUMNS]
    group_exception = parse_traceback("\n".join(inner[: borders[0]] if borders else inner))
    if group_exception is None:
        return None, lines[end:]
    # each member is printed between borders, indented, as a traceback that may have causes and
    # members again
    members = []
    for border, next_border in itertools.pairwise([*borders, len(inner)]):
        body = [
            GROUP_GUTTER.sub("", line[indent + _INDENT_COLUMNS :], count=1)
            for line in lines[border + 2 : next_border + 1]
        ]
        member = find_printed_exception(
            "\n".join(line for line in body if not _GROUP_BORDER.match(line))
        )
        if member is not None:
            members.append(member.exception)
    return replace(group_exception, members=tuple(members)), lines[end:]


def _measure_indent(line: str) -> int:
    return len(line) - len(line.lstrip())


_RICH_BOX_START = LazyPattern(
    r"^\s*[╭┌+][─-]+[ ]?Traceback[ ]\(most[ ]recent[ ]call[ ]last\)[ ]?[─-]+[╮┐+]\s*$"
)
_RICH_BOX_END = LazyPattern(r"^\s*[╰└+][─-]{10,}[╯┘+]\s*$")


def to_plain_lines(stderr: str) -> list[str]:
    """Return lines as Python prints tracebacks: without colors, prefixes,
    rich's boxes and loguru's marks.
    """
    plain: list[str] = []
    in_box, indent, head = False, 0, ""
    for prefixed_line in stderr.splitlines():
        line = strip_rank_prefix(prefixed_line)
        # within a box, a logger may have indented all lines by the same
        indent = indent if line[:indent].isspace() or not line.strip() else 0
        line = line[indent:]
        # rich draws a box around a traceback, with a few lines of source around each frame
        if _RICH_BOX_START.match(line):
            in_box = True
            indent = indent or _measure_indent(line)
            plain.append("Traceback (most recent call last):")
        elif in_box and _RICH_BOX_END.match(line):
            in_box = False
        elif in_box:
            head, texts = _parse_box_line(head, line)
            plain += texts
        else:
            plain.append(f"  {line[2:]}" if line.startswith("> File ") else line)
    return plain


_RICH_FRAME = LazyPattern(r"^(?P<file>.+?):(?P<line>\d{1,9})[ ]in[ ](?P<function>.+)$")
_RICH_CODE = LazyPattern(r"^❱[ ]?\s*(?P<line>\d{1,9})[ ][│|]?(?P<code>.*)$")


def _parse_box_line(head: str, line: str) -> tuple[str, list[str]]:
    """Return the unfinished part of a frame, which rich may wrap,
    and the finished lines as Python prints them.
    """
    text = line.strip().rstrip("│|").rstrip()
    text = text[2:] if text.startswith(("│ ", "| ")) else ""
    if code := _RICH_CODE.match(text):
        # rich marks each level of indentation
        return "", [f"    {code['code'].lstrip('│ ').rstrip()}"]
    if not text or text[0].isspace():
        return "", []
    # rich wraps a long frame before or after its "in", or within the path
    head += f" {text}" if head.endswith(" in") or text.startswith("in ") else text
    frame = _RICH_FRAME.match(head)
    if frame is None:
        return head[:_MAX_RICH_PATH_CHARS], []
    return "", [f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}']


def remove_traceback(text: str, exception: ExceptionInfo) -> str:
    """Return a stderr tail without the tracebacks of an exception and its causes.

    The lines around them stay, and so do the tracebacks of other exceptions. The text may begin in
    the middle of a traceback.
    """
    lines = text.splitlines()
    bare_lines = [RANK_PREFIX.sub("", line) for line in lines]
    chain = [item for link in iter_exceptions(exception) for item in (link, unwrap_remote(link))]
    names = {get_short_name(link) for link in chain}
    first_lines = {line for link in chain for line in link.message.splitlines()[:1]} | {""}
    texts = {
        line.strip() for link in chain for line in (*link.message.splitlines(), *link.notes)
    } | {""}
    # the worker's document has the exception as data; the node's roster entry gets the rest of its
    # stderr
    kept: list[str] = []
    start = 0
    while start < len(lines):
        end, raised = _find_traceback_end(bare_lines, start)
        types = [match for match in raised if match["type"].rsplit(".", 1)[-1] in names]
        if any((match["message"] or "") in first_lines for match in types):
            # the rest of the message, notes, and the sentence between two tracebacks
            while end < len(lines) and (
                bare_lines[end].strip() in texts or _CHAIN_SENTENCE.match(bare_lines[end])
            ):
                end += 1
        else:
            end = max(end, start + 1)
            kept += lines[start:end]
        start = end
    return "\n".join(kept).strip("\n")


def _find_traceback_end(lines: Sequence[str], start: int) -> tuple[int, list[re.Match[str]]]:
    """Return the end of the traceback that begins at `start`, and its exception lines. The end is
    `start` if no traceback begins there.
    """
    match = _TRACEBACK_HEADER.match(lines[start])
    # a stderr tail may begin within a traceback
    is_cut = start == 0 and lines[0][:1].isspace()
    if not is_cut and (match is None or match["above"]):
        return start, []
    end = start + 1
    while end < len(lines) and (lines[end][:1].isspace() or not lines[end].strip()):
        end += 1
    is_group = match is not None and match["group"]
    end = end if is_group else min(end + 1, len(lines))
    if is_cut and not any(line.lstrip().startswith('File "') for line in lines[start:end]):
        return start, []
    raised_lines = lines[start:end] if is_group else lines[end - 1 : end]
    raised = (EXCEPTION_LINE.match(GROUP_GUTTER.sub("", line, count=1)) for line in raised_lines)
    return end, [match for match in raised if match]
