"""Turn exports of log collectors back into the lines that the programs printed.

Collectors export a table (CSV), one JSON array, or the newest line first; chats and web pages drop
indentation.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from firstfault_logs.framing.lines import TRACEBACK, read_ahead, without_colors
from firstfault_logs.vocabulary import PATTERNS, WORDS

if TYPE_CHECKING:
    from firstfault_logs.framing.lines import NumberedLine

_LINES_READ_AHEAD = 200
_MAX_LINES_REORDERED = 500_000
"""A longer log is read as it is: reordering, or parsing an array, needs all lines in memory."""
_MIN_TIMES = 4
"""A log with fewer different times doesn't show in which order its lines are."""
_MIN_SHARE = 0.9
"""Share of the first lines that shows the form of a file."""


def read_export(lines: Iterable[NumberedLine]) -> tuple[Iterator[NumberedLine], bool]:
    """Return the lines that programs printed, oldest first,
    and whether the file had the newest line first.

    The lines of a file with the newest line first are numbered from its end.
    """
    first, everything = read_ahead(lines, _LINES_READ_AHEAD)
    head = [line for _, line in first if line.strip()]
    is_newest_first = _is_newest_first(head[1:])
    if head and (message_column := _find_message_column(head[0])) is not None:
        everything = _unwrap_csv(everything, message_column)
    elif head and head[0].strip() in {"[", "[{"}:
        everything = _unwrap_array(everything)
    elif key := _find_wrapping_key(head):
        everything = itertools.chain.from_iterable(
            _unwrap_object(numbered, key) for numbered in everything
        )
    everything = _join_exit_status(itertools.chain.from_iterable(map(_unescape, everything)))
    if is_newest_first:
        kept = list(itertools.islice(everything, _MAX_LINES_REORDERED))
        rest = next(everything, None)
        if rest is None:
            return enumerate((line for _, line in reversed(kept)), 1), True
        everything = itertools.chain(kept, [rest], everything)
    return everything, False


def _is_newest_first(lines: Sequence[str]) -> bool:
    found = [
        match["field"] or match["begin"]
        for line in lines
        if (match := PATTERNS["time_of_line"].search(line))
    ]
    times = [time for time, _ in itertools.groupby(found)]
    # processes that start together print the same lines in any order within a second
    if not times or _cut_to_seconds(times[0]) <= _cut_to_seconds(times[-1]):
        return False
    pairs = list(itertools.pairwise(times))
    return len(times) >= _MIN_TIMES and sum(
        later < earlier for earlier, later in pairs
    ) > _MIN_SHARE * len(pairs)


def _cut_to_seconds(time: str) -> str:
    return time[: len("2025-03-18T13:21:50")] if "-" in time else time[: len("1742304110")]


def _find_message_column(header: str) -> int | None:
    columns = next(csv.reader([header]), [])
    if len(columns) > 1 and all(map(PATTERNS["column"].fullmatch, columns)):
        lowered = [column.lower() for column in columns]
        return next(
            (lowered.index(key.lower()) for key in WORDS["message_keys"] if key.lower() in lowered),
            None,
        )
    return None


def _unwrap_csv(lines: Iterable[NumberedLine], message_column: int) -> Iterator[NumberedLine]:
    """Yield the texts of a column, with the number of the last line of each row:
    a quoted text may have several.
    """
    numbers: list[int] = []

    def texts() -> Iterator[str]:
        for number, line in lines:
            numbers[:] = [number]
            yield f"{line}\n"

    rows = csv.reader(texts())
    next(rows, None)
    for row in rows:
        if len(row) > message_column:
            yield from ((numbers[0], line) for line in row[message_column].split("\n"))


def _unwrap_array(lines: Iterator[NumberedLine]) -> Iterator[NumberedLine]:
    """Yield each object of a JSON array as a line; if it's none, or too long,
    the lines as they are.
    """
    kept = list(itertools.islice(lines, _MAX_LINES_REORDERED))
    text = "\n".join(line for _, line in kept)
    decoder = json.JSONDecoder()
    at = 0
    found = []
    index, counted_to = 0, 0
    try:
        while (at := text.find("{", at)) >= 0:
            value, end = decoder.raw_decode(text, at)
            index, counted_to = index + text.count("\n", counted_to, at), at
            found.append((kept[index][0], json.dumps(value)))
            at = end
    except (ValueError, RecursionError):
        found = kept
    return itertools.chain(found, lines)


