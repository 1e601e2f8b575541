"""Quoted strings in texts, also those whose quotes are escaped once or more."""

from __future__ import annotations

import re

__all__ = ["QUOTE", "end_of_quoted"]

QUOTE = r"\\{0,7}[\"'`]"
_STOPS = {mark: re.compile(f"[{mark}\n]") for mark in "\"'`"}
_LONGEST_BLOCK = 16_384


def end_of_quoted(text: str, start: int, quote: str, *, triple: bool = False) -> int:
    """Return where a string ends that began with `quote` before `start`; the line's end if it is not closed."""
    if triple:
        end = text.find(quote * 3, start, start + _LONGEST_BLOCK)
        return end if end >= 0 else min(start + _LONGEST_BLOCK, len(text))
    depth, position = len(quote) - 1, start
    while found := _STOPS[quote[-1]].search(text, position):
        at = found.start()
        if text[at] == "\n":
            return at
        slashes = _slashes_before(text, at, start)
        if slashes % 2 == 0 if depth == 0 else slashes <= depth:
            return at - slashes if depth else at
        position = at + 1
    return len(text)


def _slashes_before(text: str, at: int, start: int) -> int:
    first = at
    while first > start and text[first - 1] == "\\":
        first -= 1
    return at - first
