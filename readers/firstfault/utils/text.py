"""Text from elsewhere, made safe to parse and show; `stored_text` makes it safe to store."""

from __future__ import annotations

import json
import re
from typing import Any


def elide(text: str, limit: int) -> str:
    """Return at most `limit` characters of `text`: both ends,
    and between them how many characters are left out.
    """
    if len(text) <= limit:
        return text
    mark = f"\n... {len(text) - limit} characters left out ...\n"
    room = max(limit - len(mark), 0)
    head = room - room // 2
    return text[:head] + mark[: limit - room] + text[len(text) - room // 2 :]


_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def printable(text: str) -> str:
    """Return `text` without control characters, escape sequences and direction marks;
    newline and tab stay.
    """
    return _UNPRINTABLE.sub("", re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", text))


_MAX_DROPPED_WORD_CHARACTERS = 16
"""Characters of a word that is left out rather than cut."""


def one_line(text: str, limit: int = 200) -> str:
    """Return the first non-empty line of `text`, at most `limit` characters;
    a longer one ends behind a word.
    """
    line = next((part.strip() for part in printable(text).splitlines() if part.strip()), "")
    if len(line) <= limit:
        return line
    room = max(limit - 3, 0)
    # the beginning of a long word, such as a path, is better than nothing
    end = line.rfind(" ", max(room - _MAX_DROPPED_WORD_CHARACTERS, room // 2), room + 1)
    return (line[: end if end > 0 else room].rstrip() + "...")[:limit]


_FLYTEKIT_CODE = re.compile(r"(?:USER|SYSTEM):\w+: error=")


def extract_sentence(message: str) -> str:
    """Return the first line of an exception's message without flytekit's prefix, "USER:X: error=".

    A line that ends with a colon announces the next one, which follows.
    """
    line = one_line(message, 2000)
    if line.endswith(":"):
        more = (part.strip() for part in message.strip().splitlines()[1:])
        line = " ".join(filter(None, (line, one_line(next(filter(None, more), ""), 2000))))
    return line[prefix.end() :] if (prefix := _FLYTEKIT_CODE.match(line)) else line


def counted(count: int, noun: str) -> str:
    """Return "1 document", "3 documents"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def size(number: float) -> str:
    """Return bytes in binary units: "15.9 GiB"."""
    power = 0
    while number >= 1024 and power < len(_SIZES) - 1:  # noqa: PLR2004 - binary units
        number /= 1024
        power += 1
    return f"{number:.{min(power, 1)}f} {_SIZES[power]}"


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it isn't JSON, or nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error


def describe_used_up(count: int, name: str) -> str:
    """Return that a budget is used up: "all 3 retries are used up", "its only retry is used up"."""
    if count == 1:
        return f"its only {name} is used up"
    several = f"{name.removesuffix('y')}ies" if name.endswith("y") else f"{name}s"
    return f"all {count} {several} are used up" if count else f"no {several} are allowed"


_NS_PER_US, _NS_PER_MS, _NS_PER_SECOND = 1_000, 1_000_000, 1_000_000_000
_NS_PER_MINUTE, _NS_PER_HOUR, _NS_PER_DAY = (
    60 * _NS_PER_SECOND,
    3600 * _NS_PER_SECOND,
    86_400 * _NS_PER_SECOND,
)
_DURATIONS = (
    (2 * _NS_PER_DAY, _NS_PER_DAY, 0, "d"),
    (2 * _NS_PER_HOUR, _NS_PER_HOUR, 0, "h"),
    (2 * _NS_PER_MINUTE, _NS_PER_MINUTE, 0, "min"),
    (10 * _NS_PER_SECOND, _NS_PER_SECOND, 0, "s"),
    (_NS_PER_SECOND, _NS_PER_SECOND, 1, "s"),
    (10 * _NS_PER_MS, _NS_PER_MS, 0, "ms"),
    (_NS_PER_MS, _NS_PER_MS, 1, "ms"),
    (0, _NS_PER_US, 0, "us"),
)
"""From how many nanoseconds on a time is shown in which unit, with how many decimals."""


def duration(nanoseconds: int, *, is_rounded_down: bool = False) -> str:
    """Return "32 ms", "1.2 s", "4 min", "3 h", "5 d"; rounded down,
    for a time that was at least so long.
    """
    long = abs(nanoseconds)
    _, unit, decimals, name = next(row for row in _DURATIONS if long >= row[0])
    if is_rounded_down:
        long -= long % (unit // 10**decimals)
    return f"{long / unit:.{decimals}f} {name}"
