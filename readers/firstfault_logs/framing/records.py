"""Turn the lines of a log into records: without the prefixes of launchers and collectors, and with
whole lines of tracebacks, which a launcher may break, a logger prefix, and a chat not indent.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Generator, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.framing.exports import FRAME_START, read_export
from firstfault_logs.framing.labels import (
    Label,
    LogRecord,
    Prefixes,
    get_file_label,
    learn_prefixes,
)
from firstfault_logs.framing.lines import TRACEBACK, read_ahead

if TYPE_CHECKING:
    from firstfault_logs.framing.lines import NumberedLine
    from firstfault_logs.framing.ranks import SizeMarks

_LINES_READ_AHEAD = 1000
"""Lines from which prefixes are learned."""
_MAX_COMMANDS = 100
"""Shell commands in one file that may start another job; later ones are ordinary lines."""
_MAX_JOINED_CHARS = 1000
_MAX_LABELS = 20_000
"""Maximum number of processes for which the beginning of a traceback is kept."""
_HEADER = f"{TRACEBACK}:"

# Printed by tail and head before the lines of each file.
_FILE_HEADER = LazyPattern(r"==>[ ](?P<path>\S+)[ ]<==\s*$")

# A prompt of a shell and a command that starts a job
SHELL_COMMAND = LazyPattern(r"""
^(?:\([\w.-]+\)[ ])?
(?:[\w.-]+@[\w.-]+[:~ ][^$\n]{0,80})?
\$[ ](?:\w+=\S+[ ])*
(?:
  \./\S
| \S*python[\d.]*[ ]
| torchrun[ ] | srun[ ] | sbatch[ ] | accelerate[ ] | deepspeed[ ] | mpirun[ ] | mpiexec[ ] | horovodrun[ ]
| bash[ ] | sh[ ] | nohup[ ] | make[ ]
| ray[ ]job[ ]submit[ ]
| firstfault[ ]torchrun[ ]
)
""")


class RecordReader:
    """Turns the lines of a job's files into records: without prefixes, with whole lines of
    tracebacks.

    Args:
        size: takes the names in labels that may be none of machines.
        cuts_prefixes: whether a logger's prefix is cut from each line of a traceback.
    """

    def __init__(self, size: SizeMarks, *, cuts_prefixes: bool) -> None:
        self.line_count = 0
        self.notes: list[str] = []
        """What is special about files."""
        self._size = size
        self._header_labels: dict[str, Label] = {}
        """By file, the label in its last header."""
        self._broken_lines = BrokenLines()
        self._tracebacks = TracebackLines(cuts_prefixes=cuts_prefixes)

    def read(self, lines: Iterable[NumberedLine], file: str, label: Label) -> Iterator[LogRecord]:
        """Yield the records of one file.

        Args:
            lines: of the file.
            file: its name, for references.
            label: who wrote it, according to its name.
        """
        lines, is_reversed = read_export(lines)
        if is_reversed:
            self.notes.append(f"{file} has its newest line first; lines are numbered from its end")
        self._size.vague_names.add(label.node)
        if label.node_index is not None:
            self._size.files_of_nodes.add(label.node)
        for commands_left in range(_MAX_COMMANDS, -1, -1):
            pending, lines = read_ahead(lines, _LINES_READ_AHEAD)
            if not pending:
                return
            # each command may put other prefixes before its lines
            is_command = SHELL_COMMAND.match
            later_commands = (
                index for index, (_, line) in enumerate(pending) if index and is_command(line)
            )
            prefixes = learn_prefixes([line for _, line in pending[: next(later_commands, None)]])
            lines = yield from self._read_command(
                lines,
                file,
                label,
                prefixes,
                is_last=commands_left == 0,
            )
            self._size.vague_names.update(
                *(parser.learned_names for parser in (prefixes, prefixes.inner) if parser)
            )

    def _read_command(
        self,
        lines: Iterator[NumberedLine],
        file: str,
        label: Label,
        prefixes: Prefixes,
        *,
        is_last: bool,
    ) -> Generator[LogRecord, None, Iterator[NumberedLine]]:
        """Yield records up to the next shell command; return that command and all lines below."""
        for index, (number, line) in enumerate(lines):
            self.line_count += 1
            if not is_last and "$" in line[:100] and SHELL_COMMAND.match(line):
                if index:
                    return itertools.chain([(number, line)], lines)
                yield self._tracebacks.restore(LogRecord(number, line, label, None))
                continue
            if line.startswith("==> ") and (header := _FILE_HEADER.match(line)):
                self._header_labels[file] = get_file_label(header["path"])
                self._size.vague_names.add(self._header_labels[file].node)
                continue
            for record in prefixes.parse(number, line, self._header_labels.get(file, label)):
                yield from map(self._tracebacks.restore, self._broken_lines.join(record))
        yield from map(self._tracebacks.restore, self._broken_lines.flush())
        return iter(())


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


@cache
def _glog_prefix() -> re.Pattern[str]:
    """Match what native code and absl put before an error: level, date, time, thread,
    place in the code.
    """
    return re.compile(r"[EF]\d{4} \d\d:\d\d:\d\d\.\d{1,9} +\d{1,20} [\w./<>-]{1,200}:\d{1,7}\] ")


# A line of a traceback that isn't indented.
_UNINDENTED_LINE = LazyPattern(r"[\w.]*[A-Z]\w*(?::|$)|Traceback[ ]|The[ ]above|During[ ]handling")


class TracebackLines:
    """Restores the lines of tracebacks: without a logger's prefix if each of them has it, and not
    only the first one, and with the indentation of frames, which chats and web pages drop.
    """

    def __init__(self, *, cuts_prefixes: bool) -> None:
        self._cuts_prefixes = cuts_prefixes
        self._prefixes: dict[Label, str] = {}
        """Prefix of the last traceback by label. All lines of one record have the same time."""
        self._labels_in_frame: set[Label] = set()

    def restore(self, record: LogRecord) -> LogRecord:
        """Return a line of a traceback as Python printed it."""
        text = self._cut_prefix(record.label, record.text) if self._cuts_prefixes else record.text
        text = self._indent(record.label, text)
        return record if text == record.text else record._replace(text=text)

    def _cut_prefix(self, label: Label, text: str) -> str:
        """Return a line without the prefix that the first line of its traceback has."""
        prefix = self._prefixes.get(label)
        if TRACEBACK in text and (glog_prefix := _glog_prefix().match(text)):
            if text != f"{prefix}{_HEADER}" and len(self._prefixes) < _MAX_LABELS:
                self._prefixes[label] = glog_prefix[0]
                return text
        elif prefix is None:
            return text
        return text.removeprefix(prefix or "")

    def _indent(self, label: Label, text: str) -> str:
        """Return a line of a traceback with its indentation."""
        if 'File "' in text[:12] and FRAME_START.match(text.lstrip()):
            text = text.replace("\\", "/")  # of Windows
            if text.startswith('File "'):
                self._labels_in_frame.add(label)
                return f"  {text}"
        if label in self._labels_in_frame:
            self._labels_in_frame.discard(label)
            if text[:1].strip() and not _UNINDENTED_LINE.match(text):
                return f"    {text}"
        return text
