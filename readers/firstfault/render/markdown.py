"""A report as Markdown, to be pasted into a bug report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.report.facts import Fact
from firstfault.report.sections import sections_of
from firstfault.report.words import counted, few, ranks_text
from firstfault.text import elide, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from firstfault.report.cascade import Group
    from firstfault.report.data import Report
    from firstfault.report.sections import Section

_DETAILS = {"clocks", "confidence"}
_GROUPS = 20
"""Groups, and lines of a list."""
_TEXT = 20_000
_LINES = 60
_CELL = 160
_LINE = 500
_ESCAPED = str.maketrans(
    {
        **{character: f"\\{character}" for character in "\\`*_{}[]<>()|!~&"},
        # a space of no width: where Markdown is pasted, "@team" calls people and "#7" links an issue, escaped or not
        "@": "@\u200b",
        "#": "\\#\u200b",
    }
)


def markdown(report: Report) -> str:
    """Return the report as Markdown, in the order of the page: answers, the job, traceback, log, failures, evidence.

    Quoted texts are escaped, or in code blocks that they cannot end.
    """
    return "\n".join(_parts(report)) + "\n"


def _parts(report: Report) -> Iterator[str]:
    parts = sections_of(report)
    yield from (f"## {_plain(report.answers.what)}", "", *_answers(report))
    if parts.commands.lines:
        yield from ("", *_fenced("\n".join(map(printable, parts.commands.lines)), "console"))
    if job := report.identity.parts(report.engine):
        yield from ("", _plain("; ".join(job)))
    yield from _listed(parts.changes, parts.changes.lines)
    yield from _quoted(parts.stack, "\n".join(parts.stack.lines[:_LINES]))
    yield from _quoted(parts.message, elide(parts.message.text, _TEXT))
    yield from _quoted(parts.log, "\n".join(parts.log.lines[-_LINES:]))
    yield from _groups(report.cascade.groups)
    if report.followers:
        yield from ("", f"Victims: {_plain(report.followers)}")
    yield from _listed(parts.evidence, few(parts.evidence.lines, _GROUPS))
    yield from _listed(parts.recovered, parts.recovered.lines)
    besides = [fact for fact in parts.details if fact.name in {f"{report.engine.nodes} reported", *_DETAILS}]
    facts = [*report.facts, *besides, *([Fact("read from", report.uri)] if report.uri else [])]
    yield from ("", "### Facts", "", *(f"- {_plain(fact.name)}: {_plain(fact.value)}" for fact in facts))


def _answers(report: Report) -> Iterator[str]:
    answers = report.answers
    yield f"- **Where:** {_plain(answers.where)}" + (f", {_plain(answers.code)}" if answers.code else "")
    yield f"- **Retried:** it {_plain(answers.fate)}. {_plain(answers.fate_reason)}"
    yield f"- **Kind:** {answers.fault_owner.value}; {_plain(answers.category)}"
    yield from (f"- **Look at next:** {_plain(step.text)}" for step in answers.steps[:1])
    if answers.unknown:
        yield f"- **Not known:** {_plain('; '.join(answers.unknown[:_GROUPS]))}"


def _listed(part: Section, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield from ("", f"### {part.title}", "", *(f"- {_plain(line)}" for line in lines))


def _quoted(part: Section, text: str) -> Iterator[str]:
    if text:
        yield from ("", f"### {part.title}", "", *_fenced(text))


def _groups(groups: tuple[Group, ...]) -> Iterator[str]:
    if not groups:
        return
    yield from ("", "### Who failed", "", "| State | Processes | Ranks | What it said |", "|---|---|---|---|")
    for group in groups[:_GROUPS]:
        ranks = ranks_text(group.ranks, 60)
        yield f"| {group.state.value} | {group.count} | {ranks} | {_plain(group.said[:_CELL])} |"
    if len(groups) > _GROUPS:
        yield f"| | | | and {counted(len(groups) - _GROUPS, 'more group')} |"


def _fenced(text: str, language: str = "text") -> Iterator[str]:
    """Yield a code block with a fence longer than any run of backquotes in it."""
    text, fence = printable(text), "```"
    while fence in text:
        fence += "`"
    yield from (f"{fence}{language}", text, fence)


def _plain(text: str) -> str:
    """Return one line in which nothing is Markdown or HTML."""
    return " ".join(elide(printable(text), _LINE).split()).translate(_ESCAPED)
