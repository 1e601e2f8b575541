"""A report for a terminal, a pipe or a file: one screen, or with -v everything,
folded to a width.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from firstfault.exceptions.exceptions_in_text import format_exception
from firstfault.exceptions.stack_position import format_stack_dump
from firstfault.model import WorkerError
from firstfault.render.folding import count_columns, expand_tabs, fold
from firstfault.render.plain_lines import encodable, to_one_row
from firstfault.report.cascade import Group
from firstfault.report.data import Report
from firstfault.report.formatting import shorten_list
from firstfault.report.parts.quoted_output import log_lines, quoted_failures
from firstfault.report.parts.sections import Sections, build_sections, repeats_cause
from firstfault.report.states import State
from firstfault.utils.text import elide, one_line, printable

if TYPE_CHECKING:
    from rich.console import Console

_SCREEN_ROWS = 23
"""Rows of one screen, without the shell's prompt."""
_SCREEN_COLUMNS = 80
"""The width for which `_SCREEN_ROWS` counts; a report on a narrower terminal may have more rows."""
_PLAIN_COLUMNS = 80
"""Columns of a report in a pipe or a file."""
_FULL_LIMITS = {
    "Why": 2,
    "Code": 3,
    "Failed": 4,
    "Unknown": 3,
    "Attempts": 3,
    "Job": 1,
    "Victims": 1,
    "commands": 99,
}
"""How many lines of each part one screen has."""
_ROWS_OF_TEXT = "rows of a text"
_SHORTENING_STEPS = (
    ("Why", 1),
    ("Code", 2),
    ("Failed", 3),
    ("Code", 1),
    ("Failed", 2),
    ("Unknown", 2),
    ("Unknown", 1),
    ("Why", 0),
    ("Job", 0),
    (_ROWS_OF_TEXT, 2),
    ("Attempts", 1),
    ("commands", 2),
    ("Victims", 0),
    (_ROWS_OF_TEXT, 1),
    ("Unknown", 0),
    ("commands", 0),
    ("Code", 0),
    ("Failed", 1),
)
"""Steps that shorten the report until it fits one screen; the least important lines go first."""
_UNLISTED_COUNT_TEXT = "and {} more (-v)"
_MAX_LOG_LINES = 3
"""Last lines of the log on one screen, if the process raised nothing."""
_MAX_RANKS_CHARACTERS = 40
"""Limit for the ranks of a group on one screen."""
_MAX_TEXT_LINES = 400
"""Maximum number of lines of a quoted text."""
_MAX_LINE_CHARACTERS = 2_000
"""Maximum number of characters of such a line."""
_HOW_TO_SEE_ALL = "redirect the output to a file to see all"
_SHOW_COMMAND = "firstfault show "
# two or more folders: "/opt/build/gloo/tcp/pair.cc" becomes ".../pair.cc"
_FOLDERS = re.compile(r"(?:/[\w.+-]+){2,}/")
_STYLES = {State.ROOT: "bold red", State.SUSPECT: "yellow", State.UNCLEAR: "yellow"}
_BRIEF_FACTS = ("Host", "Exit code", "Time")
"""Facts that one screen has."""
_LABEL_COLUMNS = 9
"""Columns of the labels."""
_NARROW_COLUMNS = 50
"""On fewer columns a label is above its value instead of in front of it."""
_MIN_CUT_COLUMNS = 80
"""Lines that must fit one screen are cut for at least this many columns."""


def terminal_text(report: Report, *, verbose: bool = False) -> str:
    """Return the report for a pipe or a file: as on a terminal, without color,
    with quoted texts whole and unfolded.
    """
    rows = _layout(report, _PLAIN_COLUMNS, "utf-8", verbose=verbose, is_plain=True).rows
    return "\n".join(expand_tabs(f"{row.head}{row.text}") for row in rows).rstrip("\n")


def print_report(report: Report, console: Console, *, verbose: bool = False) -> None:
    """Print a report, folded to the terminal's width, in one screen unless `verbose`;
    escape sequences are removed.
    """
    from rich.text import Text  # noqa: PLC0415 - slow, and a pipe needs none of it

    for row in _layout(
        report,
        console.width,
        console.encoding,
        verbose=verbose,
        is_plain=False,
    ).rows:
        shown = Text().append(row.head, row.head_style or None).append(row.text, row.style or None)
        # the rows are folded already: rich must not fold a command again, which people copy
        console.print(shown, soft_wrap=True)


