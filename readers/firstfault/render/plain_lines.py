"""One-line texts that all plain formats share: printable, without line breaks, encodable."""

from __future__ import annotations

from firstfault.utils.text import elide, printable

MAX_FACT_CHARACTERS = 300
MAX_STACK_LINES = 30
MAX_LOG_LINES = 20
MAX_GROUPS = 20
"""Groups, and lines of a list in Markdown."""


def encodable(text: str, encoding: str) -> str:
    """Return `text` with escapes for what can't be written in `encoding`."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def to_one_row(text: str) -> str:
    """Return a text without control characters and line breaks."""
    return printable(text).replace("\n", " ")


def plain_row(text: str, limit: int = MAX_FACT_CHARACTERS) -> str:
    """Return one line without tabs, and without the middle of a long text."""
    # `elide` puts its note about the cut between line breaks, so they are replaced afterwards
    return elide(to_one_row(text).replace("\t", " "), limit).replace("\n", " ")


def indent(text: str) -> str:
    """Return a quoted text with every line indented,
    so that none of them looks like an answer of the report.
    """
    return "\n".join(f"  {line}" if line.strip() else "" for line in text.split("\n"))
