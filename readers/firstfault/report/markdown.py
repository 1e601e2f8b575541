"""A report as Markdown, to be pasted into a bug report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.report.message import ascii_line, fact_lines, first_line, log_lines, stack_lines
from firstfault.report.words import ranks_text
from firstfault.text import elide, printable, redact

if TYPE_CHECKING:
    from collections.abc import Iterator

    from firstfault.report.cascade import Group
    from firstfault.report.content import Report

__all__ = ["markdown"]

_GROUPS = 20
_TRACEBACK = 20_000
_LINES = 60
_CELL = 160
_ESCAPED = str.maketrans({character: f"\\{character}" for character in "\\`*_{}[]<>()#|!~"})


def markdown(report: Report) -> str:
    """Return the report as Markdown: the answers, who followed, the evidence, the traceback, stack and log.

    Texts of others are escaped, or stand in code blocks that they cannot end; credentials are left out.
    """
    return redact("\n".join(_parts(report)) + "\n")


def _parts(report: Report) -> Iterator[str]:
    verdict, answers = report.verdict, report.answers
    yield f"## {_plain(first_line(verdict, report.decision))}"
    yield ""
    yield f"- **What failed:** {_plain(answers.what)}"
    yield f"- **Whose fault:** {answers.blame.value}; {_plain(answers.category)}"
    yield f"- **Where:** {_plain(answers.where)}" + (f", {_plain(answers.code)}" if answers.code else "")
    yield f"- **Retried:** {_plain(answers.fate)}: {_plain(answers.fate_reason)}"
    unknown = "; ".join(answers.unknown[:_GROUPS]) or f"nothing (nodes heard: {report.coverage})"
    yield f"- **Unknown:** {_plain(unknown)}"
    yield from _groups(report.cascade.groups)
    if verdict.why:
        yield from ("", "### Evidence", "", *(f"- {_plain(sentence)}" for sentence in verdict.why[:_GROUPS]))
    if verdict.message.strip():
        yield from ("", "### Traceback", "", *_fenced(elide(verdict.message.strip(), _TRACEBACK)))
    root = verdict.root
    if root is not None and (stack := stack_lines(root)):
        yield from ("", "### Where it stood", "", *_fenced("\n".join(stack[:_LINES])))
    if root is not None and (log := log_lines(root)):
        yield from ("", "### Last lines of its log", "", *_fenced("\n".join(log[-_LINES:])))
    if report.changes:
        yield from ("", "### Attempts", "", *(f"- {_plain(change)}" for change in report.changes))
    yield from ("", "### Facts", "", *(f"- {_plain(fact)}" for fact in fact_lines(report)))


def _groups(groups: tuple[Group, ...]) -> Iterator[str]:
    if not groups:
        return
    yield from ("", "### Who failed", "", "| State | Processes | Ranks | What it said |", "|---|---|---|---|")
    for group in groups[:_GROUPS]:
        ranks = ranks_text(group.ranks, 60)
        yield f"| {group.state.value} | {group.count} | {ranks} | {_plain(group.line or group.what)[:_CELL]} |"
    if len(groups) > _GROUPS:
        yield f"| | | | and {len(groups) - _GROUPS} more groups |"


def _fenced(text: str) -> Iterator[str]:
    """A code block with a fence longer than any run of backquotes in it."""
    text, fence = printable(text), "```"
    while fence in text:
        fence += "`"
    yield from (f"{fence}text", text, fence)


def _plain(text: str) -> str:
    """Text that Markdown, and HTML within it, takes for text."""
    return ascii_line(text, 500).translate(_ESCAPED)
