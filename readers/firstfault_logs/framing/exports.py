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

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.framing.lines import TRACEBACK, read_ahead, without_colors

if TYPE_CHECKING:
    from firstfault_logs.framing.lines import NumberedLine

_LINES_READ_AHEAD = 200
_MAX_LINES_REORDERED = 500_000
"""A longer log is read as it is: reordering, or parsing an array, needs all lines in memory."""
_MIN_TIMES = 4
"""A log with fewer different times doesn't show in which order its lines are."""
_MIN_SHARE = 0.9
"""Share of the first lines that shows the form of a file."""

# Begins a frame of a traceback, perhaps without its indentation.
FRAME_START = LazyPattern(r'File[ ]"[^"]+",[ ]line[ ]\d+')

MESSAGE_KEYS = (
    "message",
    "msg",
    "log",
    "text",
    "line",
    "textPayload",
    "@message",
    "body",
    "_raw",
    "event",
)
"""Names that collectors give to the text of a record, in columns and objects."""
TIME_KEYS = (
    "time",
    "timestamp",
    "ts",
    "@timestamp",
    "asctime",
)
"""Names that programs and collectors give to the time of a record."""
_PROGRAM_KEYS = (
    "rank",
    "global_rank",
    "local_rank",
    "level",
    "levelname",
    "severity",
    "exc_info",
    "exception",
    "pod",
    "pod_name",
    "host",
    "hostname",
    "node",
)
"""Keys of a program's own records, or of its place: such an object is more than a wrapped line."""


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
    everything = _label_exit_status(
        itertools.chain.from_iterable(map(_split_traceback, everything))
    )
    if is_newest_first:
        first_lines = list(itertools.islice(everything, _MAX_LINES_REORDERED))
        next_line = next(everything, None)
        if next_line is None:
            return enumerate((line for _, line in reversed(first_lines)), 1), True
        everything = itertools.chain(first_lines, [next_line], everything)
    return everything, False


# The time of a line: at its begin, or in a field.
_LINE_TIME = LazyPattern(r"""
  ^\W{0,3}(?P<begin>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*|1\d{9,12}\b)
| "(?:@?timestamp|time|ts|receiveTimestamp)":[ ]?"?
  (?P<field>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*|1\d{9,12}\b)
""")


def _is_newest_first(lines: Sequence[str]) -> bool:
    all_times = [
        match["field"] or match["begin"] for line in lines if (match := _LINE_TIME.search(line))
    ]
    times = [time for time, _ in itertools.groupby(all_times)]
    # processes that start together print the same lines in any order within a second
    if not times or _cut_to_seconds(times[0]) <= _cut_to_seconds(times[-1]):
        return False
    pairs = list(itertools.pairwise(times))
    return len(times) >= _MIN_TIMES and sum(
        later < earlier for earlier, later in pairs
    ) > _MIN_SHARE * len(pairs)


def _cut_to_seconds(time: str) -> str:
    return time[: len("2025-03-18T13:21:50")] if "-" in time else time[: len("1742304110")]


# The name of a column.
_COLUMN_NAME = LazyPattern(r"[@_\w][\w .-]{0,40}")


