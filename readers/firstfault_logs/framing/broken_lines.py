"""Put together the lines of tracebacks that a logger prefixes one by one,
or that a launcher breaks in the middle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from firstfault_logs.framing.lines import TRACEBACK

if TYPE_CHECKING:
    from firstfault_logs.framing.labels import Label, LogRecord

_MAX_JOINED_CHARS = 1000
_MAX_LABELS = 20_000
"""Maximum number of processes for which the beginning of a traceback is kept."""
_HEADER = f"{TRACEBACK}:"


@cache
def _glog_prefix() -> re.Pattern[str]:
    """Match what native code and absl put before an error: level, date, time, thread,
    place in the code.
    """
    return re.compile(r"[EF]\d{4} \d\d:\d\d:\d\d\.\d{1,9} +\d{1,20} [\w./<>-]{1,200}:\d{1,7}\] ")


@cache
def _frame() -> re.Pattern[str]:
    return re.compile(r'\s+File "[^"\n]+", line \d+, in \S')


@cache
def _begin_of_frame() -> re.Pattern[str]:
    """Match a frame that is cut inside its file's name, or behind it and before its function."""
    return re.compile(r'\s+File "[^"\n]*$|\s+File "[^"\n]+"(?P<rest>[^"\n]{0,20})$')


@cache
def _rest_of_frame() -> re.Pattern[str]:
    """Match the end of a frame that is cut before its function."""
    return re.compile(r"(?:,(?: (?:line?|lin?|l)?)?|, line(?: \d*,?)?|, line \d+, (?:in? ?)?)?$")


@cache
def _label_in_file() -> re.Pattern[str]:
    return re.compile(r"(?<=[^\s\d])(\d{1,5}): ")


@cache
def _begin_of_exception() -> re.Pattern[str]:
    """Match a name that may be the begin of an exception's, perhaps with the colon."""
    return re.compile(r"[A-Za-z_][\w.]*:? ?$")


@cache
def _exception() -> re.Pattern[str]:
    return re.compile(
        r"(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Timeout|Exit)(?:: \S|$)"
    )


class PrefixedTracebacks:
    """Cuts a logger's prefix from the lines of a traceback if each of them has it,
    and not only the first one.
    """

    def __init__(self) -> None:
        self._prefixes: dict[Label, str] = {}
        """Prefix of the last traceback by label. All lines of one record have the same time."""

    def cut(self, label: Label, text: str) -> str:
        """Return a line without the prefix that the first line of its traceback has."""
        prefix = self._prefixes.get(label)
        if TRACEBACK in text and (glog_prefix := _glog_prefix().match(text)):
            if text != f"{prefix}{_HEADER}" and len(self._prefixes) < _MAX_LABELS:
                self._prefixes[label] = glog_prefix[0]
                return text
        elif prefix is None:
            return text
        return text.removeprefix(prefix or "")


class BrokenLines:
    """Joins lines of tracebacks that srun broke: with labels,
    it ends each piece that a process writes as a line.
    """

    def __init__(self) -> None:
        self._pieces: dict[Label, LogRecord] = {}
        """By label, the begin of a line."""
        self._tasks: set[int] = set()
        self._in_traceback: set[Label] = set()
        """Labels with a last whole line that was a frame or the source below it."""

    def join(self, record: LogRecord) -> Iterator[LogRecord]:
        """Yield whole lines; the begin of a line is kept until the next one of its label."""
        if record.label.task is None:
            yield record
            return
        if len(self._tasks) < _MAX_LABELS:
            self._tasks.add(record.label.task)
        label = record.label
        piece = self._pieces.pop(record.label, None)
        if label in self._in_traceback and (cut := self._find_other_task(record.text)):
            other = record._replace(
                text=record.text[cut.end() :], label=label._replace(task=int(cut[1]))
            )
            record = record._replace(text=record.text[: cut.start()])
            yield from self.join(other)
        if piece is not None:
            joined = piece.text + record.text
            if len(joined) < _MAX_JOINED_CHARS and (
                self._is_begin(label, joined) or self._is_whole(joined)
            ):
                record = piece._replace(text=joined)
            else:
                yield piece
        if self._is_begin(label, record.text):
            self._pieces[label] = record
            return
        if record.text[:1].isspace() or TRACEBACK in record.text:
            self._in_traceback.add(label)
        else:
            self._in_traceback.discard(label)
        yield record

    def flush(self) -> Iterator[LogRecord]:
        """Yield the begins of lines at the end of a log."""
        yield from self._pieces.values()
        self._pieces.clear()

    def _find_other_task(self, text: str) -> re.Match[str] | None:
        """Return the label of another task inside the name of a frame's file."""
        labels = _label_in_file().finditer(text) if _begin_of_frame().match(text) else ()
        return next((label for label in labels if int(label[1]) in self._tasks), None)

    def _is_begin(self, label: Label, text: str) -> bool:
        if text.startswith("Traceback"):
            return len(text.rstrip("\n")) < len(_HEADER) and _HEADER.startswith(text)
        if label not in self._in_traceback:
            return False
        if not text[:1].isspace():
            return _begin_of_exception().match(text) is not None
        frame = _begin_of_frame().match(text)
        return frame is not None and _rest_of_frame().match(frame["rest"] or "") is not None

    @staticmethod
    def _is_whole(text: str) -> bool:
        return text == _HEADER or any(form.match(text) for form in (_frame(), _exception()))
