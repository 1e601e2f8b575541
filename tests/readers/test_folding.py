"""Texts are folded as rich folds them."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from firstfault.render.folding import count_columns, expand_tabs, fold

_TEXTS = st.text(st.sampled_from("ab,./ \t-é漢😀"), max_size=120)
"""Without tabs and the last three characters, a text is folded without rich."""
_ASCII = st.text(st.sampled_from("abc,./-  "), max_size=120)


@given(_TEXTS | _ASCII, st.integers(1, 90))
def test_rows_are_those_of_rich(text: str, width: int) -> None:
    """Each text has the rows, without blanks at their ends, that rich gives it at any width."""
    rows = Text(text).wrap(Console(file=io.StringIO()), width, overflow="fold")
    assert [row.rstrip() for row in fold(text, width)] == [row.plain.rstrip() for row in rows]


@given(_TEXTS)
def test_columns_are_those_of_rich(text: str) -> None:
    """A text takes as many columns as rich counts, and its tabs are as wide."""
    assert count_columns(text) == Text(text).cell_len
    row = Text(text)
    row.expand_tabs(8)
    assert expand_tabs(text) == row.plain
