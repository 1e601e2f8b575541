"""The report for a pipe or a file: one fact per line, for grep and programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from firstfault.render.plain_lines import (
    MAX_GROUPS,
    MAX_LOG_LINES,
    MAX_STACK_LINES,
    MESSAGE_TITLE,
    indent,
    plain_row,
    to_one_row,
)
from firstfault.report.data import Report, Sections, build_sections, log_lines, quoted_failures, stack_lines
from firstfault.report.formatting import shorten_list
from firstfault.utils.text import printable


def terminal_text(report: Report, *, verbose: bool = False) -> str:
    """Return the report for a pipe or a file: one fact a line, not folded, without colours, for grep and programs."""
    return "\n".join(_iter_lines(report, verbose=verbose))


def _iter_lines(report: Report, *, verbose: bool) -> Iterator[str]:
    parts, answers = build_sections(report), report.answers
    yield from (report.first_line, "")
    for name, value in (("what", answers.what), ("where", answers.where), ("fate", answers.fate)):
        yield from _format_labeled(name, [value])
    for fact in (*parts.answers, *parts.details):
        yield from (to_one_row(line).replace("\t", " ") for line in (fact.line, *(f"  {line}" for line in fact.lines)))
    yield from (f"next: {to_one_row(command)}" for command in parts.commands.lines)
    # "attempt 1: ..." becomes "attempt: 1: ...": every line starts with a label that grep can find
    yield from (plain_row(line.replace(" ", ": ", 1)) for line in parts.attempts.lines)
    yield from _format_labeled("changed", parts.changes.lines if parts.attempts.lines else ())
    yield from _quoted_lines(report, parts, verbose=verbose)
    yield ""
    groups = [f"{group.head()}: {group.said}" for group in report.cascade.groups]
    yield from _format_labeled("group", groups if verbose else shorten_list(groups, MAX_GROUPS))
    if verbose:
        yield from _format_labeled(report.engine.node, (node.line for node in report.cascade.nodes))
        yield from _format_labeled(
            "ranks", (f"{name}: {text}" for name, text in report.cascade.ranks_by_node().items())
        )
        yield from _format_labeled("recovered", parts.recovered.lines)
    for line, (_, names) in zip(parts.evidence.lines, report.verdict.reasons, strict=True):
        yield from _format_labeled("why", [line])
        yield from _format_labeled("source", names if verbose and not report.engine.cites else ())
    yield from _format_labeled("suspect", parts.suspects.lines)
    yield from (plain_row(f"raw {line}") for line in parts.raw.lines if verbose)
    if parts.documents.lines:
        yield from ("", *(f"documents: {to_one_row(line)}" for line in parts.documents.lines))


def _quoted_lines(report: Report, parts: Sections, *, verbose: bool) -> Iterator[str]:
    root = report.verdict.root
    failures = quoted_failures(report) if verbose else [root] if root is not None else []
    for failure in failures:
        stack = stack_lines(failure)
        title = f"{parts.stack.title}: rank {failure.rank}" if len(failures) > 1 else parts.stack.title
        yield from _format_block(title, stack if verbose else shorten_list(stack, MAX_STACK_LINES, "... {} more lines"))
    if parts.message.lines:
        yield from ("", MESSAGE_TITLE, indent(printable(parts.message.text)))
    for failure in failures:
        yield from _format_block(
            parts.log.title, log_lines(failure) if verbose else log_lines(failure)[-MAX_LOG_LINES:]
        )


def _format_labeled(name: str, values: Iterable[str]) -> Iterator[str]:
    yield from (plain_row(f"{name}: {value}") for value in values)


def _format_block(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield from ("", f"{title.lower()}:", *(f"  {line}" for line in lines))
