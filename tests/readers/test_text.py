"""Text that is safe to store and to show."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstfault.utils.stored_text import clean, clean_end
from firstfault.utils.text import duration, elide, extract_sentence, one_line, printable

_ANY_TEXT = st.text(st.characters(exclude_categories=()))


@given(_ANY_TEXT, st.integers(0, 80))
def test_eliding_keeps_the_limit(text: str, limit: int) -> None:
    """The result is never longer than the limit, and a short text is not touched."""
    short = elide(text, limit)
    assert len(short) <= limit
    assert short == text if len(text) <= limit else short != text
    long = elide(f"<{'x' * 10_000}>", 200)
    assert (long[:4], long[-4:]) == ("<xxx", "xxx>")
    assert "9802 characters left out" in long


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("caf\u00e9 \U0001f525", "caf\u00e9 \U0001f525"),
        ("lone \udc80 surrogate", "lone \\udc80 surrogate"),
        ("a\x00b", "ab"),
        ("password=hunter22", "password=***"),
        ("tab\tand\nline", "tab\tand\nline"),
    ],
)
def test_cleaned_text_is_utf8_without_nul_and_credentials(text: str, stored: str) -> None:
    """A cleaned text is valid UTF-8 without NUL and credentials, and otherwise unchanged."""
    assert clean(text, 1_000) == stored


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[1;1Hgone", "gone"),
        ("over\rwritten", "overwritten"),
        ("back\x08space \x07bell \x9b31mC1", "backspace bell 31mC1"),
        ("\u202eright to left\u2069", "right to left"),
        ("\u061cof another script", "of another script"),
        ("one\u2028line\u2029only", "onelineonly"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("caf\u00e9 \u2192 \U0001f525", "caf\u00e9 \u2192 \U0001f525"),
    ],
)
def test_terminal_control_is_dropped(text: str, shown: str) -> None:
    """Terminal control is dropped; letters, newlines and tabs stay."""
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("text", "limit", "line"),
    [
        ("first\nsecond", 200, "first"),
        ("\n \n  third  \n", 200, "third"),
        ("", 200, ""),
        ("\n\t\n", 200, ""),
        ("exactly ten"[:10], 10, "exactly te"),
        ("one too long", 11, "one too..."),
        ("abcdef", 3, "..."),
        ("a path: /data/shards/of/the/corpus", 20, "a path: /data/sha..."),
        ("abcdef", 1, "."),
        ("abcdef", 0, ""),
        ("\x1b[31mred\x1b[0m\nnext", 200, "red"),
    ],
)
def test_one_line_is_the_first_non_empty_line_within_the_limit(
    text: str, limit: int, line: str
) -> None:
    """The first non-empty line, with dots if it was cut, never longer than the limit."""
    assert one_line(text, limit) == line


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("boom\nmore", "boom"),
        ("USER:ValueError: error=boom", "boom"),
        ("SYSTEM:Unknown: error=boom\nmore", "boom"),
        ("the USER:X: error=boom", "the USER:X: error=boom"),
        ("USER:", "USER:"),
        ("", ""),
    ],
)
def test_the_first_line_loses_flytekits_code(message: str, sentence: str) -> None:
    """The first line of a message, without the code that flytekit puts before it."""
    assert extract_sentence(message) == sentence


@given(_ANY_TEXT, st.integers(1, 40))
def test_the_end_of_a_text_keeps_the_limit(text: str, limit: int) -> None:
    """The end of a text is at most as long as asked, and is the end of the cleaned text."""
    end = clean_end(text, limit)
    assert len(end) <= limit
    assert clean(text[-4 * limit :], 4 * limit).endswith(end)


def test_the_end_of_a_text_is_whole_lines() -> None:
    """A line that does not fit is left out, a single long line is cut,
    and credentials in the end are redacted.
    """
    for limit, end in ((10, "two\nthree"), (9, "two\nthree"), (8, "three")):
        assert clean_end("one\ntwo\nthree", limit) == end
    assert clean_end("x" * 50, 10) == "x" * 10
    assert clean_end(f"{'x' * 5000}\npassword=hunter22", 40) == "password=***"


def test_a_duration_is_rounded_down() -> None:
    """A time that is at least so long isn't shown as a longer one."""
    gap = 114_511_310 * 1_000_000
    assert (duration(gap), duration(gap, is_rounded_down=True)) == ("32 h", "31 h")
    assert duration(1_990_000_000, is_rounded_down=True) == "1.9 s"
