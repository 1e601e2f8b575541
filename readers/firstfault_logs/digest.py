"""Collect from a job's logs what a brief quotes, in one pass and bounded memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

from firstfault.brief.digest import (
    LINES_AROUND,
    FileDigest,
    FoldedLine,
    LineRanges,
    LogDigest,
    PrintedTraceback,
    ProcessOutput,
    QuotedLine,
    SilentTime,
    Weight,
)
from firstfault.brief.folding import make_template
from firstfault.evidence.signatures import Pattern
from firstfault.evidence.texts import classify
from firstfault_logs import read_sources
from firstfault_logs.attempts import find_progress, find_step_position
from firstfault_logs.collector import LogCollector
from firstfault_logs.completion.words import is_success_report
from firstfault_logs.framing.labels import Label, LogRecord
from firstfault_logs.framing.lines import TRACEBACK
from firstfault_logs.launchers import parse_report

_HEAD_LINES = 40
_MAX_RANGE_LINES = 400
_MAX_TEXT_CHARS = 2_000
_MAX_FOLDED_KINDS, _MAX_TRACEBACKS, _MAX_PROCESSES, _MAX_SILENCES = 4_000, 64, 20_000, 3
_MAX_TRACEBACK_LINES = 150
_MAX_STEPS = 100_000
_MAX_COMPARED_LINES = 64
"""Similar lines in which differences are looked for."""
_MIN_SILENT_SECONDS = 60
_LEVEL_CHARS = 200
"""At the beginning of a line, in which it names its level."""


@cache
def _exception_line() -> Pattern:
    """Match the last line of a traceback, or a word that means that a program can't continue."""
    return Pattern(
        r"^\W*(?-i:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout)\b|Fatal"
        r" |FATAL|terminate called)"
    )


@cache
def _low_level() -> Pattern:
    """Match a log level at which nothing has gone wrong."""
    return Pattern(r"(?-i:\b(?:INFO|DEBUG|TRACE)\b|\[I[ \d]|^I\d{4} )")


@cache
def _trouble() -> Pattern:
    """Match words of lines that may explain a failure; more than a failure's own."""
    return Pattern(
        r"error|exception|\bfatal|\bfail|\bsignal|\bexit(?:ed|ing|s|"
        r" ?code)?\b|\bkill|\babort|\bterminat"
        r"|\bcancel|watchdog|time(?:d )?out|out of"
        r" memory|\boom|\bevict|preempt|\blost\b|\bdied\b|\bdead\b"
        r"|refused|unhealthy|\bpanic|interrupt|segfault|core dumped|\bnan\b|corrupt|denied|quota|no"
        r" space"
        r"|unable to|can ?not|could not|\bxid\b"
    )


def digest_logs(
    sources: Sequence[Path | IO[bytes]],
    wanted: Mapping[str, Sequence[tuple[int, int]]],
    *,
    reads_all: bool = False,
) -> LogDigest:
    """Return what a brief quotes from the logs of a job.

    Args:
        sources: the same as for `firstfault_logs.snapshot_of`.
        wanted: for each file, the ranges of lines to quote with the lines around them.
        reads_all: read blocks without a failure, too: to compare logs.
    """
    collector = _DigestCollector({file: list(ranges) for file, ranges in wanted.items()})
    collector.reads_all = reads_all
    read_sources(sources, collector)
    collector.finish()
    return collector.digest


