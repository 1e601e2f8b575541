"""Text from elsewhere, made safe to parse, store and show: valid UTF-8, bounded, without secrets."""

from __future__ import annotations

import json
import re
from typing import Any

from firstfault.credentials import redact


def elide(text: str, limit: int) -> str:
    """Return at most `limit` characters of `text`: both ends, and between them how many characters are left out."""
    if len(text) <= limit:
        return text
    mark = f"\n... {len(text) - limit} characters left out ...\n"
    room = max(limit - len(mark), 0)
    head = room - room // 2
    return text[:head] + mark[: limit - room] + text[len(text) - room // 2 :]


def clean(text: str, limit: int) -> str:
    """Return `text` for storage: valid UTF-8 without NUL and credentials, at most `limit` characters."""
    # redact before the final cut, which may remove what identifies a credential; the first cut bounds the work
    text = _first_cut(text, 4 * limit)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "")
    return elide(redact(text), limit)


def clean_end(text: str, limit: int) -> str:
    """As `clean`, but return the end of `text`: whole lines, if the last one isn't longer than `limit`."""
    most = 4 * limit
    end = text[-most:]
    if len(text) > most and text[-most - 1] != "\n":
        end = _without_part(end, "\n")
    text = clean(end, most)
    if len(text) <= limit:
        return text
    end = text[-limit:]
    return end.partition("\n")[2] if text[-limit - 1] != "\n" and "\n" in end else end


_LONGEST_PART = 1000


def _first_cut(text: str, most: int) -> str:
    """Return both ends of a long text, without the word and the line through which the cuts go.

    Half of a credential isn't recognised, and would be shown if redaction makes the text around it short.
    """
    if len(text) <= most:
        return text
    head, tail = text[: most // 2], text[len(text) - most // 2 :]
    near_end = max(len(head) - _LONGEST_PART, 0)
    word = max(head.rfind(" ", near_end), head.rfind("\n", near_end))
    head = head[:word] if word >= 0 else head
    near = tail[:_LONGEST_PART]
    tail = _without_part(near, "\n" if "\n" in near else " ") + tail[_LONGEST_PART:]
    return f"{head}\n... {len(text) - len(head) - len(tail)} characters left out ...\n{tail}"


def _without_part(text: str, separator: str) -> str:
    """Return what follows the first separator; the text itself if nothing does."""
    return text.partition(separator)[2] or text


_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return `text` without control characters, escape sequences and direction marks; newline and tab stay."""
    return _UNPRINTABLE.sub("", re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", text))


_MAX_WORD = 16
"""Characters of a word that is left out rather than cut."""


def one_line(text: str, limit: int = 200) -> str:
    """Return the first non-empty line of `text`, at most `limit` characters; a longer one ends behind a word."""
    line = next((part.strip() for part in printable(text).splitlines() if part.strip()), "")
    if len(line) <= limit:
        return line
    room = max(limit - 3, 0)
    # of a long word, such as a path, the begin says more than nothing
    end = line.rfind(" ", max(room - _MAX_WORD, room // 2), room + 1)
    return (line[: end if end > 0 else room].rstrip() + "...")[:limit]


_FLYTEKIT_CODE = re.compile(r"(?:USER|SYSTEM):\w+: error=")


def extract_sentence(message: str) -> str:
    """Return the first line of an exception's message, without flytekit's prefix ("USER:X: error=").

    A line that ends with a colon announces the next one, which follows.
    """
    line = one_line(message, 2000)
    if line.endswith(":"):
        more = (part.strip() for part in message.strip().splitlines()[1:])
        line = " ".join(filter(None, (line, one_line(next(filter(None, more), ""), 2000))))
    return line[found.end() :] if (found := _FLYTEKIT_CODE.match(line)) else line


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


_US, _MS, _S = 1_000, 1_000_000, 1_000_000_000
_MINUTE, _HOUR, _DAY = 60 * _S, 3600 * _S, 86_400 * _S
_DURATIONS = (
    (2 * _DAY, _DAY, 0, "d"),
    (2 * _HOUR, _HOUR, 0, "h"),
    (2 * _MINUTE, _MINUTE, 0, "min"),
    (10 * _S, _S, 0, "s"),
    (_S, _S, 1, "s"),
    (10 * _MS, _MS, 0, "ms"),
    (_MS, _MS, 1, "ms"),
    (0, _US, 0, "us"),
)
"""From how many nanoseconds on a time is shown in which unit, with how many decimals."""


def duration(nanoseconds: int, *, is_rounded_down: bool = False) -> str:
    """Return "32 ms", "1.2 s", "4 min", "3 h", "5 d"; rounded down, for a time that was at least so long."""
    long = abs(nanoseconds)
    _, unit, decimals, name = next(row for row in _DURATIONS if long >= row[0])
    if is_rounded_down:
        long -= long % (unit // 10**decimals)
    return f"{long / unit:.{decimals}f} {name}"
