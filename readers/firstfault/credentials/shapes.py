"""Rule 1: credentials recognized by their form, such as a token with a known prefix."""

from __future__ import annotations

import re
from collections.abc import Callable

from firstfault.credentials.literals import (
    HIDDEN,
    TABLE,
    is_key,
    is_mixed,
    is_placeholder,
    is_text,
    is_varied,
)
from firstfault.utils.lazy_pattern import LazyPattern

WORD_START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))"
"""A word also starts after an escape: ``\\n``, ``%20``."""
MIN_OPAQUE_LENGTH = 20
MIN_ID_LENGTH = 16
MIN_MIXED_RUN_LENGTH = 10


def _is_opaque(text: str) -> bool:
    # a full stop at the end belongs to the sentence
    text = text.rstrip(".")
    camel = text.isalpha() and not text[1:].islower() and not text.isupper()
    return (
        is_mixed(text) or "=" in text or len(text) >= MIN_OPAQUE_LENGTH or camel or text.isdigit()
    )


def _is_id(text: str) -> bool:
    text = text.rstrip(".")
    return (
        len(text) >= MIN_ID_LENGTH
        and text.isalnum()
        and is_mixed(text)
        and is_varied(text, mixed=False)
    )


def _has_random_part(text: str) -> bool:
    """Whether a text is random, not words joined by ``_`` or ``-``."""
    parts = re.split("[_-]", text)
    return any(
        len(part) >= MIN_ID_LENGTH or (len(part) >= MIN_MIXED_RUN_LENGTH and is_mixed(part))
        for part in parts
    )


VALUE_CHECKS: dict[str, Callable[[str], object]] = {
    "any": bool,
    "base64": re.compile("[A-Za-z0-9+/=]{16}").search,
    "digit": re.compile(r"\d").search,
    "dotted": re.compile(r"\.").search,
    "id": _is_id,
    "key": is_key,
    "literal": lambda text: not is_placeholder(text),
    "opaque": _is_opaque,
    "parts": _has_random_part,
    "run": lambda text: any(
        len(run) >= MIN_MIXED_RUN_LENGTH and is_mixed(run) for run in re.split("[^0-9A-Za-z]", text)
    ),
    "text": is_text,
    "varied": is_varied,
}
"""Checks that a shape's value may have to pass (`only` in the table)."""


def _build_pattern(row: dict[str, list[str]]) -> str:
    if "pattern" in row:
        return str(row["pattern"])
    # without `marks`, the prefixes are plain text and serve as marks themselves
    starts = row["starts"] if "marks" in row else map(re.escape, row["starts"])
    return f"{WORD_START}(?:{'|'.join(starts)})(?P<value>{row['then']})"


PATTERNS = {row["name"]: LazyPattern(_build_pattern(row)) for row in TABLE["shape"]}
SHAPES = [
    (row.get("marks") or row["starts"], row["name"], VALUE_CHECKS[row.get("only", "any")])
    for row in TABLE["shape"]
]
"""The marks of each shape, its name, and the check of its value."""


def redact_shapes(text: str) -> str:
    """Replace texts with the form of a credential."""
    for marks, name, is_secret in SHAPES:
        # almost no text contains a mark, and a substring search is much faster than the pattern
        if any(mark in text for mark in marks):
            parts, copied_until = [], 0
            for match in PATTERNS[name].finditer(text):
                if is_secret(match["value"]):
                    parts += [text[copied_until : match.start("value")], HIDDEN]
                    copied_until = match.end("value")
            text = "".join((*parts, text[copied_until:]))
    return text