def _layout(
    report: Report,
    width: int,
    encoding: str,
    *,
    verbose: bool,
    is_plain: bool,
) -> _Printer:
    printer = _Printer(width, encoding, is_plain=is_plain)
    parts = build_sections(report)
    if verbose:
        _print_all(printer, report, parts)
        return printer
    # half the width folds a report into about twice the rows
    available_rows = _SCREEN_ROWS * _SCREEN_COLUMNS // min(printer.width, _SCREEN_COLUMNS)
    _print_screen(printer, report, parts, _FULL_LIMITS)
    # Lay out the whole report after each step: how many rows a line takes is known only after it is
    # folded.
    for step in range(1, len(_SHORTENING_STEPS) + 1):
        if len(printer.rows) <= available_rows:
            break
        limits = {**_FULL_LIMITS, **dict(_SHORTENING_STEPS[:step])}
        printer = _Printer(width, encoding, limits.get(_ROWS_OF_TEXT, 0), is_plain=is_plain)
        _print_screen(printer, report, parts, limits)
    return printer


# --- one screen -----------------------------------------------------------------------------------


def _print_screen(
    printer: _Printer,
    report: Report,
    parts: Sections,
    limits: Mapping[str, int],
) -> None:
    answers = report.answers
    verbose_command = f"{_SHOW_COMMAND}-v {report.uri}" if report.uri else ""
    # a command in several rows isn't worth a screen's room; without it the last line mentions -v
    shows_verbose_command = bool(verbose_command) and printer.fits(verbose_command)
    brief = [
        f"{fact.name.lower()} {fact.value}" for fact in report.facts if fact.name in _BRIEF_FACTS
    ]
    _print_head(printer, report, brief)
    printer.labeled("Retry", [f"{answers.retry}: {answers.retry_reason}"])
    _print_next(printer, parts, limits["commands"])
    if shows_verbose_command:
        printer.under_label(verbose_command)
    printer.labeled(
        "Unknown", shorten_list(answers.unknown, limits["Unknown"], _UNLISTED_COUNT_TEXT)
    )
    printer.labeled("Job", [report.identity.brief(report.engine)] if limits["Job"] else [])
    printer.labeled(
        "Attempts",
        shorten_list(parts.changes.lines[::-1], limits["Attempts"], _UNLISTED_COUNT_TEXT)[::-1],
    )
    printer.gap()
    _print_code(printer, report, parts, limits["Code"])
    groups = report.cascade.groups
    # a row that counts one more group takes as much room as the group itself
    shown = groups if len(groups) <= limits["Failed"] + 1 else groups[: limits["Failed"]]
    _print_groups(printer, report, shown)
    printer.labeled("Victims", [report.followers] if limits["Victims"] else [])
    printer.labeled("Why", parts.evidence.lines[: limits["Why"]])
    if not report.has_reported:
        printer.labeled(report.engine.nodes.capitalize(), [report.coverage])
    if not shows_verbose_command:
        printer.under_label("-v shows more")


def _print_head(printer: _Printer, report: Report, facts: Sequence[str]) -> None:
    answers = report.answers
    printer.line(report.first_line, style="bold")
    printer.gap()
    printer.labeled("Cause", [answers.what, answers.fault])
    printer.labeled("Where", [answers.place, ", ".join(facts)])


def _print_next(printer: _Printer, parts: Sections, limit: int) -> None:
    printer.labeled("Next", [fact.value for fact in parts.answers if fact.name == "Next"])
    for command in parts.commands.lines[:limit]:
        if not command.startswith(_SHOW_COMMAND):
            printer.command(command)


def _print_code(printer: _Printer, report: Report, parts: Sections, limit: int) -> None:
    """Print the program's own frames; if the process raised nothing, its last log lines."""
    root = report.verdict.root
    if parts.code.lines:
        # not [-limit:], which is everything for a limit of 0; the innermost frames come last
        lines = parts.code.lines[
            len(parts.code.lines) - limit if limit < len(parts.code.lines) else 0 :
        ]
        printer.labeled("Code", [printer.short(line) for line in lines])
    elif root is not None and root.exception is None and limit:
        printer.labeled("Log", [printer.short(line) for line in parts.log.lines[-_MAX_LOG_LINES:]])


def _print_groups(
    printer: _Printer,
    report: Report,
    groups: Sequence[Group],
    *,
    is_verbose: bool = False,
) -> None:
    """Print a table of the groups: state, ranks, and what happened;
    the cause itself is printed at the top.
    """
    names = [group.who(0 if is_verbose else _MAX_RANKS_CHARACTERS) for group in groups]
    state_width = max((len(group.label) for group in groups), default=0)
    name_width = max(map(len, names), default=0)
    lines = []
    for group, name in zip(groups, names, strict=True):
        # paths of build machines, as in gloo's messages, help least
        text = group.description if is_verbose else _FOLDERS.sub(".../", group.description)
        if group.state is State.ROOT:
            cause = report.answers.what
            text = "" if cause.startswith(text) or repeats_cause(f": {text}", cause) else text
        elif is_verbose and group.first is not None and group.first.delay:
            text = f"{text} ({group.first.delay})"
        row = f"{group.label:<{state_width}}  {name:<{name_width}}  {text}".rstrip()
        lines.append(row if is_verbose else printer.short(row))
    if unlisted_groups := report.cascade.groups[len(groups) :]:
        lines.append(
            f"and {len(unlisted_groups)} more groups,"
            f" {sum(group.count for group in unlisted_groups)} failures (-v)"
        )
    styles = [_STYLES.get(group.state, "") for group in groups]
    printer.labeled("Failed", lines or ["no readable error document"], styles)


