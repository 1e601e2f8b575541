"""Folds texts into rows of a terminal, as rich does,
and loads rich only for texts with more than ASCII.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_WORD = re.compile(r"\s*\S+\s*")
_TAB_SIZE = 8


def count_columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if _has_one_column_each(text):
        return len(text)
    from rich.cells import (  # noqa: PLC0415 - rich takes a tenth of the time that a small log takes
        cell_len,
    )

    return cell_len(text)


def expand_tabs(text: str) -> str:
    """Return a row with spaces instead of tabs."""
    if "\t" not in text or text.isascii():
        return text.expandtabs(_TAB_SIZE)
    from rich.text import Text  # noqa: PLC0415 - as above

    row = Text(text)
    row.expand_tabs(_TAB_SIZE)
    return row.plain


def fold(text: str, width: int) -> list[str]:
    """Return the rows of a text without line breaks; words longer than `width` columns are cut."""
    if not _has_one_column_each(text):
        from rich.text import Text  # noqa: PLC0415 - as above

        return [row.plain for row in Text(text).wrap(_make_console(), width, overflow="fold")]
    starts = [0]
    used = 0
    for match in _WORD.finditer(text):
        word = match[0]
        needed = len(word.rstrip())
        if needed <= width - used:
            used += len(word)
            continue
        cuts = [match.start()] if needed <= width else range(match.start(), match.end(), width)
        starts += [cut for cut in cuts if cut]
        used = match.end() - cuts[-1]
    return [text[begin:end] for begin, end in pairwise([*starts, len(text)])]


def _has_one_column_each(text: str) -> bool:
    return text.isascii() and "\t" not in text


@cache
def _make_console() -> Console:
    from rich.console import Console  # noqa: PLC0415 - as above

    return Console()
