"""Collect the records of a job's logs by label, and split them into attempts."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.attempts import (
    AGENT_LOG_LINE,
    AttemptIndex,
    AttemptMarks,
    Progress,
    progress_in,
)
from firstfault_logs.boxes import Boxes, Entry
from firstfault_logs.completion.loops import Loops, has_brackets, may_configure
from firstfault_logs.completion.words import may_report_completion
from firstfault_logs.framing.broken_lines import BrokenLines, PrefixedTracebacks
from firstfault_logs.framing.exports import FrameIndenter, read_export
from firstfault_logs.framing.first_ranks import FirstRanks
from firstfault_logs.framing.labels import (
    Label,
    LogRecord,
    Prefixes,
    get_file_label,
    learn_prefixes,
    parse_time_ns,
)
from firstfault_logs.framing.lines import TRACEBACK, read_ahead
from firstfault_logs.framing.named_ranks import DECLARED_RANK, LOGGED_RANK
from firstfault_logs.framing.separate_jobs import TimeSpan
from firstfault_logs.framing.sizes import SizeMarks
from firstfault_logs.launchers import (
    MAYBE_CODE_BELOW,
    LauncherReport,
    ReportKind,
    code_below,
    parse_report,
)

if TYPE_CHECKING:
    from firstfault_logs.attempts import Where
    from firstfault_logs.framing.lines import NumberedLine

_LINES_READ_AHEAD = 1000
"""Lines from which prefixes are learned."""
_TAIL_CHARS = 32 * 1024
"""Characters of the end of what each label printed."""
_SMALL_TAIL_CHARS = 4 * 1024
_LINE_OVERHEAD_CHARS = 16
"""Memory that a line takes in addition to its characters."""
_MANY_STREAMS = 512
"""With more labels than this, less of each is kept."""
_MAX_STREAMS = 20_000
"""Labels, and launcher reports, of one attempt; further ones are merged or dropped."""
_MAX_EXCERPT_LINES = 200
"""Lines from a traceback on."""
_MAX_EXCERPTS = 64
"""Tracebacks kept per label: the first and the last ones."""
_MAX_OPENING_LINES = 20
"""First lines of each file, apart from long ones."""
_MAX_OPENING_CHARS = 400
_MAX_COMPLETIONS = 64
"""Lines that may report a completion, kept per label although they are far above its end."""
STEPS_PROVING_SURVIVAL = 3
"""A rank may print one more step, and a buffered one, before it notices that another rank is gone.
"""
_MAX_DESCRIPTION_LINES = 200
"""Lines of the description of a pod below its name."""
_MAX_COMMANDS = 100
"""Shell commands in one file that may start another job; later ones are ordinary lines."""


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

    where: Where
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
    _size: int = 0
    _since: int = 0
    """Lines since the last traceback began."""
    _named: bool = True
    """Whether the last traceback has named its exception."""

    @property
    def file(self) -> str:
        """Name of the file."""
        return self.where[0]

    def take(self, record: LogRecord, most: int, progress: Progress | None) -> None:
        """Keep a line as far as there is room."""
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
        self.tail.append(record)
        self._size += len(record.text) + _LINE_OVERHEAD_CHARS
        while self._size > most and len(self.tail) > 1:
            self._size -= len(self.tail.popleft().text) + _LINE_OVERHEAD_CHARS
        if record.by_torch:
            self.by_torch.append(record)
        names_a_rank = "ank" in record.text or "process_in" in record.text
        if names_a_rank and (found := DECLARED_RANK.match(record.text)):
            self.declared_ranks.add(int(found["rank"]))
        self._excerpt(record)

    def has_steps_after(self, number: int) -> bool:
        """Whether several steps were printed below a line."""
        return len(self.last_steps) == STEPS_PROVING_SURVIVAL and self.last_steps[0].number > number

    def parts(self, index: AttemptIndex) -> dict[int, Stream]:
        """Return what was printed in each attempt, by its number."""
        found: dict[int, Stream] = {}

        def part(number: int) -> Stream:
            return found.setdefault(
                index.find_attempt(self.where, number),
                Stream(self.where, self.label, declared_ranks=self.declared_ranks),
            )

        for record in self.tail:
            part(record.number).tail.append(record)
        for record in self.by_torch:
            part(record.number).by_torch.append(record)
        for record in self.completions or ():
            at = part(record.number)
            at.completions = at.completions or deque()
            at.completions.append(record)
        for excerpt in self.excerpts:
            begin = excerpt.lines[excerpt.at].number
            of = index.find_attempt(self.where, begin)
            lines = [
                record
                for record in excerpt.lines
                if index.find_attempt(self.where, record.number) == of
            ]
            part(begin).excerpts.append(replace(excerpt, lines=lines))
        if self.progress is not None:
            part(self.progress.number).progress = self.progress
            part(self.progress.number).loops = self.loops
        for step in self.last_steps:
            part(step.number).last_steps.append(step)
        return found

    def _excerpt(self, record: LogRecord) -> None:
        self._since += 1
        is_begin = TRACEBACK in record.text
        if is_begin and not self._is_linked(record.text):
            mixed = not self._named and self._since < _MAX_EXCERPT_LINES
            if mixed and self.excerpts:
                self.excerpts[-1].is_mixed = True
            above = list(self.tail)[-2:-1]
            del self.excerpts[_MAX_EXCERPTS // 2 : -_MAX_EXCERPTS // 2]
            self.excerpts.append(Excerpt([*above, record], is_mixed=mixed))
            self._since, self._named = 0, False
        elif self.excerpts and self._since <= _MAX_EXCERPT_LINES:
            self.excerpts[-1].lines.append(record)
            self._named = self._named or (
                bool(record.text.strip()) and not record.text[:1].isspace()
            )

    def end_excerpt(self) -> None:
        """Leave out of the last traceback what follows: the last line is another process's."""
        if self.excerpts and self._since <= _MAX_EXCERPT_LINES:
            self._since, self._named = _MAX_EXCERPT_LINES + 1, True

    def _is_linked(self, text: str) -> bool:
        if not self.excerpts or self._since > _MAX_EXCERPT_LINES:
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

    def find_first_rank(self, where: Where) -> int | None:
        """Return the rank of the first worker of a node, or None if it isn't known."""
        found = self.first_ranks.get(where)
        # a number of ranks that isn't stated as the job's may be that of a group
        return found.find_first(self.size.ranks) if found is not None else None

    def find_spawned(self, pid: int) -> tuple[int | None, int] | None:
        """Return the rank, if it's known, and the local rank of a process that its launcher
        started, or None if the process id was printed for no node or for several nodes.
        """
        found = [
            (self.find_first_rank(where), one.local_rank_by_pid[pid])
            for where, one in self.first_ranks.items()
            if pid in one.local_rank_by_pid
        ]
        if len(found) != 1:
            return None
        first, local = found[0]
        return (None if first is None else first + local), local


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

    reads_all = False
    """Whether it needs the lines of blocks without a failure, too."""

    def __init__(self) -> None:
        self.lines = 0
        self.notes: list[str] = []
        self.first_texts: dict[str, str] = {}
        """By file, its first line that isn't empty."""
        self._first_times: dict[str, int] = {}
        self._last_times: dict[str, int] = {}
        """By file, the times of the first and the last line that has one."""
        self._labels: dict[str, Label] = {}
        """By file, the label in its last header."""
        self._indenter = FrameIndenter()
        self._prefixed_tracebacks = PrefixedTracebacks()
        self._broken_lines = BrokenLines()
        self._all = Attempt()
        self._job_starts: dict[str, list[int]] = defaultdict(list)
        """Lines in which a shell shows the command that starts a job."""
        self._marks_by_node: dict[Where, AttemptMarks] = {}
        self._boxes: dict[Where, Boxes] = {}
        self._described_pods: dict[str, tuple[str, int]] = {}
        """For each file, the pod described last and the number of the line with its name."""

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
        pending, everything = read_ahead(lines, _LINES_READ_AHEAD)
        self._all.size.vague_names.add(label.node)
        if label.node_index is not None:
            self._all.size.files_of_nodes.add(label.node)
        for commands_left in range(_MAX_COMMANDS, -1, -1):
            # each command may put other prefixes before its lines
            is_command = _SHELL_COMMAND.match
            later_commands = (at for at, (_, line) in enumerate(pending) if at and is_command(line))
            prefixes = learn_prefixes([line for _, line in pending[: next(later_commands, None)]])
            everything = self._read_command(
                everything,
                file,
                label,
                prefixes,
                is_last=commands_left == 0,
            )
            self._all.size.vague_names.update(
                *(one.learned_names for one in (prefixes, prefixes.inner) if one)
            )
            pending, everything = read_ahead(everything, _LINES_READ_AHEAD)
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
        for at, (number, line) in enumerate(lines):
            self.lines += 1
            if not is_last and "$" in line[:100] and _SHELL_COMMAND.match(line):
                if at:
                    return itertools.chain([(number, line)], lines)
                self._take(file, LogRecord(number, line, label, None))
                continue
            if line.startswith("==> ") and (header := _FILE_HEADER.match(line)):
                self._labels[file] = get_file_label(header["path"])
                self._all.size.vague_names.add(self._labels[file].node)
                continue
            for record in prefixes.parse(number, line, self._labels.get(file, label)):
                for whole in self._broken_lines.join(record):
                    self._take(file, whole)
        for record in self._broken_lines.flush():
            self._take(file, record)
        return iter(())

    def find_training_times(self) -> dict[str, TimeSpan]:
        """Return when the files with steps of a training were written,
        as far as their lines have times.
        """
        of_training = {
            stream.file for stream in self._all.streams.values() if stream.progress is not None
        }
        return {
            file: TimeSpan(first, self._last_times[file])
            for file, first in self._first_times.items()
            if file in of_training
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

    def attempts(self, find_empty: Callable[[Sequence[Attempt]], list[int]]) -> list[Attempt]:
        """Return the attempts in the logs, in order.

        Args:
            find_empty: returns the indices of attempts that are only the end of the previous
                attempt.
        """
        everything = self._all
        everything.entries = [
            (*where, entry) for where, boxes in self._boxes.items() for entry in boxes.entries
        ]
        index = AttemptIndex(self._marks_by_node)
        made = self._split(index)
        # dropping starts shifts the numbers of later ones, so each pass drops only those that it
        # has looked at
        while (empty := find_empty(made)) and index.drop_starts(empty):
            index = AttemptIndex(self._marks_by_node)
            made = self._split(index)
        return made

    def _split(self, index: AttemptIndex) -> list[Attempt]:
        everything = self._all
        if index.count == 1:
            return [everything]
        made = [replace(everything, streams={}, reports=[], entries=[]) for _ in range(index.count)]
        for key, stream in everything.streams.items():
            for number, part in stream.parts(index).items():
                made[number].streams[key] = part
        for file, node, report in everything.reports:
            made[index.find_attempt((file, node), report.number)].reports.append(
                (file, node, report)
            )
        for file, node, entry in everything.entries:
            made[index.find_attempt((file, node), entry.number)].entries.append((file, node, entry))
        return made

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
            marks.take_box(record.number, boxes.first_rank)
            boxes.ended = False
        if is_boxed or not text.strip():
            return
        self._note_place_and_time(file, record)
        progress = progress_in(record)
        is_report = self._take_report(record, where, marks)
        if not is_report:
            marks.take(record, progress)
        label = _with_inline(label, text)
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
                _TAIL_CHARS if len(everything.streams) < _MANY_STREAMS else _SMALL_TAIL_CHARS,
                progress,
            )

    def _note_place_and_time(self, file: str, record: LogRecord) -> None:
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
        for (of_file, _), marks in self._marks_by_node.items():
            if of_file == file:
                marks.start_job(number)

    def _take_report(self, record: LogRecord, where: Where, marks: AttemptMarks) -> bool:
        """Take a line's statements about processes and the job;
        return whether it had one about processes.
        """
        text = record.text
        everything = self._all
        report = parse_report(record.number, record.text)
        if everything.reports and MAYBE_CODE_BELOW.search(text):
            everything.reports[-1] = (
                *everything.reports[-1][:2],
                code_below(everything.reports[-1][2], text),
            )
        if report is not None and len(everything.reports) < _MAX_STREAMS:
            marks.take_report(record, report)
            report = self._add_described_pod(report, record, where)
            # its prefix may name it
            if not (report.ranks or report.tasks or report.local_rank is not None):
                ranks, tasks = (
                    (one,) if one is not None else ()
                    for one in (record.label.rank, record.label.task)
                )
                report = replace(report, ranks=ranks, tasks=() if ranks else tasks)
            if found := _REPORT_TIME.search(text):
                report = replace(report, time_ns=parse_time_ns(found["time"]))
            report = replace(report, time_ns=report.time_ns or record.time_ns)
            everything.reports.append((*where, report))
        self._take_size(record.number, text, where)
        return report is not None

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
        if "ank" in text and "pid" in text and (found := _RANK_AND_PID.search(text)):
            everything.rank_by_pid[int(found["pid"] or found["pid2"])] = int(
                found["rank"] or found["rank2"]
            )


