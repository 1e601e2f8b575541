"""Rule 1: credentials that are known by their form: the rows ``shape`` of ``credentials.toml``, and private keys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from firstfault.credentials.literals import (
    HIDDEN,
    is_key,
    is_mixed,
    is_placeholder,
    is_text,
    is_varied,
    table,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BEGINS_WORD = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))"
"""Also after an escaped character."""
_LONG = 20
_LONG_PART = 16
_MIXED_PART = 10


def _is_opaque(text: str) -> bool:
    text = text.rstrip(".")
    camel = text.isalpha() and not text[1:].islower() and not text.isupper()
    return is_mixed(text) or "=" in text or len(text) >= _LONG or camel or text.isdigit()


def _is_id(text: str) -> bool:
    text = text.rstrip(".")
    return len(text) >= _LONG_PART and text.isalnum() and is_mixed(text) and is_varied(text, mixed=False)


def _has_random_part(text: str) -> bool:
    """Whether a text is random, and not words with ``_`` or ``-`` between them."""
    parts = re.split("[_-]", text)
    return any(len(part) >= _LONG_PART or (len(part) >= _MIXED_PART and is_mixed(part)) for part in parts)


JUDGES: dict[str, Callable[[str], bool]] = {
    "any": bool,
    "digit": lambda text: any(map(str.isdigit, text)),
    "dotted": lambda text: "." in text,
    "id": _is_id,
    "key": is_key,
    "literal": lambda text: not is_placeholder(text),
    "opaque": _is_opaque,
    "parts": _has_random_part,
    "run": lambda text: any(len(run) >= _MIXED_PART and is_mixed(run) for run in re.split("[^0-9A-Za-z]", text)),
    "text": is_text,
    "varied": is_varied,
}
"""What the value of a shape may have to be."""


@dataclass(frozen=True, slots=True)
class _Shape:
    marks: tuple[str, ...]
    pattern: re.Pattern[str]
    only: Callable[[str], bool]

    def hidden(self, found: re.Match[str]) -> str:
        start, end = (place - found.start() for place in found.span("value"))
        return found[0][:start] + HIDDEN + found[0][end:] if self.only(found["value"]) else found[0]


def _with_prefix(row: dict[str, list[str]]) -> str:
    # without marks of its own, a prefix is a plain text
    starts = row["starts"] if "marks" in row else map(re.escape, row["starts"])
    return f"{_BEGINS_WORD}(?:{'|'.join(starts)})(?P<value>{row['then']})"


# compiled when this module is imported, and not when a process fails
_SHAPES = tuple(
    _Shape(
        tuple(row.get("marks", row.get("starts", ("",)))),
        re.compile(row.get("pattern") or _with_prefix(row), re.VERBOSE),
        JUDGES[row.get("only", "any")],
    )
    for row in table()["shape"]
)


def without_shapes(text: str) -> str:
    """Replace what has the form of a credential."""
    for shape in _SHAPES:
        if any(mark in text for mark in shape.marks):
            text = shape.pattern.sub(shape.hidden, text)
    return text


# --- private keys ---------------------------------------------------------------------------------------------------

_MARK = re.compile(r"-{4,5} ?(?P<side>BEGIN|END) [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}")
_KEY_TEXT = re.compile(r"[A-Za-z0-9+/=]{16}")
_BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
_KEY_LINE = re.compile(r"[A-Za-z0-9+/=\\]*|(?:Proc-Type|DEK-Info|Comment|Version): .*")


def without_private_keys(text: str) -> str:
    """Replace what is between the lines BEGIN and END of private keys, also if one of both was cut off."""
    if "PRIVATE KEY" not in text:
        return text
    kept, done = [], 0
    for start, end in _keys(text):
        kept += [text[done:start], HIDDEN]
        done = end
    return "".join((*kept, text[done:])) if kept else text


def _keys(text: str) -> Iterator[tuple[int, int]]:
    marks = [(mark["side"] == "BEGIN", mark.start(), mark.end()) for mark in _MARK.finditer(text)]
    borders = [(False, 0, 0), *marks, (True, len(text), len(text))]
    for (begins, _, start), (next_begins, end, _) in pairwise(borders):
        key = _key_between(text, start, end, begins=begins, ends=not next_begins)
        if _KEY_TEXT.search(text, *key):
            yield key


def _key_between(text: str, start: int, end: int, *, begins: bool, ends: bool) -> tuple[int, int]:
    """Return the place of the key between two marks; an empty one if neither belongs to it."""
    if begins and ends:
        return start, end
    if begins:
        return start, start + _length_of_key(text[start:end])
    return (end - _length_of_end(text[start:end]), end) if ends else (start, start)


def _length_of_key(text: str) -> int:
    """Return how much of the text after BEGIN belongs to the key, if there is no END."""
    length = 0
    for line in text.splitlines(keepends=True):
        if not _KEY_LINE.fullmatch(line.strip()):
            # a key on one line, with escaped newlines
            return length or len(line) - len(line.lstrip(_BASE64 + "\\ \t"))
        length += len(line)
    return length


def _length_of_end(text: str) -> int:
    """Return how much of the text before END belongs to the key, if there is no BEGIN."""
    rest = text.rstrip(_BASE64 + "\\\r\n\t")
    key = text[len(rest) :]
    # the last word of an earlier line does not belong to the key
    return len(key) if not rest else len(key) - len(re.split(r"\n|\\n", key, maxsplit=1)[0])