class _DigestCollector(LogCollector):
    """Keeps lines for a brief instead of sorting them into processes."""

    cuts_prefixes = False

    def __init__(self, wanted: LineRanges) -> None:
        super().__init__()
        self.digest = LogDigest()
        self._wanted = wanted
        self._open: dict[tuple[str, Label], list[QuotedLine]] = {}
        """Tracebacks that have not named their exception yet."""
        self._before: QuotedLine | None = None
        """The last line with a time."""

    def _take(self, file: str, record: LogRecord) -> None:
        text = record.text
        if not text.strip(" ^~"):  # Python marks a part of the line above
            return
        line = QuotedLine(
            file,
            record.number,
            text[:_MAX_TEXT_CHARS],
            record.time_ns,
            _name(record.label),
        )
        digest = self.digest.files.get(file) or self.digest.files.setdefault(file, FileDigest(file))
        digest.lines = max(digest.lines, record.number)
        if len(digest.head) < _HEAD_LINES:
            digest.head.append(line)
        digest.tail.append(line)
        self._take_time(digest, line)
        is_detail = text[:1].isspace() or TRACEBACK in text
        weight = None if is_detail else _weigh(line)
        progress = find_progress(record) if weight is not Weight.FATAL else None
        step = line if progress is not None else None
        if progress is not None and len(self.digest.steps) < _MAX_STEPS:
            place = find_step_position(progress, text)
            self.digest.steps.setdefault((line.process, progress.what.lower(), place), line)
        if step is not None:
            digest.first_step = digest.first_step or step
            digest.last_step = step
        self._take_process(line, record.label, step)
        if self._is_wanted(line):
            self.digest.quoted.append(line)
        self._take_traceback(line, record.label)
        if weight is not None:
            self._fold(line, weight)

    def _take_time(self, digest: FileDigest, line: QuotedLine) -> None:
        if line.time_ns is None:
            return
        digest.first_time_ns = digest.first_time_ns or line.time_ns
        digest.last_time_ns = line.time_ns
        before, self._before = self._before, line
        if before is None or before.file != line.file or before.time_ns is None:
            return
        seconds = (line.time_ns - before.time_ns) / 1e9
        silences = self.digest.silences
        if seconds >= _MIN_SILENT_SECONDS and (
            len(silences) < _MAX_SILENCES or seconds > silences[-1].seconds
        ):
            silences.append(SilentTime(seconds, before, line))
            silences.sort(key=lambda silence: -silence.seconds)
            del silences[_MAX_SILENCES:]

    def _take_process(self, line: QuotedLine, label: Label, step: QuotedLine | None) -> None:
        key = (line.file, line.process)
        process = self.digest.processes.get(key)
        if process is None:
            if not line.process or len(self.digest.processes) >= _MAX_PROCESSES:
                return
            process = self.digest.processes[key] = ProcessOutput(
                line.process, label.rank, line.file
            )
        process.lines += 1
        process.tail.append(line)
        process.last_step = step or process.last_step

    def _is_wanted(self, line: QuotedLine) -> bool:
        """Whether a line is in a range, or near one and not of another traceback."""
        ranges = self._wanted.get(line.file, ())
        number = line.number
        if not ranges or len(self.digest.quoted) >= _MAX_RANGE_LINES * len(ranges):
            return False
        if any(first <= number <= last for first, last in ranges):
            return True
        is_near = any(
            first - LINES_AROUND <= number <= last + LINES_AROUND for first, last in ranges
        )
        return is_near and not line.text[:1].isspace() and TRACEBACK not in line.text

    def _take_traceback(self, line: QuotedLine, label: Label) -> None:
        key = (line.file, label)
        if TRACEBACK in line.text:
            self._open.setdefault(key, []).append(line)
            return
        lines = self._open.get(key) if self._open else None
        if lines is None:
            return
        lines.append(line)
        if line.text[:1].isspace() and len(lines) < _MAX_TRACEBACK_LINES:
            return
        del self._open[key]
        self._close_traceback(lines)

    def _close_traceback(self, lines: list[QuotedLine]) -> None:
        template = make_template(lines[-1].text)
        printed = self.digest.tracebacks.get(template)
        if printed is not None:
            printed.count += 1
        elif len(self.digest.tracebacks) < _MAX_TRACEBACKS:
            printed = self.digest.tracebacks[template] = PrintedTraceback(lines)
        if printed is not None and lines[-1].process:
            printed.processes.add(lines[-1].process)

    def _fold(self, line: QuotedLine, weight: Weight) -> None:
        """Keep a noteworthy line, or count it as one more of its kind."""
        template = make_template(line.text)
        folded = self.digest.folded.get(template)
        if folded is None:
            if len(self.digest.folded) >= _MAX_FOLDED_KINDS:
                self.digest.dropped += 1
                return
            if weight is Weight.FAILURE_WORD and classify(line.text).is_specific:
                weight = Weight.FATAL
            folded = self.digest.folded[template] = FoldedLine(line, weight, line.number)
        else:
            folded.count += 1
            folded.last_number = line.number
        if line.process:
            folded.processes.add(line.process)
        if len(folded.texts) < _MAX_COMPARED_LINES:
            folded.texts.append(line.text)

    def finish(self) -> None:
        """Keep tracebacks that the log cuts off."""
        for lines in self._open.values():
            self._close_traceback(lines)
        self._open.clear()


def _weigh(line: QuotedLine) -> Weight | None:
    """Return how much a line matters, or None if it isn't noteworthy."""
    text = line.text
    if _exception_line().search(text) is not None or parse_report(line.number, text) is not None:
        return Weight.FATAL
    if is_success_report(text):
        return Weight.SUCCESS
    is_trace = text.startswith("+")  # a shell's "set -x" prints every command
    if _low_level().search(text[:_LEVEL_CHARS]) is not None:
        return None
    if _trouble().search(text) is not None:
        return Weight.WARNING if is_trace else Weight.FAILURE_WORD
    return Weight.WARNING if "warn" in text[:_LEVEL_CHARS].lower() else None


def _name(label: Label) -> str:
    """Return the name of a process as its lines show it, or an empty string if they don't."""
    if label.rank is not None:
        return f"rank {label.rank}"
    if label.task is not None:
        return f"task {label.task}"
    numbers = (("local rank", label.local_rank), ("pid", label.pid))
    number = next((f"{word} {value}" for word, value in numbers if value is not None), "")
    return " ".join(filter(None, (label.node, number)))
