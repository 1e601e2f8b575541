"""A report for a terminal: one screen, or with -v everything, folded to the terminal's width."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from firstfault.exceptions.stack_dumps import format_stack_dump
from firstfault.exceptions.traceback_format import format_exception
from firstfault.model import WorkerError
from firstfault.render.plain_lines import encodable, to_one_row
from firstfault.report.cascade import Group
from firstfault.report.data import Report, Sections, build_sections, log_lines, quoted_failures
from firstfault.report.formatting import shorten_list
from firstfault.report.states import State
from firstfault.utils.text import elide, one_line, printable

if TYPE_CHECKING:
    from rich.console import Console

_ROWS = 23
"""Rows of one screen, without the shell's prompt."""
_COLUMNS = 80
"""The width for which `_ROWS` counts; a report on a narrower terminal may have more rows."""
_ALL = {"Why": 2, "Code": 3, "Failed": 4, "Unknown": 3, "Attempts": 3, "Job": 1, "Victims": 1, "commands": 99}
"""How many lines of each part one screen has."""
_ROWS_OF_TEXT = "rows of a text"
_STEPS = (
    ("Why", 1),
    ("Code", 2),
    ("Failed", 3),
    ("Why", 0),
    ("Code", 1),
    ("Failed", 2),
    ("Job", 0),
    ("Unknown", 1),
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
_COUNTED = "and {} more (-v)"
_LOG_LINES = 3
"""Last lines of the log on one screen, if the process raised nothing."""
_RANKS = 40
"""Characters."""
_TEXT_LINES = 400
"""Maximum number of lines of a quoted text."""
_TEXT_LINE = 2_000
"""Maximum number of characters of such a line."""
_TO_SEE_ALL = "a pipe (| less) shows all"
_SHOW = "firstfault show "
# two or more folders: "/opt/build/gloo/tcp/pair.cc" becomes ".../pair.cc"
_FOLDERS = re.compile(r"(?:/[\w.+-]+){2,}/")
_STYLES = {State.ROOT: "bold red", State.SUSPECT: "yellow", State.UNCLEAR: "yellow"}
_WITH_WHERE = ("host", "exit code", "time")
_LABEL = 9
"""Columns of the labels."""
_NARROW = 50
"""On fewer columns a label is above its value instead of in front of it."""
_WIDTH = 80
"""Lines that must fit one screen are cut for at least this many columns."""


def print_report(report: Report, console: Console, *, verbose: bool = False) -> None:
    """Print a report, folded to the terminal's width, in one screen unless `verbose`; escape sequences are removed."""
    printer = _Printer(console)
    parts = build_sections(report)
    if verbose:
        _print_all(printer, report, parts)
        printer.flush()
        return
    # half the width folds a report into about twice the rows
    room = _ROWS * _COLUMNS // min(printer.width, _COLUMNS)
    _print_screen(printer, report, parts, _ALL)
    # Lay out the whole report after each step: how many rows a line takes is known only after it is folded.
    # whether a report fits depends on how this width folds it, so each step lays it out again
    for step in range(1, len(_STEPS) + 1):
        if len(printer.rows) <= room:
            break
        limits = {**_ALL, **dict(_STEPS[:step])}
        printer = _Printer(console, limits.get(_ROWS_OF_TEXT, 0))
        _print_screen(printer, report, parts, limits)
    printer.flush()


# --- one screen -----------------------------------------------------------------------------------------------------


def _print_screen(printer: _Printer, report: Report, parts: Sections, limits: Mapping[str, int]) -> None:
    answers, more = report.answers, f"{_SHOW}-v {report.uri}" if report.uri else ""
    # a command in several rows isn't worth a screen's room; without it the last line mentions -v
    has_more = bool(more) and printer.fits(more)
    _print_head(printer, report, report.verdict.category)
    # the category's meaning is shown elsewhere too
    reason = answers.fate_reason.replace(f" ({answers.category})", "").removeprefix(f"{answers.category}; ")
    printer.labelled("Retry", [f"{answers.fate}; {reason}"])
    texts = [step.text.removesuffix(f": {answers.code}") for step in answers.steps if not step.command]
    _print_next(printer, texts, parts.commands.lines[: limits["commands"]])
    if has_more:
        printer.beside(more)
    printer.labelled("Unknown", shorten_list(answers.unknown, limits["Unknown"], _COUNTED))
    printer.labelled("Job", [report.identity.brief(report.engine)] if limits["Job"] else [])
    printer.labelled("Attempts", shorten_list(parts.changes.lines[::-1], limits["Attempts"], _COUNTED)[::-1])
    printer.gap()
    _print_code(printer, report, parts, limits["Code"])
    _print_groups(printer, report, limits["Failed"])
    printer.labelled("Victims", [report.followers] if limits["Victims"] else [])
    printer.labelled("Why", parts.evidence.lines[: limits["Why"]])
    _print_reported(printer, report, "" if has_more else "-v shows more")


def _print_head(printer: _Printer, report: Report, category: str) -> None:
    answers = report.answers
    printer.line(report.first_line, style="bold")
    printer.gap()
    fault = f"{answers.fault_owner.value}, {category}"
    both = f"{answers.what}; {fault}"
    printer.labelled("What", [both] if printer.fits(both) else [answers.what, fault])
    place = f"{answers.where}, {answers.code}" if answers.code else answers.where
    known = {fact.name: fact.value for fact in report.facts if fact.name in _WITH_WHERE}
    beside = ", ".join(f"{name} {value}" for name, value in known.items())  # the machine follows the rank
    printer.labelled("Where", [place, beside])


def _print_next(printer: _Printer, texts: Sequence[str], commands: Sequence[str]) -> None:
    printer.labelled("Next", texts)
    for command in commands:
        if not command.startswith(_SHOW):
            printer.command(command)


def _print_code(printer: _Printer, report: Report, parts: Sections, limit: int) -> None:
    """Print the program's own frames; if the process raised nothing, its last log lines."""
    root = report.verdict.root
    if parts.code.lines:
        # not [-limit:], which is everything for a limit of 0; the innermost frames come last
        lines = parts.code.lines[len(parts.code.lines) - limit if limit < len(parts.code.lines) else 0 :]
        printer.labelled("Code", [printer.short(line) for line in lines])
    elif root is not None and root.exception is None and limit:
        printer.labelled("Log", [printer.short(line) for line in parts.log.lines[-_LOG_LINES:]])


def _print_groups(printer: _Printer, report: Report, limit: int) -> None:
    groups = report.cascade.groups
    # a row that counts one more group takes as much room as the group itself
    shown = groups if len(groups) <= limit + 1 else groups[:limit]
    # paths of build machines, as in gloo's messages, help least
    lines = [printer.short(f"{group.head(_RANKS)}: {_FOLDERS.sub('.../', group.said)}") for group in shown]
    if left := groups[len(shown) :]:
        lines.append(f"and {len(left)} more groups, {sum(group.count for group in left)} failures (-v)")
    _print_failed(printer, lines, shown)


def _print_failed(printer: _Printer, lines: Sequence[str], groups: Sequence[Group]) -> None:
    styles = [_STYLES.get(group.state, "") for group in groups]
    printer.labelled("Failed", lines or ["no readable error document"], styles)


def _print_reported(printer: _Printer, report: Report, more: str) -> None:
    nodes = report.engine.nodes
    coverage = f"{report.coverage} {nodes}" if "," not in report.coverage else f"{nodes}: {report.coverage}"
    parts = list(filter(None, [coverage, report.clocks, more]))
    printer.labelled("Reported", ["; ".join(parts)] if not printer.most_rows else parts)


# --- everything -----------------------------------------------------------------------------------------------------


def _print_all(printer: _Printer, report: Report, parts: Sections) -> None:
    answers = report.answers
    _print_head(printer, report, answers.category)
    printer.labelled("Retry", [f"{answers.fate}; {answers.fate_reason}"])
    _print_next(printer, [step.text for step in answers.steps if not step.command], parts.commands.lines)
    printer.labelled("Unknown", answers.unknown)
    printer.labelled("Job", ["; ".join(report.identity.parts(report.engine))])
    printer.labelled("Attempts", parts.changes.lines)
    printer.gap()
    _print_quoted(printer, report, parts)
    printer.gap()
    lines = []
    for group in report.cascade.groups:
        later = group.first.later if group.first is not None and group.state is not State.ROOT else ""
        lines.append(f"{group.head()}: {group.said}" + (f" ({later})" if later else ""))
    _print_failed(printer, lines, report.cascade.groups)
    printer.labelled("Victims", [report.followers])
    _print_reported(printer, report, "")
    _print_nodes(printer, report)
    facts = [fact for fact in (*parts.answers, *parts.details) if fact.name != "unknown"]  # it is printed above
    printer.section("Facts", itertools.chain.from_iterable((fact.line, *_indent(fact.lines)) for fact in facts))
    named = itertools.chain.from_iterable(names for _, names in report.verdict.reasons)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(named), 1)}
    reasons = [" ".join([why, *(f"[{numbers[name]}]" for name in names)]) for why, names in report.verdict.reasons]
    printer.section(parts.evidence.title, reasons)
    for part in (parts.attempts, parts.recovered, parts.documents):
        printer.section(part.title, part.lines)
    printer.section(parts.raw.title, [*parts.raw.lines, *(f"[{number}] {name}" for name, number in numbers.items())])


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _print_quoted(printer: _Printer, report: Report, parts: Sections) -> None:
    """Print the traceback, or first the stack of a process that raised nothing, and its log."""
    failures, root = quoted_failures(report), report.verdict.root
    raised = root.exception if root is not None else None
    if raised is None:
        for failure in failures:
            _print_stacks(printer, failure, parts.stack.title)
    text = format_exception(raised, folded=True) if raised is not None and raised.frames else parts.message.text
    printer.section(parts.message.title, _shorten(text.split("\n")) if text else [])
    for failure in failures:
        if raised is not None:
            _print_stacks(printer, failure, parts.stack.title)
        name = f"rank {failure.rank}" if failure.rank is not None else failure.node or "the root cause"
        printer.section(f"{parts.log.title}: {name}", _shorten(log_lines(failure)))