def _find_message_column(header: str) -> int | None:
    columns = next(csv.reader([header]), [])
    if len(columns) > 1 and all(map(_COLUMN_NAME.fullmatch, columns)):
        lowered = [column.lower() for column in columns]
        return next(
            (lowered.index(key.lower()) for key in MESSAGE_KEYS if key.lower() in lowered),
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
    first_lines = list(itertools.islice(lines, _MAX_LINES_REORDERED))
    text = "\n".join(line for _, line in first_lines)
    decoder = json.JSONDecoder()
    position = 0
    objects = []
    index, counted_to = 0, 0
    try:
        while (position := text.find("{", position)) >= 0:
            value, end = decoder.raw_decode(text, position)
            index, counted_to = index + text.count("\n", counted_to, position), position
            objects.append((first_lines[index][0], json.dumps(value)))
            position = end
    except (ValueError, RecursionError):
        objects = first_lines
    return itertools.chain(objects, lines)


def _find_wrapping_key(lines: Sequence[str]) -> str:
    """Return the key that holds the text if each line is an object with nothing but a text
    and its collector's data.
    """
    objects = [fields for line in lines if (fields := parse_object(line))]
    if len(objects) <= _MIN_SHARE * len(lines):
        return ""
    values: dict[str, set[str]] = defaultdict(set)
    for fields in objects:
        is_of_program = not fields.keys().isdisjoint(_PROGRAM_KEYS)
        if is_of_program or any(isinstance(value, dict) for value in fields.values()):
            return ""
        for key, value in fields.items():
            values[key] |= {value} if isinstance(value, str) else set()
    message_keys = [key for key in MESSAGE_KEYS if key in values]
    return max(
        message_keys or values,
        key=lambda key: len({text for text in values[key] if " " in text}),
        default="",
    )


# Begins a time in a collector's record.
_ISO_TIME = LazyPattern(r"\d{4}-\d\d-\d\d[T ]\d\d:")


def _unwrap_object(numbered: NumberedLine, key: str) -> Iterable[NumberedLine]:
    number, line = numbered
    fields = parse_object(line)
    times = (str(fields[name]) for name in TIME_KEYS if name in fields)
    stamp = next((f"{time} " for time in times if _ISO_TIME.match(time)), "")
    texts = str(fields.get(key, line)).removesuffix("\n").split("\n")
    return ((number, stamp + without_colors(text)) for text in texts)


def parse_object(text: str) -> dict[str, Any]:
    """Return the object that a line consists of, or an empty dictionary if it isn't an object."""
    if not text.startswith("{") or not text.rstrip().endswith("}"):
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _label_exit_status(lines: Iterable[NumberedLine]) -> Iterator[NumberedLine]:
    """Yield lines; the number below `echo $?` becomes "exit code 0"."""
    is_asked = False
    for number, line in lines:
        yield number, f"exit code {line.strip()}" if is_asked and line.strip().isdecimal() else line
        is_asked = "echo" in line and line.rstrip().endswith("$?")


# A line break in a record that holds several lines as one string
_ESCAPED_NEWLINE = LazyPattern(r"\\+r?\\*n")

# A tab in such a record
_ESCAPED_TAB = LazyPattern(r"\\+t")

# A quote in such a record
_ESCAPED_QUOTE = LazyPattern(r'\\+"')

# Where a line of a traceback begins if all were pasted as one.
_JOINED_LINE = LazyPattern(r"""
  [ ]+(?=File[ ]"[^"]+",[ ]line[ ]\d)
| [ ](?=(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit):[ ])
| [ ](?=[WE]\d{4}[ ]\d\d:\d\d:)
""")

# Where the source below a frame begins if all lines were pasted as one
_JOINED_SOURCE = LazyPattern(r'(File[ ]"[^"]+",[ ]line[ ]\d+,[ ]in[ ]\S+)[ ]+')

# What pytest puts before each line of an exception, and the indentation of the test.
_PYTEST_PREFIX = LazyPattern(r"^E[ ]{3}(?:[ ]{4})?")


def _split_traceback(numbered: NumberedLine) -> Iterable[NumberedLine]:
    """Return the lines of a traceback that a record holds as one string: escaped,
    or with spaces for line breaks.
    """
    number, line = numbered
    if line.startswith("E   "):
        return ((number, _PYTEST_PREFIX.sub("", line)),)
    if TRACEBACK not in line or ('{"' in line and line.rstrip().endswith("}")):
        return (numbered,)
    if "\\n" not in line:
        prefix, _, rest = line.partition(TRACEBACK)
        rest = (rest.replace(prefix, "") if prefix.strip() else rest).lstrip(": ")
        if not FRAME_START.match(rest):
            return (numbered,)
        text = _JOINED_SOURCE.sub(r"\1\n    ", _JOINED_LINE.sub("\n", rest))
        parts = (f"  {part}" if FRAME_START.match(part) else part for part in text.split("\n"))
        return ((number, prefix + part) for part in (f"{TRACEBACK}:", *parts))
    line = _ESCAPED_NEWLINE.sub("\n", line)
    line = _ESCAPED_TAB.sub("\t", line)
    line = _ESCAPED_QUOTE.sub('"', line)
    return ((number, part) for part in line.split("\n"))
