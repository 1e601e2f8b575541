"""Collect the records of a job's logs by label, and split them into attempts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import IO, TYPE_CHECKING

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.attempt_logs import Attempt, Stream
from firstfault_logs.attempts import AGENT_LOG_LINE, AttemptMarks, find_progress
from firstfault_logs.framing.files import TimeSpan
from firstfault_logs.framing.labels import Label, LogRecord, parse_time_ns
from firstfault_logs.framing.lines import lines_of
from firstfault_logs.framing.ranks import FirstRanks, add_inline_label
from firstfault_logs.framing.records import SHELL_COMMAND, RecordReader
from firstfault_logs.launchers import (
    MAYBE_CODE_BELOW,
    Boxes,
    LauncherReport,
    ReportKind,
    code_below,
    parse_report,
)
from firstfault_logs.splitting import split_attempts

if TYPE_CHECKING:
    from firstfault_logs.attempts import Where


_TAIL_CHARS = 32 * 1024
"""Characters of the end of what each label printed."""
_SMALL_TAIL_CHARS = 4 * 1024
_MAX_STREAMS_WITH_LONG_TAILS = 512
"""With more labels than this, less of each is kept."""
_MAX_STREAMS = 20_000
"""Labels of one attempt; further ones are merged."""
_MAX_REPORTS = 20_000
"""Launcher reports of one attempt; further ones are dropped."""
_MAX_DESCRIPTION_LINES = 200
"""Lines of the description of a pod below its name."""
_MAX_OPENING_LINES = 20
"""First lines of each file, apart from long ones."""
_MAX_OPENING_CHARS = 400
# What only a job under torchrun prints.
_TORCHRUN_OUTPUT = LazyPattern(r"""
  torch/distributed/(?:elastic/(?!multiprocessing/errors)|launcher|run)
| torch\.distributed\.(?:elastic|run|launcher)
| \bChildFailedError\b
| \btorchrun\b
""")


# A line that can't be the first or the last of a whole log: of a traceback, or a mark of left out
# lines.
_INSIDE_OF_OUTPUT = LazyPattern(r"""(?i)
  \s+File[ ]"[^"]+",[ ]line[ ]\d+ | \W*(?:\.\.\.|\u2026)\W*$