def _print_nodes(printer: _Printer, report: Report) -> None:
    by_node = report.cascade.ranks_by_node()
    lines = []
    for node in report.cascade.nodes:
        lines += [node.line, *_indent([by_node.pop(node.name)] if node.name in by_node else [])]
    lines += [f"{name}: {text}" for name, text in by_node.items()]
    printer.section(f"Ranks by {report.engine.node}", lines)
    printer.line(", ".join(f"{state.mark} {state.value}" for state in State), indent=2)


def _print_stacks(printer: _Printer, failure: WorkerError, title: str) -> None:
    for dump in failure.stack_dumps:
        of = f"rank {dump.rank}" if dump.rank is not None else f"process {dump.pid}"
        printer.section(f"{title}: {of}", _shorten(format_stack_dump(dump.text).strip("\n").split("\n")))


def _shorten(lines: Sequence[str]) -> list[str]:
    """Return the head and the tail of a text, and how many lines aren't shown."""
    half = _TEXT_LINES // 2
    left = len(lines) - 2 * half
    shown = [*lines[:half], f"... {left} lines left out ...", *lines[-half:]] if left > 1 else lines
    found = [elide(line, _TEXT_LINE).replace("\n", " ") for line in shown]
    return found if left <= 1 and found == list(lines) else [*found, f"({_TO_SEE_ALL})"]


