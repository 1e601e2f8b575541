"""Find lines that differ only in numbers, and shorten tracebacks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache

_MAX_TEMPLATE_CHARS = 200


@cache
def _variable_parts() -> re.Pattern[str]:
    """Match numbers, times, addresses, hashes and temporary names: what varies between ranks, steps and runs."""
    return re.compile(r"0x[0-9a-fA-F]+|\b(?=[a-f]*\d)[0-9a-f]{7,}(?:-[0-9a-f]{4,})*\b|[-+]?\d+(?:[.:,/-]\d+)*(?:[eE][-+]?\d+)?")


def make_template(text: str) -> str:
    """Return a line with ``#`` for each number, address or hash; equal for lines that tell the same."""
    return _variable_parts().sub("#", text[: 2 * _MAX_TEMPLATE_CHARS].strip())[:_MAX_TEMPLATE_CHARS]


_LIBRARY_FRAME = re.compile(r'^\s*File ".*(?:/site-packages/|/dist-packages/|/lib/python3|<frozen |torchinductor)')
"""A frame of a library or of generated code, rather than of the program."""
_FRAME = re.compile(r'^\s*File "')
_MARKS = re.compile(r"^[\s^~]+$")
"""The line in which Python marks a part of the line above."""


def drop_library_frames(lines: Sequence[str], most: int) -> list[int]:
    """Return the indices of a traceback's lines to keep: without marks; if it's long, without libraries' frames.

    The innermost frame stays, because it raised.

    Args:
        lines: of the traceback.
        most: lines from which on it's long.
    """
    kept = [at for at, line in enumerate(lines) if not line.strip() or not _MARKS.match(line)]
    if len(kept) <= most:
        return kept
    frames = [at for at in kept if _FRAME.match(lines[at])]
    return list(_without_library_code(lines, kept, frames[-1] if frames else -1))


def _without_library_code(lines: Sequence[str], kept: Sequence[int], innermost: int) -> Iterator[int]:
    within = False
    for at in kept:
        line = lines[at]
        if _FRAME.match(line):
            within = at != innermost and _LIBRARY_FRAME.match(line) is not None
        elif not line[:1].isspace():
            within = False
        if not within:
            yield at
