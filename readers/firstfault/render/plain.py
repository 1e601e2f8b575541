"""A report for a pipe or a file: plain lines, one fact each, for grep and for other programs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from firstfault.render.flyte_message import MESSAGE_TITLE, indented
from firstfault.render.printer import one_row
from firstfault.report.sections import log_lines, quoted_failures, sections_of, stack_lines
from firstfault.report.words import few
from firstfault.text import elide, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from firstfault.report import Report
    from firstfault.report.facts import Fact
    from firstfault.report.sections import Sections

_GROUPS = 20
_STACK = 30
_LOG = 20
_FACT = 300


def terminal_text(report: Report, *, verbose: bool = False) -> str:
    """Return the report for a pipe or a file: one fact a line, not folded, without colours."""
    return "\n".join(_lines(report, verbose=verbose))


def _lines(report: Report, *, verbose: bool) -> Iterator[str]:
    parts, answers = sections_of(report), report.answers
    yield from (report.first_line, "")
    for name, value in (("what", answers.what), ("where", answers.where), ("fate", answers.fate)):
        yield from _named(name, [value])
    yield from _rows(itertools.chain(parts.answers, parts.details))
    yield from (f"next: {one_row(command)}" for command in parts.commands.lines)
    yield from (_row(line.replace(" ", ": ", 1)) for line in parts.attempts.lines)
    yield from _named("changed", parts.changes.lines if parts.attempts.lines else ())
    yield from _quoted(report, parts, verbose=verbose)
    yield ""
    yield from _ranks(report, verbose=verbose)
    yield from _named("recovered", parts.recovered.lines if verbose else ())
    for sentence, names in report.verdict.reasons:
        yield from _named("why", [sentence])
        yield from _named("source", names if verbose else ())
    yield from _named("suspect", parts.suspects.lines)
    yield from (_row(f"raw {line}") for line in parts.raw.lines if verbose)
    if parts.documents.lines:
        yield from ("", *(f"documents: {one_row(line)}" for line in parts.documents.lines))


def _quoted(report: Report, parts: Sections, *, verbose: bool) -> Iterator[str]:
    root = report.verdict.root
    failures = quoted_failures(report) if verbose else [root] if root is not None else []
    for failure in failures:
        stack = stack_lines(failure)
        yield from _block(parts.stack.title, stack if verbose else few(stack, _STACK, "... {} more lines"))
    if parts.message.lines:
        yield from ("", MESSAGE_TITLE, indented(printable(parts.message.text)))
    for failure in failures:
        yield from _block(parts.log.title, log_lines(failure) if verbose else log_lines(failure)[-_LOG:])


def _ranks(report: Report, *, verbose: bool) -> Iterator[str]:
    groups = [f"{group.head()}: {group.said}" for group in report.cascade.groups]
    yield from _named("group", groups if verbose else few(groups, _GROUPS))
    if verbose:
        yield from _named(report.engine.node, (node.line for node in report.cascade.nodes))
        yield from _named("ranks", (f"{name}: {text}" for name, text in report.cascade.ranks_by_node().items()))


def _named(name: str, values: Iterable[str]) -> Iterator[str]:
    yield from (_row(f"{name}: {value}") for value in values)


def _row(text: str) -> str:
    return elide(one_row(text).replace("\t", " "), _FACT).replace("\n", " ")


def _rows(facts: Iterable[Fact]) -> Iterator[str]:
    for fact in facts:
        yield one_row(fact.line).replace("\t", " ")
        yield from (f"  {one_row(line)}".replace("\t", " ") for line in fact.lines)


def _block(title: str, lines: Iterable[str]) -> Iterator[str]:
    for index, line in enumerate(lines):
        yield from ("", f"{title.lower()}:") if not index else ()
        yield f"  {line}"
