"""Find lines that differ only in numbers, and shorten tracebacks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

_MAX_TEMPLATE_CHARS = 200
_MAX_VALUES, _MAX_DIFFERENCES = 3, 3


_VARIABLE_WORD = re.compile(r"[A-Za-z0-9_]*\d[A-Za-z0-9_]*")
"""A number, an address, a hash, a host or a temporary name: what varies between ranks,
steps and runs.
"""
_VARIABLE_WORDS = re.compile(r"#(?:[^A-Za-z#]{0,4}#)+")
"""Several of them, such as a time or a list of numbers."""


def make_template(text: str) -> str:
    """Return a line with ``#`` for words with digits, so that similar lines become equal."""
    words = _VARIABLE_WORD.sub("#", text[: 2 * _MAX_TEMPLATE_CHARS].strip())
    return _VARIABLE_WORDS.sub("#", words)[:_MAX_TEMPLATE_CHARS]


_NAME_OF_VALUE = re.compile(r"([A-Za-z_]{3,})[ =:\"'(\[]{1,3}$")
"""The word before a value, which is its name; times and parts of numbers have none."""


def describe_differences(texts: Sequence[str]) -> str:
    """Return the differences between similar lines, "NumelIn 1 (x5), 512 (x3)", or an empty string
    if the lines are equal or have too many different values.

    If ranks print different sizes, the difference is likely to be the mismatch.
    """
    variable_words = [
        list(_VARIABLE_WORD.finditer(text[: 2 * _MAX_TEMPLATE_CHARS])) for text in texts
    ]
    if len({len(words) for words in variable_words}) != 1:
        return ""
    parts = []
    for words in zip(*variable_words, strict=True):
        counts = Counter(word[0] for word in words)
        # a value of each line, as a rank, is in its prefix; many values are measurements
        if 1 < len(counts) <= _MAX_VALUES and (
            len(counts) < len(texts) or len(texts) <= _MAX_VALUES
        ):
            text = words[0].string[: words[0].start()]
            if (before := _NAME_OF_VALUE.search(text)) is not None:
                values = ", ".join(
                    f"{value} (x{count})" if count > 1 else value for value, count in counts.items()
                )
                parts.append(f"{before[1]} {values}")
    return "; ".join(parts[:_MAX_DIFFERENCES])


_LIBRARY_FRAME = re.compile(
    r'^\s*File ".*(?:/site-packages/|/dist-packages/|/lib/python3|<frozen |torchinductor)'
)
"""A frame of a library or of generated code, rather than of the program."""
_FRAME = re.compile(r'^\s*File "')
_MARKS = re.compile(r"^[\s^~]+$")
"""The line in which Python marks a part of the line above."""


def drop_library_frames(lines: Sequence[str], max_lines: int) -> list[int]:
    """Return the indices of a traceback's lines to keep: without marks; if it's long,
    without libraries' frames.

    The innermost frame stays, because it raised.

    Args:
        lines: of the traceback.
        max_lines: with more lines it's long.
    """
    kept = [at for at, line in enumerate(lines) if not line.strip() or not _MARKS.match(line)]
    if len(kept) <= max_lines:
        return kept
    frames = [at for at in kept if _FRAME.match(lines[at])]
    return list(_without_library_code(lines, kept, frames[-1] if frames else -1))


def _without_library_code(
    lines: Sequence[str], kept: Sequence[int], innermost: int
) -> Iterator[int]:
    within = False
    for at in kept:
        line = lines[at]
        if _FRAME.match(line):
            within = at != innermost and _LIBRARY_FRAME.match(line) is not None
        elif not line[:1].isspace():
            within = False
        if not within:
            yield at