# --- rows -------------------------------------------------------------------------------------------------------------


class _Printer:
    """Collects labelled rows and prints them folded, with a hanging indent. Quoted texts are never markup."""

    def __init__(self, console: Console, most_rows: int = 0) -> None:
        self._console = console
        self.most_rows = most_rows
        """Rows that one value next to a label may have; 0: any number."""
        self.width = console.width
        self.rows: list[Text] = []
        self._hang = _LABEL if self.width >= _NARROW else 2

    def gap(self) -> None:
        """Add an empty row."""
        self.rows.append(Text())

    def flush(self) -> None:
        """Print the rows."""
        for row in self.rows:
            # the rows are folded already: rich must not fold a command again, which people copy
            self._console.print(row, soft_wrap=True)

    def section(self, title: str, lines: Iterable[str]) -> None:
        """Add a heading and lines, each folded with a deeper indent; nothing without lines."""
        for index, line in enumerate(lines):
            if index == 0:
                self.gap()
                self.line(title, style="bold")
            # the indentation of code is kept, but a deep one must not push the text off a narrow terminal
            inner = min(2 + len(line) - len(line.lstrip(" ")), self.width // 2)
            self._rows(" " * inner, " " * (inner + 2), line.lstrip(" "))

    def line(self, text: str, *, indent: int = 0, style: str = "") -> None:
        """Add one line; where it is folded, its other rows are indented, so that none of them begins like a label."""
        self._rows(" " * indent, " " * (indent + 2), text, style)

    def labelled(self, label: str, values: Sequence[str], styles: Sequence[str] = ()) -> None:
        """Add values next to their label, without empty ones; on a narrow terminal only the first is next to it."""
        hang = " " * self._hang
        styled = itertools.zip_longest(values, styles, fillvalue="")
        for index, (text, style) in enumerate(pair for pair in styled if pair[0]):
            value = self.short(text, self.most_rows) if self.most_rows else text
            if index:
                self._rows(hang, hang, value, style)
            elif self.width >= _NARROW:
                self._rows(label.ljust(_LABEL), hang, value, style, head_style="bold")
            else:
                self._rows("", hang, f"{label}: {value}", style)

    def short(self, text: str, rows: int = 1) -> str:
        """Return a text cut to this many rows of a wide terminal next to a label."""
        return one_line(text, rows * (max(self.width, _WIDTH) - _LABEL))

    def beside(self, text: str) -> None:
        """Add a line below the values of a label."""
        self.line(text, indent=self._hang)

    def fits(self, text: str) -> bool:
        """Whether a text fits one row below a label's values."""
        return self._hang + self._cells(text).cell_len <= self.width

    def command(self, command: str) -> None:
        """Add a shell command that can be copied: below a label's values, or in several rows from the first column."""
        if self.fits(command):
            self.beside(command)
            return
        # a backslash at the end of each row but the last: a shell joins the pasted rows to one command
        rows, used = [""], 0
        for character in self._clean(to_one_row(command)):
            cells = cell_len(character)
            # >=: the last column is for the backslash
            if used + cells >= self.width:
                rows.append("")
                used = 0
            rows[-1] += character
            used += cells
        self.rows += map(Text, "\\\n".join(rows).split("\n"))

    def _rows(self, head: str, hang: str, text: str, style: str = "", *, head_style: str = "") -> None:
        # even a terminal narrower than the labels gets one character a row
        room = max(self.width - max(len(head), len(hang)), 1)
        for index, row in enumerate(self._cells(to_one_row(text)).wrap(self._console, room, overflow="fold")):
            shown = Text(hang) if index else Text().append(head, head_style or None)
            shown.append(row.plain, style or None).rstrip()
            self.rows.append(shown)

    def _cells(self, text: str) -> Text:
        return Text(self._clean(text))

    def _clean(self, text: str) -> str:
        # quoted texts are untrusted: an escape sequence could clear the screen or hide a line
        return encodable(printable(text), self._console.encoding)