# --- everything -----------------------------------------------------------------------------------


def _print_all(printer: _Printer, report: Report, parts: Sections) -> None:
    _print_head(printer, report, ())
    # the head has the first two
    for fact in parts.answers[2:]:
        if fact.name == "Next":
            _print_next(printer, parts, len(parts.commands.lines))
        elif fact.name not in {"Unknown", "Attempts"}:
            printer.labeled(fact.name, [fact.value])
    printer.labeled("Unknown", report.answers.unknown)
    printer.labeled("Attempts", parts.changes.lines)
    printer.gap()
    _print_groups(printer, report, report.cascade.groups, is_verbose=True)
    _print_quoted(printer, report, parts)
    facts = (*parts.facts, *parts.details)
    printer.section(
        "Facts",
        [text for fact in facts for text in (fact.line, *(f"  {line}" for line in fact.lines))],
    )
    _print_nodes(printer, report)
    cited_documents = dict.fromkeys(name for _, names in report.verdict.reasons for name in names)
    numbers = {name: number for number, name in enumerate(cited_documents, 1)}
    reasons = [
        " ".join([reason_text, *(f"[{numbers[name]}]" for name in names)])
        for reason_text, names in report.verdict.reasons
    ]
    printer.section(parts.evidence.title, reasons)
    for part in (parts.suspects, parts.attempts, parts.recovered, parts.documents):
        printer.section(part.title, part.lines, is_copied=part is parts.documents)
    raw = [*parts.raw.lines, *(f"[{number}] {name}" for name, number in numbers.items())]
    printer.section(parts.raw.title, raw, is_copied=True)


def _print_quoted(printer: _Printer, report: Report, parts: Sections) -> None:
    """Print the traceback, or first the stack of a process that raised nothing, and its log."""
    failures = quoted_failures(report)
    root = report.verdict.root
    raised = root.exception if root is not None else None
    if raised is None:
        for failure in failures:
            _print_stacks(printer, failure, parts.stack.title)
    text = (
        format_exception(raised, folded=True)
        if raised is not None and raised.frames
        else parts.message.text
    )
    printer.quote(parts.message.title, text.split("\n") if text else [])
    for failure in failures:
        if raised is not None:
            _print_stacks(printer, failure, parts.stack.title)
        name = (
            f"rank {failure.rank}" if failure.rank is not None else failure.node or "the root cause"
        )
        printer.quote(f"{parts.log.title}: {name}", log_lines(failure))


def _print_nodes(printer: _Printer, report: Report) -> None:
    by_node = report.cascade.ranks_by_node()
    lines = []
    for node in report.cascade.nodes:
        lines += [node.line, *([f"  {by_node.pop(node.name)}"] if node.name in by_node else [])]
    lines += [f"{name}: {text}" for name, text in by_node.items()]
    printer.section(f"Ranks by {report.engine.node}", lines)


def _print_stacks(printer: _Printer, failure: WorkerError, title: str) -> None:
    for dump in failure.stack_dumps:
        process = f"rank {dump.rank}" if dump.rank is not None else f"process {dump.pid}"
        printer.quote(f"{title}: {process}", format_stack_dump(dump.text).strip("\n").split("\n"))


def _shorten(lines: Sequence[str]) -> list[str]:
    """Return the head and the tail of a text, and how many lines aren't shown."""
    half = _MAX_TEXT_LINES // 2
    left_out_count = len(lines) - 2 * half
    shown = (
        [*lines[:half], f"... {left_out_count} lines left out ...", *lines[-half:]]
        if left_out_count > 1
        else lines
    )
    shortened = [elide(line, _MAX_LINE_CHARACTERS).replace("\n", " ") for line in shown]
    return (
        shortened
        if left_out_count <= 1 and shortened == list(lines)
        else [*shortened, f"({_HOW_TO_SEE_ALL})"]
    )


# --- rows -----------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """One row, with the styles of its label and its text."""

    text: str = ""
    style: str = ""
    head: str = ""
    head_style: str = ""


