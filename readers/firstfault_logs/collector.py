"""Collect the records of a job's logs by label, and split them into attempts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.attempt_logs import Attempt, Stream
from firstfault_logs.attempts import AGENT_LOG_LINE, AttemptIndex, AttemptMarks, find_progress
from firstfault_logs.boxes import Boxes
from firstfault_logs.framing.broken_lines import BrokenLines, PrefixedTracebacks
from firstfault_logs.framing.exports import FrameIndenter, read_export
from firstfault_logs.framing.inline_labels import add_inline_label
from firstfault_logs.framing.job_statements import JobStatements
from firstfault_logs.framing.labels import (
    Label,
    LogRecord,
    Prefixes,
    get_file_label,
    learn_prefixes,
)
from firstfault_logs.framing.lines import read_ahead
from firstfault_logs.framing.separate_jobs import TimeSpan

if TYPE_CHECKING:
    from firstfault_logs.attempts import Where
    from firstfault_logs.framing.lines import NumberedLine

_LINES_READ_AHEAD = 1000
"""Lines from which prefixes are learned."""
_TAIL_CHARS = 32 * 1024
"""Characters of the end of what each label printed."""
_SMALL_TAIL_CHARS = 4 * 1024
_MAX_STREAMS_WITH_LONG_TAILS = 512
"""With more labels than this, less of each is kept."""
_MAX_STREAMS = 20_000
"""Labels of one attempt; further ones are merged."""
_MAX_OPENING_LINES = 20
"""First lines of each file, apart from long ones."""
_MAX_OPENING_CHARS = 400
_MAX_COMMANDS = 100
"""Shell commands in one file that may start another job; later ones are ordinary lines."""


# Printed by tail and head before the lines of each file.
_FILE_HEADER = LazyPattern(r"==>[ ](?P<path>\S+)[ ]<==\s*$")

# A prompt of a shell and a command that starts a job
_SHELL_COMMAND = LazyPattern(r"""
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

# What only a job under torchrun prints.
_TORCHRUN_OUTPUT = LazyPattern(r"""
  torch/distributed/(?:elastic/(?!multiprocessing/errors)|launcher|run)
| torch\.distributed\.(?:elastic|run|launcher)
| \bChildFailedError\b
| \btorchrun\b
""")