# Native code and libraries print the rank of their process.
_INLINE_RANK = LazyPattern(r"""
  ^(?:\[\d{1,5}\]:[ ]?)?(?:\[[EWIF][^\]\n]{1,120}\][ ])?
  \[(?:PG[ ][^\]\n]{0,80}\(default_pg\)[ ])?Rank[ ](?P<rank>\d{1,6})\]
| \bRankID:(?P<rank_id>\d{1,6})\b
| \[rank=(?P<rank_is>\d{1,6}),[ ]world=\d
| GLOBAL_RANK:[ ](?P<global>\d{1,6}),[ ]MEMBER
""")


# Native code and libraries print the number of their process
_INLINE_PID = LazyPattern(
    r"\(PID:[ ]?(?P<pid>\d{1,10}),|^\S{0,12}[ ]?\[PID:[ ]?(?P<pid2>\d{1,10})\]"
)

# Begins a line of NCCL.
_NCCL_LINE_START = LazyPattern(
    r"^(?P<host>[\w.-]{1,120}):(?P<pid>\d{1,10}):\d{1,10}[ ]\[\d{1,3}\][ ](?:\S+[ ]\S+[ ])?NCCL[ ]"
)


def _with_inline(label: Label, text: str) -> Label:
    """Return a label with the rank and process id that native code prints about itself."""
    names_a_rank = label.rank is None and ("Rank" in text or "RANK" in text or "[rank=" in text)
    if names_a_rank and (found := _INLINE_RANK.search(text)):
        label = label._replace(rank=int(next(filter(None, found.groups()))))
    elif (
        label.pid is not None
        and label.rank is None
        and "[" in text[:30]
        and (found := LOGGED_RANK.match(text))
    ):
        label = label._replace(rank=int(found["rank"]))
    if label.pid is None and "PID" in text and (found := _INLINE_PID.search(text)):
        label = label._replace(pid=int(found["pid"] or found["pid2"]))
    if " NCCL " in text and (found := _NCCL_LINE_START.match(text)):
        label = label._replace(pid=label.pid or int(found["pid"]), node=label.node or found["host"])
    return label
