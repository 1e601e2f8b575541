"""What the logs of one attempt contain: a stream for each label, reports, and the job's size."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.completion.loops import Loops, has_brackets, may_configure
from firstfault_logs.completion.words import may_report_completion
from firstfault_logs.framing.lines import TRACEBACK
from firstfault_logs.framing.ranks import DECLARED_RANK, SizeMarks

if TYPE_CHECKING:
    from firstfault_logs.attempts import Progress, Where
    from firstfault_logs.framing.labels import Label, LogRecord
    from firstfault_logs.framing.ranks import FirstRanks
    from firstfault_logs.launchers import Entry, LauncherReport

_LINE_OVERHEAD_CHARS = 16
"""Memory that a line takes in addition to its characters."""
_MAX_EXCERPT_LINES = 200
"""Lines from a traceback on."""
_MAX_EXCERPTS = 64
"""Tracebacks kept per label: the first and the last ones."""
_MAX_COMPLETIONS = 64
"""Lines that may report a completion, kept per label although they are far above its end."""
STEPS_PROVING_SURVIVAL = 3
"""A rank may print one more step, and a buffered one, before it notices that another rank is gone.
"""


@dataclass(slots=True)
class Excerpt:
    """A traceback in a log, with the line above it and some below it."""

    lines: list[LogRecord]
    is_mixed: bool = False
    """Whether another traceback begins before this one has named its exception."""

    @property
    def at(self) -> int:
        """Where it begins in `lines`."""
        return next((at for at, record in enumerate(self.lines[:2]) if TRACEBACK in record.text), 0)


# Found above a traceback that belongs to the previous traceback.
_CHAINED_TRACEBACK = LazyPattern(r'''
  The[ ]above[ ]exception[ ]was[ ]the[ ]direct[ ]cause
| During[ ]handling[ ]of[ ]the[ ]above[ ]exception
| terminated[ ]with[ ]the[ ]following[ ]error
| \bCaught[ ][\w.]+[ ]in[ ]
| ^\s*Original[ ]Traceback
| RemoteTraceback
| ^\s*"""
| \(RANK[ ]\d+\)
''')


@dataclass(slots=True)
class Stream:
    """What one label printed in one file."""

    file: str
    """Name of the file."""
    node: str
    label: Label
    tail: deque[LogRecord] = field(default_factory=deque)
    by_torch: deque[LogRecord] = field(default_factory=lambda: deque(maxlen=_MAX_EXCERPT_LINES * 2))
    """Lines before which torch put the rank: tracebacks among them were uncaught."""
    excerpts: list[Excerpt] = field(default_factory=list)
    progress: Progress | None = None
    """The last one that was printed."""
    loops: Loops = field(default_factory=Loops)
    completions: deque[LogRecord] | None = None
    """The last lines that may report a completion."""
    last_steps: deque[Progress] = field(
        default_factory=lambda: deque(maxlen=STEPS_PROVING_SURVIVAL)
    )
    """The first line of each of the last steps."""
    declared_ranks: set[int] = field(default_factory=set)
    """Ranks that it printed as its own. With several ranks, several processes share it."""
    _tail_characters: int = 0
    _lines_since_traceback: int = 0
    """Lines since the last traceback began."""
    _has_exception_name: bool = True
    """Whether the last traceback has named its exception."""

    def take(self, record: LogRecord, max_characters: int, progress: Progress | None) -> None:
        """Keep a line as far as there is room."""
        self.tail.append(record)
        self._tail_characters += len(record.text) + _LINE_OVERHEAD_CHARS
        while self._tail_characters > max_characters and len(self.tail) > 1:
            self._tail_characters -= len(self.tail.popleft().text) + _LINE_OVERHEAD_CHARS
        if record.by_torch:
            self.by_torch.append(record)
        names_a_rank = "ank" in record.text or "process_in" in record.text
        if names_a_rank and (declared := DECLARED_RANK.match(record.text)):
            self.declared_ranks.add(int(declared["rank"]))
        self._add_to_excerpts(record)
        if progress is not None:
            self.progress = progress
            self.loops.take(record.text, record.number)
            if all(step.step != progress.step for step in self.last_steps):
                self.last_steps.append(progress)
        elif may_configure(record.text):
            self.loops.take_configuration(record.text)
        elif has_brackets(record.text):
            self.loops.take(record.text, record.number)
        if progress is None and may_report_completion(record.text):
            self.completions = (
                deque(maxlen=_MAX_COMPLETIONS) if self.completions is None else self.completions
            )
            self.completions.append(record)

    def has_steps_after(self, number: int) -> bool:
        """Whether several steps were printed below a line."""
        return len(self.last_steps) == STEPS_PROVING_SURVIVAL and self.last_steps[0].number > number

    def _add_to_excerpts(self, record: LogRecord) -> None:
        self._lines_since_traceback += 1
        is_begin = TRACEBACK in record.text
        if is_begin and not self._is_linked(record.text):
            is_mixed = (
                not self._has_exception_name and self._lines_since_traceback < _MAX_EXCERPT_LINES
            )
            if is_mixed and self.excerpts:
                self.excerpts[-1].is_mixed = True
            above = list(self.tail)[-2:-1]
            del self.excerpts[_MAX_EXCERPTS // 2 : -_MAX_EXCERPTS // 2]
            self.excerpts.append(Excerpt([*above, record], is_mixed=is_mixed))
            self._lines_since_traceback, self._has_exception_name = 0, False
        elif self.excerpts and self._lines_since_traceback <= _MAX_EXCERPT_LINES:
            self.excerpts[-1].lines.append(record)
            self._has_exception_name = self._has_exception_name or (
                bool(record.text.strip()) and not record.text[:1].isspace()
            )

    def end_excerpt(self) -> None:
        """Leave out of the last traceback what follows: the last line is another process's."""
        if self.excerpts and self._lines_since_traceback <= _MAX_EXCERPT_LINES:
            self._lines_since_traceback, self._has_exception_name = _MAX_EXCERPT_LINES + 1, True

    def _is_linked(self, text: str) -> bool:
        if not self.excerpts or self._lines_since_traceback > _MAX_EXCERPT_LINES:
            return False
        above = (record.text for record in self.excerpts[-1].lines[-4:])
        return any(map(_CHAINED_TRACEBACK.search, (text, *above)))


@dataclass(slots=True)
class Attempt:
    """One attempt of a job, or all of them, as its logs show it."""

    streams: dict[tuple[Where, Label], Stream] = field(default_factory=dict)
    reports: list[tuple[str, str, LauncherReport]] = field(default_factory=list)
    """File and node of a report, and the report."""
    entries: list[tuple[str, str, Entry]] = field(default_factory=list)
    """The same of entries in torch's boxes."""
    world_size: int = 0
    """The value that a process printed; 0 if unknown."""
    is_torchrun: bool = False
    rank_by_pid: dict[int, int] = field(default_factory=dict)
    first_ranks: dict[Where, FirstRanks] = field(default_factory=dict)
    """Rank of the first worker of each node."""
    tasks_are_nodes: bool = False
    """Whether numbers before lines are those of launchers, not of ranks."""
    size: SizeMarks = field(default_factory=SizeMarks)
    openings: dict[str, list[LogRecord]] = field(default_factory=dict)
    """First lines of each file: they come again if the program is started again."""
    listed_pods: dict[str, str] = field(default_factory=dict)
    """The last state of each pod in tables of them, which may have pods of other jobs."""
