"""A report as plain text: the message that Flyte shows.

ASCII, one fact a line, no columns: Flyte's panel is about 40 characters wide, its lists show the beginning of the first
line, and Flyte cuts a long text in its middle.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from firstfault.report.sections import sections_of
from firstfault.report.words import few
from firstfault.text import elide, one_line, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from firstfault.report.data import Report
    from firstfault.report.facts import Fact
    from firstfault.report.sections import Section, Sections

MESSAGE_TITLE = "message:"
"""Stands above the root cause's text, whose lines are indented."""
_MESSAGE = 16_000
"""Characters; Flyte keeps the first and last 50 KB of a text."""
_SENTENCES = 8
_FACT = 300
_STACK_LINES = 30
_LOG_LINES = 20
_FRAMES = 12
_FRAME = 200
_COMMAND = 2_000
_LEAST = 200
"""Characters that a quoted text has room for in any case."""


def flyte_message(report: Report) -> str:
    """Return the text that Flyte shows for a failed attempt: below 16 KB, with its first line repeated at the end."""
    parts, line = sections_of(report), report.first_line
    facts = [line, "", *_rows(parts.answers), *_code(parts.code)]
    details = ["", *_rows(parts.details)]
    tail = ["", *_last(parts), "", line]
    room = _MESSAGE - sum(len(part) + 1 for part in [*facts, *details, *tail]) - 2
    blocks = [_block(title, text, max(room // 3, _LEAST)) for title, text in _quoted(parts) if text]
    room -= sum(len(block) + 2 for block in blocks)
    body = [_block(MESSAGE_TITLE, parts.message.text, max(room, _LEAST))] if parts.message.lines else []
    apart = itertools.chain.from_iterable(("", block) for block in [*body, *blocks])
    return _both_ends("\n".join([*facts, *apart, *details, *tail]))


def indented(text: str) -> str:
    """Return a quoted text with every line indented, so that none of them looks like an answer of the report."""
    return "\n".join(f"  {line}" if line.strip() else "" for line in text.split("\n"))


def _rows(facts: Iterable[Fact]) -> Iterator[str]:
    """Yield the facts, one a line; of the sentences on what is not known only the first ones."""
    for name, of_name in itertools.groupby(facts, lambda fact: fact.name):
        shown = list(of_name)
        yield from map(_bounded, few([fact.line for fact in shown], _SENTENCES, f"{name}: and {{}} more"))
        yield from (f"  {_bounded(line)}" for fact in shown for line in fact.lines)


def _code(code: Section) -> Iterator[str]:
    if not code.lines:
        return
    yield from ("", f"{code.title.lower()}:")
    if len(code.lines) > _FRAMES:
        yield f"  ... {len(code.lines) - _FRAMES} more frames"
    yield from (f"  {_bounded(line, _FRAME)}" for line in code.lines[-_FRAMES:])


def _quoted(parts: Sections) -> Iterator[tuple[str, str]]:
    """Yield the stack and the end of the log, each with its title."""
    yield f"{parts.stack.title.lower()}:", "\n".join(few(parts.stack.lines, _STACK_LINES, "... {} more lines"))
    yield f"{parts.log.title.lower()}:", "\n".join(parts.log.lines[-_LOG_LINES:])


def _last(parts: Sections) -> Iterator[str]:
    """Yield what stands at the end, which Flyte keeps: the evidence, and commands to copy."""
    yield from map(_bounded, few([f"why: {line}" for line in parts.evidence.lines], _SENTENCES, "why: and {} more"))
    if parts.commands.lines:
        yield from ("", f"{parts.commands.title.lower()}:")
        yield from (one_line(_ascii(command), _COMMAND) for command in parts.commands.lines)


def _block(title: str, text: str, limit: int) -> str:
    """Return a quoted text below its title, at most `limit` characters."""
    # first cut, then indented: a cut begins a line too
    text = printable(_ascii(text))
    room = limit - len(title)
    while len(shown := indented(elide(text, room))) + len(title) + 1 > limit and room:
        room = max(room - max(len(shown) + len(title) + 1 - limit, 1), 0)
    return f"{title}\n{shown}"


def _both_ends(text: str) -> str:
    """Return whole lines of both ends of a text, `_MESSAGE` characters at most."""
    if len(text) <= _MESSAGE:
        return text
    half = _MESSAGE // 2 - 50
    head, tail = text[:half].rpartition("\n")[0], text[-half:].partition("\n")[2]
    return f"{head}\n... {len(text) - len(head) - len(tail)} characters left out ...\n{tail}"


def _bounded(text: str, limit: int = _FACT) -> str:
    """Return one line of printable ASCII, without the middle of a long text."""
    line = printable(_ascii(text)).replace("\n", " ").replace("\t", " ")
    return elide(line, limit).replace("\n", " ")


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii")
