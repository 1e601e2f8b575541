"""Estimate how many tokens a text has, without a tokenizer,
and choose the lines for which there is room.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_PIECES = re.compile(
    r"(?P<letters>[A-Za-z]+)|(?P<digits>[0-9]+)|(?P<spaces>[ \t]+)"
    r"|(?P<rule>([-=*#_.^~])\5{3,})|(?P<other>[^A-Za-z0-9 \t])"
)
_LETTERS_PER_TOKEN, _DIGITS_PER_TOKEN, _SPACES_PER_TOKEN, _SIGNS_PER_TOKEN = 4, 2, 8, 4


def estimate_tokens(text: str) -> int:
    """Return an estimate that is rather too high.

    Four letters, two digits or one sign are a token, and so are four of a sign that is repeated. A
    space before a word belongs to the word, as in the tokenizers of language models. Characters
    outside of ASCII count as their UTF-8 bytes.
    """
    total = 0
    for piece in _PIECES.finditer(text):
        length = len(piece[0])
        kind = piece.lastgroup
        if kind == "letters":
            total += -(-length // _LETTERS_PER_TOKEN)
        elif kind == "digits":
            total += -(-length // _DIGITS_PER_TOKEN)
        elif kind == "spaces":
            total += 0 if length == 1 else -(-length // _SPACES_PER_TOKEN)
        elif kind == "rule":
            total += -(-length // _SIGNS_PER_TOKEN)
        else:
            total += len(piece[0].encode("utf-8", "backslashreplace"))
    return total


def select_lines(lines: Sequence[tuple[int, str]], tokens: int) -> list[str]:
    """Return the lines with the smallest weights that fit into a number of tokens, in their order.

    Args:
        lines: weight and text; of lines with the same weight, earlier ones come first.
        tokens: limit, with one for each line break.
    """
    chosen: set[int] = set()
    for at in sorted(range(len(lines)), key=lambda at: (lines[at][0], at)):
        cost = count_tokens([lines[at][1]])
        if cost <= tokens:
            chosen.add(at)
            tokens -= cost
    return [text for at, (_, text) in enumerate(lines) if at in chosen]


def count_tokens(lines: Iterable[str]) -> int:
    """Return the tokens of lines with their line breaks."""
    return sum(estimate_tokens(line) + 1 for line in lines)


def share_tokens(needs: Sequence[int], shares: Sequence[int], limit: int) -> list[int]:
    """Return how many tokens each part gets: its need up to its share, then what others leave over,
    first come first.

    Args:
        needs: tokens of the whole parts.
        shares: the part's own tokens; in total at most `limit`.
        limit: of all parts together.
    """
    granted = [min(need, share) for need, share in zip(needs, shares, strict=True)]
    left = limit - sum(granted)
    for at, need in enumerate(needs):
        more = min(need - granted[at], max(left, 0))
        granted[at] += more
        left -= more
    return granted
