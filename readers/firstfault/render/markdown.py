"""The report as Markdown, for a bug report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from firstfault.render.plain_lines import MAX_GROUPS
from firstfault.report.data import Report
from firstfault.report.facts import Fact
from firstfault.report.formatting import format_ranks, shorten_list
from firstfault.report.parts.sections import Section, Sections, build_sections
from firstfault.utils.text import counted, elide, printable

_MAX_TEXT_CHARACTERS = 20_000
_MAX_QUOTED_LINES = 40
"""Lines of a stack or a log."""
HOME_FOLDER = re.compile(r"/(?:home|Users)/[\w.-]+(?=/)|/root(?=/)")
"""A home folder; its name may be a person's."""
_MAX_CELL_CHARACTERS = 160
"""Characters of a table's cell."""
_MAX_LINE_CHARACTERS = 500
_ESCAPED = str.maketrans(
    {
        **{character: f"\\{character}" for character in "\\`*_{}[]<>()|!~&"},
        # a space of no width: where Markdown is pasted, "@team" calls people and "#7" links an
        # issue, escaped or not
        "@": "@\u200b",
        "#": "\\#\u200b",
    }
)


def markdown(report: Report) -> str:
    """Return the report as Markdown, in the order of the page: answers, job, traceback, log,
    failures and evidence.

    Quoted texts are escaped, or in code blocks that they can't end.
    """
    text = "\n".join(_markdown_lines(report)) + "\n"
    return HOME_FOLDER.sub("~", text) if report.engine.cites else text


def _markdown_lines(report: Report) -> Iterator[str]:
    parts = build_sections(report)
    yield from (f"## {escape(report.answers.what)}", "", *_markdown_answers(parts))
    if parts.commands.lines:
        yield from (
            "",
            *format_code_block("\n".join(map(printable, parts.commands.lines)), "console"),
        )
    if job := report.identity.parts(report.engine):
        yield from ("", escape(", ".join(job)))
    yield from _format_list(parts.changes, parts.changes.lines)
    stack = "\n".join(parts.stack.lines[:_MAX_QUOTED_LINES])
    log = "\n".join(parts.log.lines[-_MAX_QUOTED_LINES:])
    quoted = (
        (parts.stack, stack),
        (parts.message, elide(parts.message.text, _MAX_TEXT_CHARACTERS)),
        (parts.log, log),
    )
    for part, text in quoted:
        if text:
            yield from ("", f"### {part.title}", "", *format_code_block(text))
    yield from _markdown_groups(report)
    if report.followers:
        yield from ("", f"Victims: {escape(report.followers)}")
    yield from _format_list(parts.evidence, shorten_list(parts.evidence.lines, MAX_GROUPS))
    yield from _format_list(parts.recovered, parts.recovered.lines)
    besides = [
        fact for fact in parts.details if fact.name in {report.engine.nodes.capitalize(), "Clocks"}
    ]
    facts = [*report.facts, *besides, *([Fact("Read from", report.uri)] if report.uri else [])]
    yield from (
        "",
        "### Facts",
        "",
        *(f"- {escape(fact.name)}: {escape(fact.value)}" for fact in facts),
    )


def _markdown_answers(parts: Sections) -> Iterator[str]:
    shown: Counter[str] = Counter()
    for fact in parts.answers:
        shown[fact.name] += 1
        # the heading is the cause itself
        name, value = (
            ("Fault", ", ".join(fact.lines)) if fact.name == "Cause" else (fact.name, fact.value)
        )
        if shown[fact.name] <= MAX_GROUPS and fact.name != "Attempts":
            yield f"- **{name}:** {escape(value)}"


def _markdown_groups(report: Report) -> Iterator[str]:
    groups = report.cascade.groups
    if groups:
        yield from (
            "",
            "### Failed",
            "",
            "| State | Processes | Ranks | What happened |",
            "|---|---|---|---|",
        )
    for group in groups[:MAX_GROUPS]:
        # the text is cut before it is escaped: a cut inside of an escape would leave a lone
        # backslash
        ranks = format_ranks(group.ranks, 60) or escape(group.who())
        what = escape(group.description[:_MAX_CELL_CHARACTERS])
        yield f"| {group.label} | {group.count} | {ranks} | {what} |"
    if len(groups) > MAX_GROUPS:
        yield f"| | | | and {counted(len(groups) - MAX_GROUPS, 'more group')} |"


def _format_list(part: Section, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield from ("", f"### {part.title}", "", *(f"- {escape(line)}" for line in lines))


def format_code_block(text: str, language: str = "text") -> Iterator[str]:
    """Yield a code block with a fence longer than any run of backquotes in it."""
    text = printable(text)
    fence = "```"
    while fence in text:
        fence += "`"
    yield from (f"{fence}{language}", text, fence)


def escape(text: str) -> str:
    """Return one line in which nothing is Markdown or HTML."""
    # split: a line break would end the list item or the row of the table
    return " ".join(elide(printable(text), _MAX_LINE_CHARACTERS).split()).translate(_ESCAPED)
