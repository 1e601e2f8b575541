"""Prints labelled rows on a terminal of any width."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from firstfault.text import one_line, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console
    from rich.text import Text

_LABEL = 9
"""Columns of the labels."""
_NARROW = 50
"""On fewer columns a label is before its value instead of beside it."""
_WIDTH = 80
"""Lines that must fit one screen are cut for at least this many columns."""


class Printer:
    """Collects rows and prints them folded, with a hanging indent. Quoted texts are never markup."""

    def __init__(self, console: Console, most_rows: int = 0) -> None:
        from rich.text import Text  # noqa: PLC0415 - plain lines need no rich

        self._console = console
        self.most_rows = most_rows
        """Rows that one value beside a label may have; 0: any number."""
        self._text = Text
        self.width = console.width
        self.rows: list[Text] = []
        self._hang = _LABEL if self.width >= _NARROW else 2

    def gap(self) -> None:
        """Add an empty row."""
        self.rows.append(self._text())

    def flush(self) -> None:
        """Print the rows."""
        for row in self.rows:
            self._console.print(row, soft_wrap=True)

    def section(self, title: str, lines: Iterable[str]) -> None:
        """Add a heading and lines, each folded with a deeper indent; nothing if there are no lines."""
        for index, line in enumerate(lines):
            if index == 0:
                self.gap()
                self.line(title, style="bold")
            inner = min(2 + len(line) - len(line.lstrip(" ")), self.width // 2)
            self._rows(" " * inner, " " * (inner + 2), line.lstrip(" "))

    def line(self, text: str, *, indent: int = 0, style: str = "") -> None:
        """Add one line; where it is folded, its other rows are indented, so that none of them begins like a label."""
        self._rows(" " * indent, " " * (indent + 2), text, style)

    def labelled(self, label: str, values: Sequence[str], styles: Sequence[str] = ()) -> None:
        """Add values beside their label; on a narrow terminal the first after it and the others below."""
        hang = " " * self._hang
        for index, (text, style) in enumerate(itertools.zip_longest(values, styles, fillvalue="")):
            value = self.short(text, self.most_rows) if self.most_rows else text
            if index:
                self._rows(hang, hang, value, style)
            elif self.width >= _NARROW:
                self._rows(label.ljust(_LABEL), hang, value, style, head_style="bold")
            else:
                self._rows("", hang, f"{label}: {value}", style)

    def short(self, text: str, rows: int = 1) -> str:
        """Return a text cut to so many rows of a wide terminal beside a label."""
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
        from rich.cells import cell_len  # noqa: PLC0415 - what prints without rich imports this module, too

        rows, used = [""], 0
        for character in self._clean(one_row(command)):
            cells = cell_len(character)
            if used + cells >= self.width:
                rows.append("")
                used = 0
            rows[-1] += character
            used += cells
        self.rows += map(self._text, "\\\n".join(rows).split("\n"))

    def _rows(self, head: str, hang: str, text: str, style: str = "", *, head_style: str = "") -> None:
        room = max(self.width - max(len(head), len(hang)), 1)
        for index, row in enumerate(self._cells(one_row(text)).wrap(self._console, room, overflow="fold")):
            shown = self._text(hang) if index else self._text().append(head, head_style or None)
            shown.append(row.plain, style or None).rstrip()
            self.rows.append(shown)

    def _cells(self, text: str) -> Text:
        return self._text(self._clean(text))

    def _clean(self, text: str) -> str:
        return encodable(printable(text), self._console.encoding)


def encodable(text: str, encoding: str) -> str:
    """Return `text` with escapes for what cannot be written in `encoding`."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def one_row(text: str) -> str:
    """Return a text without control characters and line breaks."""
    return printable(text).replace("\n", " ")
