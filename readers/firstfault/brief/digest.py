"""What a brief quotes from the logs of a job: plain data,
filled while the logs are read once more.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

LineRanges = dict[str, list[tuple[int, int]]]
"""By file, the numbers of the first and the last line of places that a brief quotes."""
Place = tuple[float, ...]
"""The number of a step, those of an epoch and of a step in it, or a fractional epoch."""
LINES_AROUND = 8
"""Lines before and after such a place that are quoted, too."""


class Weight(enum.IntEnum):
    """How much a noteworthy line matters; a smaller number means more."""

    FATAL = 0
    """It names an exception, or is a launcher's or scheduler's report about a process or the job.
    """
    SUCCESS = 1
    """It reports that something has completed."""
    FAILURE_WORD = 2
    WARNING = 3


class QuotedLine(NamedTuple):
    """A line of a log without its prefixes."""

    file: str
    number: int
    text: str
    time_ns: int | None = None
    process: str = ""
    """The process that printed it, according to the prefix: "rank 3", "worker-1"; empty if unknown.
    """


@dataclass(slots=True)
class FoldedLine:
    """A noteworthy line, and the similar lines below it."""

    first: QuotedLine
    weight: Weight
    last_number: int
    count: int = 1
    processes: set[str] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)
    """The first of these lines."""


@dataclass(slots=True)
class ProcessOutput:
    """What one process printed."""

    name: str
    rank: int | None
    file: str
    tail: deque[QuotedLine] = field(default_factory=lambda: deque(maxlen=8))
    lines: int = 0
    last_step: QuotedLine | None = None
    """The last line with a training step."""


class SilentTime(NamedTuple):
    """Two consecutive lines of one file, and how much time is between them."""

    seconds: float
    before: QuotedLine
    after: QuotedLine


@dataclass(slots=True)
class FileDigest:
    """One log."""

    name: str
    lines: int = 0
    """Number of its last line."""
    first_time_ns: int | None = None
    last_time_ns: int | None = None
    head: list[QuotedLine] = field(default_factory=list)
    tail: deque[QuotedLine] = field(default_factory=lambda: deque(maxlen=120))
    first_step: QuotedLine | None = None
    last_step: QuotedLine | None = None


@dataclass(slots=True)
class PrintedTraceback:
    """A traceback, and the similar ones below it."""

    lines: list[QuotedLine]
    """The first of them."""
    count: int = 1
    processes: set[str] = field(default_factory=set)


@dataclass(slots=True)
class LogDigest:
    """The parts of a job's logs from which a brief is made; empty for a recorded job."""

    files: dict[str, FileDigest] = field(default_factory=dict)
    processes: dict[tuple[str, str], ProcessOutput] = field(default_factory=dict)
    """By file and name."""
    folded: dict[str, FoldedLine] = field(default_factory=dict)
    """By template, in the order in which they were read."""
    tracebacks: dict[str, PrintedTraceback] = field(default_factory=dict)
    """By the template of the exception."""
    quoted: list[QuotedLine] = field(default_factory=list)
    """Lines in and near the ranges that were asked for."""
    silences: list[SilentTime] = field(default_factory=list)
    """The longest ones, longest first."""
    steps: dict[tuple[str, str, Place], QuotedLine] = field(default_factory=dict)
    """The first line with each training step, by process, name and place of the step."""
    dropped: int = 0
    """Number of noteworthy lines that didn't fit."""