class LogCollector:
    """Sorts the lines of a job's logs."""

    reads_all = False
    """Whether it needs the lines of blocks without a failure, too."""

    def __init__(self) -> None:
        self.line_count = 0
        self.notes: list[str] = []
        self.first_texts: dict[str, str] = {}
        """By file, its first line that isn't empty."""
        self._first_times: dict[str, int] = {}
        self._last_times: dict[str, int] = {}
        """By file, the times of the first and the last line that has one."""
        self._header_labels: dict[str, Label] = {}
        """By file, the label in its last header."""
        self._indenter = FrameIndenter()
        self._prefixed_tracebacks = PrefixedTracebacks()
        self._broken_lines = BrokenLines()
        self._all = Attempt()
        self._job_starts: dict[str, list[int]] = defaultdict(list)
        """Lines in which a shell shows the command that starts a job."""
        self._marks_by_node: dict[Where, AttemptMarks] = {}
        self._boxes: dict[Where, Boxes] = {}
        self._statements = JobStatements(self._all)

    def read(self, lines: Iterable[NumberedLine], file: str, label: Label) -> None:
        """Take all lines of one file.

        Args:
            lines: of the file.
            file: its name, for references.
            label: who wrote it, according to its name.
        """
        lines, is_reversed = read_export(lines)
        if is_reversed:
            self.notes.append(f"{file} has its newest line first; lines are numbered from its end")
        pending, remaining_lines = read_ahead(lines, _LINES_READ_AHEAD)
        self._all.size.vague_names.add(label.node)
        if label.node_index is not None:
            self._all.size.files_of_nodes.add(label.node)
        for commands_left in range(_MAX_COMMANDS, -1, -1):
            # each command may put other prefixes before its lines
            is_command = _SHELL_COMMAND.match
            later_commands = (
                index for index, (_, line) in enumerate(pending) if index and is_command(line)
            )
            prefixes = learn_prefixes([line for _, line in pending[: next(later_commands, None)]])
            remaining_lines = self._read_command(
                remaining_lines,
                file,
                label,
                prefixes,
                is_last=commands_left == 0,
            )
            self._all.size.vague_names.update(
                *(parser.learned_names for parser in (prefixes, prefixes.inner) if parser)
            )
            pending, remaining_lines = read_ahead(remaining_lines, _LINES_READ_AHEAD)
            if not pending:
                return

    def _read_command(
        self,
        lines: Iterator[NumberedLine],
        file: str,
        label: Label,
        prefixes: Prefixes,
        *,
        is_last: bool,
    ) -> Iterator[NumberedLine]:
        """Take the lines up to the next shell command; return that command and all lines below."""
        for index, (number, line) in enumerate(lines):
            self.line_count += 1
            if not is_last and "$" in line[:100] and _SHELL_COMMAND.match(line):
                if index:
                    return itertools.chain([(number, line)], lines)
                self._take(file, LogRecord(number, line, label, None))
                continue
            if line.startswith("==> ") and (header := _FILE_HEADER.match(line)):
                self._header_labels[file] = get_file_label(header["path"])
                self._all.size.vague_names.add(self._header_labels[file].node)
                continue
            for record in prefixes.parse(number, line, self._header_labels.get(file, label)):
                for whole in self._broken_lines.join(record):
                    self._take(file, whole)
        for record in self._broken_lines.flush():
            self._take(file, record)
        return iter(())

    def find_training_times(self) -> dict[str, TimeSpan]:
        """Return when the files with steps of a training were written,
        as far as their lines have times.
        """
        training_files = {
            stream.file for stream in self._all.streams.values() if stream.progress is not None
        }
        return {
            file: TimeSpan(first_time, self._last_times[file])
            for file, first_time in self._first_times.items()
            if file in training_files
        }

    def find_last_texts(self) -> Iterator[str]:
        """Yield the last line of each file."""
        last: dict[str, LogRecord] = {}
        for stream in self._all.streams.values():
            if stream.tail and (
                stream.file not in last or stream.tail[-1].number > last[stream.file].number
            ):
                last[stream.file] = stream.tail[-1]
        return (record.text for record in last.values())

    def attempts(
        self, find_tails_of_previous: Callable[[Sequence[Attempt]], list[int]]
    ) -> list[Attempt]:
        """Return the attempts in the logs, in order.

        Args:
            find_tails_of_previous: returns the indices of attempts that are only the end of the
                previous attempt.
        """
        everything = self._all
        everything.entries = [
            (*place, entry) for place, boxes in self._boxes.items() for entry in boxes.entries
        ]
        index = AttemptIndex(self._marks_by_node)
        attempts = self._split(index)
        # dropping starts shifts the numbers of later ones, so each pass drops only those that it
        # has looked at
        while (tails := find_tails_of_previous(attempts)) and index.drop_job_starts(tails):
            index = AttemptIndex(self._marks_by_node)
            attempts = self._split(index)
        return attempts

    def _split(self, index: AttemptIndex) -> list[Attempt]:
        everything = self._all
        if index.count == 1:
            return [everything]
        attempts = [
            replace(everything, streams={}, reports=[], entries=[]) for _ in range(index.count)
        ]
        for key, stream in everything.streams.items():
            for attempt_number, part in stream.split_by_attempt(index).items():
                attempts[attempt_number].streams[key] = part
        for file, node, report in everything.reports:
            attempts[index.find_attempt((file, node), report.number)].reports.append(
                (file, node, report)
            )
        for file, node, entry in everything.entries:
            attempts[index.find_attempt((file, node), entry.number)].entries.append(
                (file, node, entry)
            )
        return attempts

    def _take(self, file: str, record: LogRecord) -> None:
        text = self._prefixed_tracebacks.cut(record.label, record.text)
        record = record._replace(text=self._indenter.indent(record.label, text))
        text, label, everything = record.text, record.label, self._all
        where = (file, label.node or ("" if label.task is None else f"task {label.task}"))
        marks = self._marks_by_node.get((file, label.node))
        if marks is None:
            marks = self._marks_by_node[file, label.node] = AttemptMarks(self._job_starts[file])
        if "$" in text[:100] and _SHELL_COMMAND.match(text):
            self._start_job(file, record.number)
        boxes = self._boxes.get(where) or self._boxes.setdefault(where, Boxes())
        is_boxed = boxes.take(record.number, text)
        if is_boxed or (
            ("torch" in text or "ChildFailed" in text) and _TORCHRUN_OUTPUT.search(text)
        ):
            everything.is_torchrun = True
            everything.tasks_are_nodes |= label.task is not None
        if boxes.ended:
            marks.take_report_box(record.number, boxes.first_rank)
            boxes.ended = False
        if is_boxed or not text.strip():
            return
        self._note_opening_and_time(file, record)
        progress = find_progress(record)
        is_report = self._statements.take(record, where, marks)
        if not is_report:
            marks.take(record, progress)
        label = add_inline_label(label, text)
        everything.tasks_are_nodes |= label.task is not None and label.rank not in {
            None,
            label.task,
        }
        if len(everything.streams) >= _MAX_STREAMS:
            label = Label(node=label.node)
        key = ((file, record.label.node), label)
        stream = everything.streams.get(key) or everything.streams.setdefault(key, Stream(*key))
        if is_report or AGENT_LOG_LINE.match(text):
            stream.end_excerpt()
        if not is_report:
            stream.take(
                record,
                _TAIL_CHARS
                if len(everything.streams) < _MAX_STREAMS_WITH_LONG_TAILS
                else _SMALL_TAIL_CHARS,
                progress,
            )

    def _note_opening_and_time(self, file: str, record: LogRecord) -> None:
        self.first_texts.setdefault(file, record.text)
        opening = self._all.openings.setdefault(file, [])
        if len(opening) < _MAX_OPENING_LINES and len(record.text) < _MAX_OPENING_CHARS:
            opening.append(record)
        if record.time_ns is not None:
            self._first_times.setdefault(file, record.time_ns)
            self._last_times[file] = record.time_ns

    def _start_job(self, file: str, number: int) -> None:
        """Begin another job: somebody typed the command that starts one."""
        self._job_starts[file].append(number)
        for (marks_file, _), marks in self._marks_by_node.items():
            if marks_file == file:
                marks.start_job(number)
