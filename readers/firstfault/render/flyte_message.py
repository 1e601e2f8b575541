"""The text that Flyte shows for a failed attempt."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from firstfault.render import plain_lines
from firstfault.report.data import Report
from firstfault.report.facts import Fact
from firstfault.report.formatting import shorten_list
from firstfault.report.parts.sections import Section, Sections, build_sections
from firstfault.utils.text import elide, one_line, printable

_MAX_MESSAGE_CHARACTERS = 16_000
"""Characters; Flyte keeps the first and last 50 KB of a text."""
_MAX_SENTENCES = 8
_MAX_FRAMES = 12
_MAX_FRAME_CHARACTERS = 200
_MAX_COMMAND_CHARACTERS = 2_000
_MIN_QUOTE_CHARACTERS = 200
"""Minimum number of characters for a quoted text."""


def flyte_message(report: Report) -> str:
    """Return the text that Flyte shows for a failed attempt: below 16 KB,
    with its first line repeated at the end.

    It is ASCII, one fact a line, without columns: Flyte's panel is about 40 characters wide, its
    lists show the beginning of the first line, and Flyte cuts a long text in its middle.
    """
    parts = build_sections(report)
    line = report.first_line
    facts = [line, "", *_message_facts((*parts.answers, *parts.facts)), *_message_code(parts.code)]
    details = ["", *_message_facts(parts.details)]
    tail = ["", *_message_end(parts), "", line]
    # facts come first: quoted texts share what they leave, the stack and the log a third each at
    # most, the message the rest
    room = _MAX_MESSAGE_CHARACTERS - sum(len(part) + 1 for part in [*facts, *details, *tail]) - 2
    stack = "\n".join(
        shorten_list(parts.stack.lines, plain_lines.MAX_STACK_LINES, "... {} more lines")
    )
    quoted = (
        (parts.stack.title, stack),
        (parts.log.title, "\n".join(parts.log.lines[-plain_lines.MAX_LOG_LINES :])),
    )
    blocks = [
        _message_block(f"{title}:", text, max(room // 3, _MIN_QUOTE_CHARACTERS))
        for title, text in quoted
        if text
    ]
    room -= sum(len(block) + 2 for block in blocks)
    if parts.message.lines:
        blocks.insert(
            0,
            _message_block(
                f"{parts.message.title}:", parts.message.text, max(room, _MIN_QUOTE_CHARACTERS)
            ),
        )
    separated = itertools.chain.from_iterable(("", block) for block in blocks)
    text = "\n".join([*facts, *separated, *details, *tail])
    if len(text) <= _MAX_MESSAGE_CHARACTERS:
        return text
    # many long facts may still exceed the limit; 50 characters are for the line in the middle
    half = _MAX_MESSAGE_CHARACTERS // 2 - 50
    # whole lines of both ends
    head = text[:half].rpartition("\n")[0]
    end = text[-half:].partition("\n")[2]
    return f"{head}\n... {len(text) - len(head) - len(end)} characters left out ...\n{end}"


def _message_facts(facts: Iterable[Fact]) -> Iterator[str]:
    """Yield the facts, one a line; of the sentences on what isn't known only the first ones."""
    for name, of_name in itertools.groupby(facts, lambda fact: fact.name):
        shown = list(of_name)
        yield from map(
            _ascii_row,
            shorten_list([fact.line for fact in shown], _MAX_SENTENCES, f"{name}: and {{}} more"),
        )
        yield from (f"  {_ascii_row(line)}" for fact in shown for line in fact.lines)


def _message_code(code: Section) -> Iterator[str]:
    if code.lines:
        yield from ("", f"{code.title}:")
    if len(code.lines) > _MAX_FRAMES:
        yield f"  ... {len(code.lines) - _MAX_FRAMES} more frames"
    yield from (
        f"  {_ascii_row(line, _MAX_FRAME_CHARACTERS)}" for line in code.lines[-_MAX_FRAMES:]
    )


def _message_end(parts: Sections) -> Iterator[str]:
    """Yield the end of the message, which Flyte keeps: the evidence, and commands to copy."""
    reasons = [f"Why: {line}" for line in parts.evidence.lines]
    yield from map(_ascii_row, shorten_list(reasons, _MAX_SENTENCES, "Why: and {} more"))
    if parts.commands.lines:
        yield from ("", f"{parts.commands.title}:")
        yield from (
            one_line(plain_lines.encodable(command, "ascii"), _MAX_COMMAND_CHARACTERS)
            for command in parts.commands.lines
        )


def _message_block(title: str, text: str, limit: int) -> str:
    """Return a quoted text below its title, at most `limit` characters."""
    # first cut, then indented: a cut begins a line too
    text = printable(plain_lines.encodable(text, "ascii"))
    room = limit - len(title)
    # the indentation makes each line longer, so cut again until the indented text fits
    while len(shown := plain_lines.indent(elide(text, room))) + len(title) + 1 > limit and room:
        room = max(room - max(len(shown) + len(title) + 1 - limit, 1), 0)
    return f"{title}\n{shown}"


def _ascii_row(text: str, limit: int = plain_lines.MAX_FACT_CHARACTERS) -> str:
    return plain_lines.plain_row(plain_lines.encodable(text, "ascii"), limit)
