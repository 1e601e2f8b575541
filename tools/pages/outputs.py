"""Compares a shown output with a printed one, by the words that are the same in each run."""

from __future__ import annotations

_COMPARED_WORDS = 5
"""A longer line may be cut or wrapped at another word."""


def find_missing_line(shown: str, printed: str) -> str | None:
    """Return the first line of `shown` that `printed` lacks in this place; None: it has all.

    Words with a digit, a slash or a bracket don't count: they depend on the machine or the run.
    Neither do lines that continue another one, which are indented far: the terminal's width decides
    where they begin.
    """
    lines = iter(printed.splitlines())
    for line in shown.splitlines():
        words = _constant_words(line)
        if not words or line.startswith(" " * 8):
            continue
        if not any(_constant_words(other)[: len(words)] == words for other in lines):
            return line
    return None


def _constant_words(line: str) -> list[str]:
    return [word for word in line.split() if _is_constant(word)][:_COMPARED_WORDS]


def _is_constant(word: str) -> bool:
    return word.isascii() and not any(sign.isdigit() or sign in "/[]" for sign in word)