| \W*[.\[<(\u2026-]\W*(?:\w+[ ]){0,4}(?:snip|truncated|omitted|left[ ]out)
""")

# How many processes the job has, as each of them prints it.
_WORLD_SIZE = LazyPattern(r"""
  (?:\b|_)(?i:world(?:[_ ]?size)?)\W{1,3}(?P<world>\d{1,6})\b
| \bnranks[ =:]{1,2}(?P<nranks>\d{1,6})\b
| MEMBER:[ ]\d+/(?P<member>\d{1,6})
| Starting[ ]with[ ](?P<starting>\d{1,6})[ ]processes
| \b[Rr]ank[ :=]{1,2}\d{1,6}(?:/|[ ]of[ ])(?P<of>\d{1,6})\b
| process_count(?:\(\))?[=: ]{1,2}(?P<count>\d{1,6})\b
""")

# Found, in less time, in each line that has a world size.
_MAYBE_WORLD_SIZE = LazyPattern(
    r"(?i:orld)|nranks|MEMBER|Starting[ ]with|ank.{1,8}(?:/|[ ]of[ ])|process_count"
)

# A number of ranks among the options of a program: 1 is a default, and may be multiplied by the
# GPUs of the node.
_DEFAULT_WORLD_SIZE = LazyPattern(r"""\bworld_?size["']?[=:][ ]?(?:1|-1)\b(?=[,)}])""")

# A row of a table of pods.
_POD_ROW = LazyPattern(
    r"(?P<pod>[a-z0-9][a-z0-9.-]{1,250})\s+\d+/\d+\s+(?P<status>[A-Z][\w:]{1,40})"
)

# The name of a pod in its description.
_DESCRIBED_POD = LazyPattern(r"(?:Name:\s{2,20}|[ ]{2}name:[ ])(?P<pod>[a-z0-9][a-z0-9.-]{1,250})$")

# A line in which a program or its launcher prints both numbers of a process.
_RANK_AND_PID = LazyPattern(r"""
  \b(?:world_|global_)?rank[ =:]{1,2}(?P<rank>\d{1,6})\b[^\n]{0,60}?\bpid[ =:]{1,2}(?P<pid>\d{2,10})\b
| \bpid[ =:]{1,2}(?P<pid2>\d{2,10})\)?,?[ ](?:world_|global_)?rank[ =:]{1,2}(?P<rank2>\d{1,6})\b
""")

# When a scheduler or a launcher ended something, anywhere in its report.
_REPORT_TIME = LazyPattern(r"\b(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)(?=\s|$)")


class LogCollector:
    """Sorts the lines of a job's logs."""

    cuts_prefixes = True
    """Whether tracebacks are read without the prefix of a logger."""
    reads_all = False
    """Whether it needs the lines of blocks without a failure, too."""

    def __init__(self) -> None:
        self._first_texts: dict[str, str] = {}
        """By file, its first line that isn't empty."""
        self._first_times: dict[str, int] = {}
        self._last_times: dict[str, int] = {}
        """By file, the times of the first and the last line that has one."""
        self._all = Attempt()
        self.records = RecordReader(self._all.size, cuts_prefixes=self.cuts_prefixes)
        self._job_starts: dict[str, list[int]] = defaultdict(list)
        """Lines in which a shell shows the command that starts a job."""
        self._marks_by_node: dict[Where, AttemptMarks] = {}
        self._boxes: dict[Where, Boxes] = {}
        self._described_pods: dict[str, tuple[str, int]] = {}
        """For each file, the pod described last and the number of the line with its name."""

    def read(self, stream: IO[bytes], file: str, label: Label) -> None:
        """Take all lines of one file.

        Args:
            stream: of the file.
            file: its name, for references.
            label: who wrote it, according to its name.

        Raises:
            NoTextError: it isn't a text.
        """
        lines = lines_of(stream, reads_all=self.reads_all)
        for record in self.records.read(lines, file, label):
            self._take(file, record)

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

    def describe_cut(self) -> str:
        """Return a sentence that a log is cut at its beginning, its end or both, or "" if it
        isn't.
        """
        last: dict[str, LogRecord] = {}
        for stream in self._all.streams.values():
            if stream.tail and (
                stream.file not in last or stream.tail[-1].number > last[stream.file].number
            ):
                last[stream.file] = stream.tail[-1]
        is_cut = _INSIDE_OF_OUTPUT.match
        begins = any(map(is_cut, self._first_texts.values()))
        ends = any(is_cut(record.text) for record in last.values())
        if begins and ends:
            return "the log is cut at both ends"
        if begins:
            return "the log is cut at its beginning"
        return "the log is cut at its end" if ends else ""

    def split_attempts(self) -> list[Attempt]:
        """Return the attempts in the logs, in order."""
        self._all.entries = [
            (*place, entry) for place, boxes in self._boxes.items() for entry in boxes.entries
        ]
        return split_attempts(self._all, self._marks_by_node)

    def _take(self, file: str, record: LogRecord) -> None:
        text, label, everything = record.text, record.label, self._all
        where = (file, label.node or ("" if label.task is None else f"task {label.task}"))
        boxes, is_boxed = self._take_boxed(where, record)
        is_skipped = is_boxed or not text.strip()
        report = parse_report(record.number, text) if not is_skipped else None
        marks = self._marks_by_node.get((file, label.node))
        if marks is None:
            marks = self._marks_by_node[file, label.node] = AttemptMarks(self._job_starts[file])
        if "$" in text[:100] and SHELL_COMMAND.match(text):
            self._start_job(file, record.number)
        if boxes.ended:
            marks.take_report_box(record.number, boxes.first_rank)
            boxes.ended = False
        if is_skipped:
            return
        progress = find_progress(record)
        if report is None:
            marks.take(record, progress)
        elif len(everything.reports) < _MAX_REPORTS:
            marks.take_report(record, report)
        self._note_opening_and_time(file, record)
        self._take_statements(record, where, report)
        label = add_inline_label(label, text)
        everything.tasks_are_nodes |= label.task is not None and label.rank not in {
            None,
            label.task,
        }
        if len(everything.streams) >= _MAX_STREAMS:
            label = Label(node=label.node)
        key = ((file, record.label.node), label)
        stream = everything.streams.get(key) or everything.streams.setdefault(
            key, Stream(*key[0], label)
        )
        if report is not None or AGENT_LOG_LINE.match(text):
            stream.end_excerpt()
        if report is None:
            stream.take(
                record,
                _TAIL_CHARS
                if len(everything.streams) < _MAX_STREAMS_WITH_LONG_TAILS
                else _SMALL_TAIL_CHARS,
                progress,
            )

    def _take_boxed(self, where: Where, record: LogRecord) -> tuple[Boxes, bool]:
        """Take a line of one of torch's boxes; return the boxes, and whether it is such a line."""
        text = record.text
        boxes = self._boxes.get(where) or self._boxes.setdefault(where, Boxes())
        is_boxed = boxes.take(record.number, text)
        if is_boxed or (
            ("torch" in text or "ChildFailed" in text) and _TORCHRUN_OUTPUT.search(text)
        ):
            self._all.is_torchrun = True
            self._all.tasks_are_nodes |= record.label.task is not None
        return boxes, is_boxed

    def _note_opening_and_time(self, file: str, record: LogRecord) -> None:
        self._first_texts.setdefault(file, record.text)
        opening = self._all.openings.setdefault(file, [])
        if len(opening) < _MAX_OPENING_LINES and len(record.text) < _MAX_OPENING_CHARS:
            opening.append(record)
        if record.time_ns is not None:
            self._first_times.setdefault(file, record.time_ns)
            self._last_times[file] = record.time_ns

    def _take_statements(
        self, record: LogRecord, where: Where, report: LauncherReport | None
    ) -> None:
        """Take a line's statements, and its report on processes if it is one."""
        text = record.text
        everything = self._all
        if everything.reports and MAYBE_CODE_BELOW.search(text):
            everything.reports[-1] = (
                *everything.reports[-1][:2],
                code_below(everything.reports[-1][2], text),
            )
        if report is not None and len(everything.reports) < _MAX_REPORTS:
            report = self._add_described_pod(report, record, where)
            # its prefix may name it
            if not (report.ranks or report.tasks or report.local_rank is not None):
                ranks, tasks = (
                    (one,) if one is not None else ()
                    for one in (record.label.rank, record.label.task)
                )
                report = replace(report, ranks=ranks, tasks=() if ranks else tasks)
            if report_time := _REPORT_TIME.search(text):
                report = replace(report, time_ns=parse_time_ns(report_time["time"]))
            report = replace(report, time_ns=report.time_ns or record.time_ns)
            everything.reports.append((*where, report))
        self._take_size(record.number, text, where)

    def _add_described_pod(
        self,
        report: LauncherReport,
        record: LogRecord,
        where: Where,
    ) -> LauncherReport:
        """Return a report with the name of a pod,
        if it's an indented line of the description of that pod.
        """
        pod, number = self._described_pods.get(where[0], ("", 0))
        is_end = report.kind in {ReportKind.ENDED, ReportKind.OOM} and not (where[1] or report.node)
        is_described = (
            record.text[:1].isspace() and record.number - number <= _MAX_DESCRIPTION_LINES
        )
        return replace(report, node=pod) if pod and is_end and is_described else report

    def _take_size(self, number: int, text: str, where: Where) -> None:
        """Take a line's statements about the job's size, and about which rank is where."""
        everything = self._all
        if "ame:" in text[:8] and (described := _DESCRIBED_POD.match(text)):
            self._described_pods[where[0]] = described["pod"], number
        if "/" in text[:300] and (row := _POD_ROW.match(text)):
            everything.listed_pods[row["pod"]] = row["status"]
        if "Namespace(" in text:
            text = _DEFAULT_WORLD_SIZE.sub("", text)
        everything.size.take(text)
        if _MAYBE_WORLD_SIZE.search(text):
            for size in _WORLD_SIZE.finditer(text):
                everything.world_size = max(
                    everything.world_size, int(next(filter(None, size.groups())))
                )
        if "ank" in text or "nproc" in text or "nodes" in text or "--num" in text:
            everything.first_ranks.setdefault(where, FirstRanks()).take(text)
        if "ank" in text and "pid" in text and (numbers := _RANK_AND_PID.search(text)):
            everything.rank_by_pid[int(numbers["pid"] or numbers["pid2"])] = int(
                numbers["rank"] or numbers["rank2"]
            )

    def _start_job(self, file: str, number: int) -> None:
        """Begin another job: somebody typed the command that starts one."""
        self._job_starts[file].append(number)
        for (marks_file, _), marks in self._marks_by_node.items():
            if marks_file == file:
                marks.start_job(number)