def _find_wrapping_key(lines: Sequence[str]) -> str:
    """Return the key that holds the text if each line is an object with nothing but a text
    and its collector's data.
    """
    objects = [fields for line in lines if (fields := parse_object(line))]
    if len(objects) <= _MIN_SHARE * len(lines):
        return ""
    values: dict[str, set[str]] = defaultdict(set)
    for fields in objects:
        is_of_program = not fields.keys().isdisjoint(WORDS["program_keys"])
        if is_of_program or any(isinstance(value, dict) for value in fields.values()):
            return ""
        for key, value in fields.items():
            values[key] |= {value} if isinstance(value, str) else set()
    known = [key for key in WORDS["message_keys"] if key in values]
    return max(
        known or values,
        key=lambda key: len({text for text in values[key] if " " in text}),
        default="",
    )


def _unwrap_object(numbered: NumberedLine, key: str) -> Iterable[NumberedLine]:
    number, line = numbered
    fields = parse_object(line)
    times = (str(fields[name]) for name in WORDS["time_keys"] if name in fields)
    stamp = next((f"{time} " for time in times if PATTERNS["iso_time"].match(time)), "")
    texts = str(fields.get(key, line)).removesuffix("\n").split("\n")
    return ((number, stamp + without_colors(text)) for text in texts)


def parse_object(text: str) -> dict[str, Any]:
    """Return the object that a line consists of; empty: it's none."""
    if not text.startswith("{") or not text.rstrip().endswith("}"):
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _join_exit_status(lines: Iterable[NumberedLine]) -> Iterator[NumberedLine]:
    """Yield lines; the number below `echo $?` becomes "exit code 0"."""
    is_asked = False
    for number, line in lines:
        yield number, f"exit code {line.strip()}" if is_asked and line.strip().isdecimal() else line
        is_asked = "echo" in line and line.rstrip().endswith("$?")


def _unescape(numbered: NumberedLine) -> Iterable[NumberedLine]:
    """Return the lines of a traceback that a record holds as one string: escaped,
    or with spaces for line breaks.
    """
    number, line = numbered
    if line.startswith("E   "):
        return ((number, PATTERNS["pytest_prefix"].sub("", line)),)
    if TRACEBACK not in line or ('{"' in line and line.rstrip().endswith("}")):
        return (numbered,)
    if "\\n" not in line:
        prefix, _, rest = line.partition(TRACEBACK)
        rest = (rest.replace(prefix, "") if prefix.strip() else rest).lstrip(": ")
        if not PATTERNS["frame_start"].match(rest):
            return (numbered,)
        text = PATTERNS["joined_source"].sub(r"\1\n    ", PATTERNS["joined_line"].sub("\n", rest))
        parts = (
            f"  {part}" if PATTERNS["frame_start"].match(part) else part
            for part in text.split("\n")
        )
        return ((number, prefix + part) for part in (f"{TRACEBACK}:", *parts))
    for name, character in {
        "escaped_newline": "\n",
        "escaped_tab": "\t",
        "escaped_quote": '"',
    }.items():
        line = PATTERNS[name].sub(character, line)
    return ((number, part) for part in line.split("\n"))


class FrameIndenter:
    """Restores the indentation of a traceback's frames, which chats and web pages drop."""

    def __init__(self) -> None:
        self._labels_in_frame: set[object] = set()

    def indent(self, label: object, text: str) -> str:
        """Return a line of a traceback as Python printed it."""
        if 'File "' in text[:12] and PATTERNS["frame_start"].match(text.lstrip()):
            text = text.replace("\\", "/")  # of Windows
            if text.startswith('File "'):
                self._labels_in_frame.add(label)
                return f"  {text}"
        if label in self._labels_in_frame:
            self._labels_in_frame.discard(label)
            if text[:1].strip() and not PATTERNS["unindented_line"].match(text):
                return f"    {text}"
        return text
