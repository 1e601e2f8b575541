"""A report as Markdown, to be pasted into a bug report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.render.flyte_message import log_lines, recovered_lines, said, stack_lines
from firstfault.report.words import counted, ranks_text
from firstfault.text import elide, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from firstfault.report.data import Report
    from firstfault.report.groups import Group

__all__ = ["markdown"]

_GROUPS = 20
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
    verdict, root = report.verdict, report.verdict.root
    yield from (f"## {_plain(report.answers.what)}", "", *_answers(report))
    if job := report.identity.parts(report.engine):
        yield from ("", _plain("; ".join(job)))
    if report.changes:
        yield from ("", "### Attempts", "", *(f"- {_plain(change)}" for change in report.changes))
    if root is not None and (stack := stack_lines(root)):
        yield from ("", "### Where it stood", "", *_fenced("\n".join(stack[:_LINES])))
    if text := said(verdict):
        is_traceback = root is not None and root.exception is not None and root.exception.frames
        yield from ("", "### Traceback" if is_traceback else "### Message", "", *_fenced(elide(text, _TEXT)))
    if root is not None and (log := log_lines(root)):
        yield from ("", "### Last lines of its log", "", *_fenced("\n".join(log[-_LINES:])))
    yield from _groups(report.cascade.groups)
    if report.followers:
        yield from ("", f"Victims: {_plain(report.followers)}")
    if verdict.why:
        yield from ("", "### Evidence", "", *(f"- {_plain(sentence)}" for sentence in verdict.why[:_GROUPS]))
    if recovered := recovered_lines(report.job):
        title = "### Recovered from, by restarts within this attempt"
        yield from ("", title, "", *(f"- {_plain(line)}" for line in recovered))
    facts = [(fact.name, fact.value) for fact in report.facts]
    facts += [(f"{report.engine.nodes} reported", report.coverage), ("clocks", report.clocks)]
    facts += [("confidence", f"{verdict.confidence} (strategy {verdict.strategy})"), ("read from", report.uri)]
    yield from ("", "### Facts", "", *(f"- {_plain(name)}: {_plain(value)}" for name, value in facts if value))


def _answers(report: Report) -> Iterator[str]:
    answers = report.answers
    yield f"- **Where:** {_plain(answers.where)}" + (f", {_plain(answers.code)}" if answers.code else "")
    yield f"- **Retried:** it {_plain(answers.fate)}. {_plain(answers.fate_reason)}"
    yield f"- **Kind:** {answers.fault_owner.value}; {_plain(answers.category)}"
    yield f"- **Look at next:** {_plain(answers.steps[0].text)}" if answers.steps else "- **Look at next:** the log"
    if answers.unknown:
        yield f"- **Not known:** {_plain('; '.join(answers.unknown[:_GROUPS]))}"
    commands = [printable(step.command) for step in answers.steps if step.command]
    if commands:
        yield from ("", *_fenced("\n".join(commands), "console"))


def _groups(groups: tuple[Group, ...]) -> Iterator[str]:
    if not groups:
        return
    yield from ("", "### Who failed", "", "| State | Processes | Ranks | What it said |", "|---|---|---|---|")
    for group in groups[:_GROUPS]:
        ranks = ranks_text(group.ranks, 60)
        yield f"| {group.state.value} | {group.count} | {ranks} | {_plain((group.line or group.what)[:_CELL])} |"
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