class _Printer:
    """Collects labeled rows, folded, with a hanging indent. Quoted texts are never markup."""

    def __init__(
        self,
        width: int,
        encoding: str,
        max_rows: int = 0,
        *,
        is_plain: bool = False,
    ) -> None:
        self._encoding = encoding
        self._max_rows = max_rows
        """Maximum number of rows of a value next to a label, or 0 for no limit."""
        self._is_plain = is_plain
        """Whether quoted texts are printed whole and unfolded, because a file has room for them."""
        self.width = width
        self.rows: list[_Row] = []
        self._hang = _LABEL_COLUMNS if self.width >= _NARROW_COLUMNS else 2

    def gap(self) -> None:
        """Add an empty row."""
        self.rows.append(_Row())

    def section(self, title: str, lines: Iterable[str], *, is_copied: bool = False) -> None:
        """Add a heading and lines, each folded with a deeper indent; nothing without lines.

        In a file, lines that people copy or search for aren't folded.
        """
        for index, line in enumerate(lines):
            if index == 0:
                self.gap()
                self.line(title, style="bold")
            if is_copied and self._is_plain:
                self.rows.append(_Row(self._clean(f"  {to_one_row(line)}")))
                continue
            # the indentation of code is kept, but a deep one must not push the text off a narrow
            # terminal
            inner = min(2 + len(line) - len(line.lstrip(" ")), self.width // 2)
            self._rows(" " * inner, " " * (inner + 2), line.lstrip(" "))

    def quote(self, title: str, lines: Sequence[str]) -> None:
        """Add a heading and a quoted text, such as a traceback."""
        if not self._is_plain:
            self.section(title, _shorten(lines))
        elif lines:
            self.gap()
            self.line(title, style="bold")
            # indented, so that no line of it looks like an answer of the report
            self.rows += [_Row(self._clean(f"  {to_one_row(line)}".rstrip())) for line in lines]

    def line(self, text: str, *, indent: int = 0, style: str = "") -> None:
        """Add one line; where it is folded, its other rows are indented,
        so that none of them begins like a label.
        """
        self._rows(" " * indent, " " * (indent + 2), text, style)

    def labeled(self, label: str, values: Sequence[str], styles: Sequence[str] = ()) -> None:
        """Add values next to their label, without empty ones;
        on a narrow terminal only the first is next to it.
        """
        hang = " " * self._hang
        styled = itertools.zip_longest(values, styles, fillvalue="")
        for index, (text, style) in enumerate(pair for pair in styled if pair[0]):
            value = self.short(text, self._max_rows) if self._max_rows else text
            if index:
                self._rows(hang, hang, value, style)
            elif self.width >= _NARROW_COLUMNS:
                self._rows(label.ljust(_LABEL_COLUMNS), hang, value, style, head_style="bold")
            else:
                self._rows("", hang, f"{label}: {value}", style)

    def short(self, text: str, rows: int = 1) -> str:
        """Return a text cut to this many rows of a wide terminal next to a label."""
        return one_line(text, rows * (max(self.width, _MIN_CUT_COLUMNS) - _LABEL_COLUMNS))

    def under_label(self, text: str) -> None:
        """Add a line below the values of a label."""
        self._rows(" " * self._hang, " " * self._hang, text)

    def fits(self, text: str) -> bool:
        """Whether a text fits one row below a label's values."""
        return self._hang + count_columns(self._clean(text)) <= self.width

    def command(self, command: str) -> None:
        """Add a shell command that can be copied: below a label's values,
        or in several rows from the first column.
        """
        if self._is_plain:
            self.rows.append(_Row(" " * self._hang + self._clean(to_one_row(command))))
            return
        if self.fits(command):
            self.under_label(command)
            return
        # a backslash at the end of each row but the last: a shell joins the pasted rows to one
        # command
        rows, used = [""], 0
        for character in self._clean(to_one_row(command)):
            cells = count_columns(character)
            # >=: the last column is for the backslash
            if used + cells >= self.width:
                rows.append("")
                used = 0
            rows[-1] += character
            used += cells
        self.rows += map(_Row, "\\\n".join(rows).split("\n"))

    def _rows(
        self,
        head: str,
        hang: str,
        text: str,
        style: str = "",
        *,
        head_style: str = "",
    ) -> None:
        # even a terminal narrower than the labels gets one character a row
        available_columns = max(self.width - max(len(head), len(hang)), 1)
        for index, folded_row in enumerate(fold(self._clean(to_one_row(text)), available_columns)):
            label = hang if index else head
            row = folded_row.rstrip()
            self.rows.append(
                _Row(row, style, label if row else label.rstrip(), "" if index else head_style)
            )

    def _clean(self, text: str) -> str:
        # quoted texts are untrusted: an escape sequence could clear the screen or hide a line
        return encodable(printable(text), self._encoding)
