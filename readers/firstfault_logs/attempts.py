"""Find the attempt of each line: torch's agents restart workers,
and several jobs may write to one file.

Marks are collected per node and file while reading, and counted at the end.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from firstfault.evidence.signatures import Pattern
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.framing.lines import EXCEPTION_LINE, TRACEBACK
from firstfault_logs.launchers import LauncherReport, ReportKind

if TYPE_CHECKING:
    from typing import TypeAlias

    from firstfault_logs.framing.labels import Label, LogRecord

    Key: TypeAlias = "tuple[int, int]"  # number of the job, and of its round
    Where: TypeAlias = "tuple[str, str]"  # file and node

_MIN_RESTART_NS = 1_000_000_000
"""A step that is printed again later than this after a failure is another attempt's."""
_MAX_STOP_SECONDS = 2.0
"""An agent needs less time to signal its workers, and more to restart them."""
_CLOCK_SKEW_SECONDS = 0.1
_SECONDS_PER_DAY = 86_400
_MAX_ATTEMPTS = 100
"""Those before count as one."""
_OPENING_LINES = 20
"""First lines of an attempt, which show where another one begins."""
_FAILURE_OUTPUT = Pattern(
    r"(?-i:^\s"
    "|^$"
    "|Traceback"
    "|Error"
    "|rror:"
    r"|^\[ERROR\]"
    r"|^E[A-Z]\d{4}: "
    r"|^\W*$"
    r"|^[EWIF]\d{4} "
    r"|^\[\w*\d*\]?:?\[?[EWF]\d{3,4} "
    "|^terminate called"
    "|^frame #"
    "|^Exception "
    "|^srun"
    "|^slurmstepd"
    "|^<"
    "|^[-=*]{4}"
    "| FAILED *$"
    r"|_handler\])"
)
"""What lines have that may follow a failure in the same attempt."""

# Begins a line of torch's log in Python.
AGENT_LOG_LINE = LazyPattern(
    r"[EWIF]\d{4}[ ](?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d\.\d+)[ ](?P<pid>\d+)?"
)

# A step of a training, and how many it has. Some programs pad their numbers to a fixed width.
TRAINING_STEP = LazyPattern(r"""(?i)
\b(?P<what>global[_ ]?step|step|iteration|iter|batch|epoch)\b
(?:\W{0,3}|[ ]?[:=|\[(]{0,2}[ ]{1,16}(?=\d{1,9}(?!\d|[.:-]\d)))(?P<step>\d{1,9})\b
(?:\s{0,2}(?:/|\bof\b)\s{0,12}(?P<total>\d{1,9})\b)?
""")

# What differs in a line that is printed once in each attempt.
VARYING_PART = LazyPattern(r"0x[0-9a-f]+|\d+|[0-9a-f]{8,}")


class Progress(NamedTuple):
    """A step that a process printed."""

    what: str
    """"step", "epoch"."""
    step: int
    number: int
    """Number of the line."""
    total: int = 0
    """Number of steps of the training, or 0 if the line doesn't show it."""


def progress_in(record: LogRecord) -> Progress | None:
    """Return the training step in a line, or None if it has none."""
    text = record.text
    if not ("tep" in text or "poch" in text or "iter" in text or "atch" in text):
        return None
    if text.startswith("wandb: "):  # its summary when the process ends, also after an exception
        return None
    step = TRAINING_STEP.search(text)
    if step is None:
        return None
    return Progress(step["what"], int(step["step"]), record.number, int(step["total"] or 0))


# Behind the number of an epoch, its fraction
_FRACTION_OF_EPOCH = LazyPattern(r"[.]\d{1,9}(?![\d.])")

# Behind the number of an epoch, the counter within it: "Epoch: [3][ 120/5005]", "Epoch 3 it 10",
# and a bar
_COUNTER_IN_EPOCH = LazyPattern(r"""(?i)
^(?:/\d{1,9})?
(?: \]?[ ]?\[\s{0,12}(?P<bracket>\d{1,9})\s{0,3}[/\]]
  | [^\n]{0,40}? \b(?:its?|iters?|iterations?|steps?|batch(?:es)?|(?:mini-?|micro-?)batch|mb|updates?)\b
    \W{0,3}(?P<named>\d{1,9})(?![\d.:%])
  | [^\n\d]{0,20}(?:\d{1,3}%\|[^\n|]{0,120}\|[ ])?(?<![\d.])(?P<part>\d{1,9})[ ]?/[ ]{0,6}\d{1,9}(?![\d./])
)
""")


def find_place(progress: Progress, text: str) -> tuple[float, ...]:
    """Return the step of a line, behind the epoch if the line counts the steps of each epoch.

    A fractional number is a part of an epoch: "'epoch': 0.95".
    """
    epoch = TRAINING_STEP.search(text) if progress.what.lower() == "epoch" else None
    if epoch is not None and (part := _FRACTION_OF_EPOCH.match(text, epoch.end("step"))):
        return (float(f"{progress.step}{part[0]}"),)
    inner = _COUNTER_IN_EPOCH.search(text[epoch.end() :]) if epoch is not None else None
    if inner is None:
        return (progress.step,)
    return (progress.step, int(next(filter(None, inner.groups()))))


def is_substantial(record: LogRecord) -> bool:
    """Whether a line shows that its process lives on: it has a step,
    or nothing that may follow a failure.
    """
    return progress_in(record) is not None or _FAILURE_OUTPUT.search(record.text) is None


@dataclass(slots=True)
class _WorkerStop:
    """The lines in which torch's agent reports that it ended its workers because
    one failed on some node.
    """

    first: int
    last: int
    pids: set[int] = field(default_factory=set)
    has_failed: bool = False
    """Whether one of its own workers failed; an agent reports this once per round."""


@dataclass(slots=True)
class _Agent:
    """An agent of torch."""

    began: float | None
    """Time of its first line, seconds of the day."""
    last: float | None = None
    endings: list[_WorkerStop] = field(default_factory=list)
    has_later_output: bool = False
    """Whether something other than a failure was printed between its last line and another agent's.
    """
    until: int = 0
    """The line, if any, in which a later exception ended a process. The process is another node's
    if logs aren't merged.
    """
    started_over: bool = False
    """Whether the first lines of the log, or an earlier step, came again after its last words."""

    def is_earlier(self, other: _Agent) -> bool:
        """Whether it began before another one had ended, by the clock."""
        if self.began is None or other.last is None:
            return False
        return (
            _CLOCK_SKEW_SECONDS
            < (other.last - self.began) % _SECONDS_PER_DAY
            < _SECONDS_PER_DAY / 2
        )

    def within(self, begin: int, end: int) -> _Agent:
        """Return its statements in some lines."""
        return replace(
            self, endings=[ending for ending in self.endings if begin <= ending.first < end]
        )


class AttemptMarks:
    """The marks of attempts in the lines of one node in one file."""

    def __init__(self, begins: Iterable[int] = ()) -> None:
        self.agents: dict[tuple[int | None, str | None], _Agent] = {}
        self.report_ends: list[int] = []
        """Lines in which an agent's report of failures ends."""
        self._box_ends: dict[int | None, int] = {}
        self.begins = [*begins]
        """First lines of jobs behind the first one."""
        self._speaker: _Agent | None = None
        self._ended = False
        """Whether a launcher has reported that its processes ended."""
        self._was_terminated = False
        """Whether the scheduler has announced the end of the job."""
        self._failed_ns: int | None = None
        """When the end of a process was reported: 0 if without a time, None if not reported."""
        self._raised: dict[int | None, int] = {}
        """Where torch printed a rank's exception last."""
        self._steps: dict[Label, int] = {}
        self._opening: set[str] = set()
        self._count = 0
        """Lines of the attempt that may begin one."""

    def drop_begins(self, lines: Collection[int]) -> bool:
        """Take these lines for no begin of a job; return whether one of them was."""
        kept = [begin for begin in self.begins if begin not in lines]
        is_changed = len(kept) < len(self.begins)
        self.begins = kept
        return is_changed

    def start_job(self, number: int) -> None:
        """Take the line in which somebody starts another job."""
        self.begins.append(number)
        self._begin(0, {})

    def take_report(self, record: LogRecord, report: LauncherReport) -> None:
        """Take a line's statement about processes."""
        is_of_agent = report.kind is ReportKind.RESTARTED or (
            report.pid is not None and report.kind is ReportKind.STOPPED
        )
        # a launcher that raises an exception has ended, and restarts nothing
        is_of_agent |= (
            report.kind is ReportKind.ENDED
            and report.local_rank is not None
            and EXCEPTION_LINE.match(report.text) is None
        )
        if is_of_agent:
            self._take_agent(record, report)
        elif report.kind is ReportKind.TERMINATED or (
            report.kind is ReportKind.ENDED and report.tasks
        ):
            self.report_ends.append(record.number)
        self._ended |= report.kind in {ReportKind.ENDED, ReportKind.TERMINATED}
        self._was_terminated |= report.kind is ReportKind.TERMINATED and bool(report.reason)
        self._failed_ns = self._failed_ns or record.time_ns or 0

    def take_box(self, number: int, first_rank: int | None) -> None:
        """Take the end of torch's report about the node with this first rank.

        An agent prints one report, so a second one of the same node is another job's.
        """
        last_end = self._box_ends.get(first_rank)
        if (
            first_rank is not None
            and last_end is not None
            and not any(last_end < begin for begin in self.begins)
        ):
            self.begins.append(last_end + 1)
        self._box_ends[first_rank] = number
        self.report_ends.append(number)
        self._ended = True

    def _take_agent(self, record: LogRecord, report: LauncherReport) -> None:
        agent_line = AGENT_LOG_LINE.match(record.text)
        now = record.time_ns / 1e9 if record.time_ns is not None else None
        if agent_line is not None:
            now = (
                int(agent_line["hour"]) * 3600
                + int(agent_line["minute"]) * 60
                + float(agent_line["second"])
            )
        name = (record.label.task, agent_line and agent_line["pid"])
        agent = self.agents.setdefault(name, _Agent(now))
        ending = agent.endings[-1] if agent.endings else None
        is_failure = report.kind is ReportKind.ENDED
        if ending is None:
            is_new = True
        elif ending.has_failed:
            is_known = bool(record.label.node) or any(part is not None for part in name)
            is_new = report.kind is not ReportKind.RESTARTED and (
                agent.has_later_output or is_known
            )
        else:
            is_slow = (
                now is None
                or agent.last is None
                or _MAX_STOP_SECONDS < (now - agent.last) % _SECONDS_PER_DAY < _SECONDS_PER_DAY / 2
            )
            is_new = (
                is_slow
                and report.pid not in ending.pids
                and (agent.has_later_output or not (is_failure or now is None))
            )
        if ending is None or is_new:
            agent.endings.append(ending := _WorkerStop(record.number, record.number))
        ending.last, agent.last, self._speaker = record.number, now, agent
        agent.has_later_output, agent.until, agent.started_over = False, 0, False
        ending.has_failed |= is_failure
        ending.pids |= {report.pid} if report.pid is not None else set()

    def take(self, record: LogRecord, progress: Progress | None) -> None:
        """Take a line that may begin another job: the first lines of the log come again,
        or an earlier step.
        """
        agent = self._speaker
        begins_another = self._begins_another(record, progress)
        if agent is None or (self.report_ends and self.report_ends[-1] > agent.endings[-1].last):
            self.begins += (
                [record.number] if begins_another and len(self.begins) < _MAX_ATTEMPTS * 10 else []
            )
        elif record.by_torch:
            # no process raises twice without a handler
            before = agent.endings[-2].last if len(agent.endings) > 1 else 0
            agent.has_later_output |= (
                TRACEBACK in record.text and self._raised.get(record.label.rank, 0) > before
            )
            agent.until = agent.until or (record.number if agent.has_later_output else 0)
        else:
            agent.has_later_output |= _FAILURE_OUTPUT.search(record.text) is None
            agent.started_over |= begins_another
        if record.by_torch and TRACEBACK in record.text:
            self._raised[record.label.rank] = record.number
            self._failed_ns = self._failed_ns or record.time_ns or 0

    def _begins_another(self, record: LogRecord, progress: Progress | None) -> bool:
        if progress is not None and not record.by_torch:
            return self._starts_over(record, progress.step)
        if not self._ended and self._count > _OPENING_LINES and not self._opening:
            return False
        if record.by_torch or _FAILURE_OUTPUT.search(record.text) is not None:
            # what follows may be of the failure
            self._count += _OPENING_LINES * bool(record.text.strip())
            return False
        shape = VARYING_PART.sub("#", record.text.strip())[:200]
        self._count += 1
        if self._ended and shape in self._opening:
            return self._begin(1, {})
        if self._count <= _OPENING_LINES and not self._ended:
            self._opening.add(shape)
        elif not self._ended:
            self._opening.discard(shape)  # any part of a log may have it
        return False

    def _starts_over(self, record: LogRecord, step: int) -> bool:
        """Whether a process prints an earlier step than before, below the report of a failure."""
        last = self._steps.get(record.label, -1)
        self._steps[record.label] = step
        if self._failed_ns is None or step >= last:
            return False
        # in a shared stream, a slow process may print an earlier step than its peers
        is_later = self._was_terminated or (
            bool(self._failed_ns) and (record.time_ns or 0) - self._failed_ns > _MIN_RESTART_NS
        )
        return (record.label.is_process or is_later) and self._begin(0, {record.label: step})

    def _begin(self, count: int, steps: dict[Label, int]) -> bool:
        self._ended = self._was_terminated = False
        self._failed_ns, self._count, self._steps = None, count, steps
        return True

    def jobs(self) -> list[_Job]:
        """Return the statements of the agents of each job."""
        begins = [
            0,
            *(begin for begin in self.begins if not self._is_of_another_node(begin)),
            1 << 62,
        ]
        return [
            _Job(
                begin,
                [
                    statements
                    for agent in self.agents.values()
                    if (statements := agent.within(begin, end)).endings
                ],
                [number for number in self.report_ends if begin <= number < end],
            )
            for begin, end in itertools.pairwise(begins)
        ]

    def _is_of_another_node(self, begin: int) -> bool:
        """Whether lines go back in time here: the nodes' logs were put behind one another."""
        agents = self.agents.values()
        last = max(
            (one for one in agents if one.endings[-1].last < begin),
            key=lambda one: one.endings[-1].last,
            default=None,
        )
        return last is not None and any(
            one.endings[0].first > begin and one.is_earlier(last) for one in agents
        )


@dataclass(slots=True)
class _Job:
    """The rounds of one job in the lines of one node in one file."""

    begin: int
    agents: list[_Agent]
    report_ends: list[int]

    def __post_init__(self) -> None:
        self.agents.sort(key=lambda agent: agent.endings[0].first)

    @property
    def rounds(self) -> int:
        """Number of rounds that ended."""
        return max((len(agent.endings) for agent in self.agents), default=0)

    def has_later_output(self, rounds: int) -> bool:
        """Whether anything was printed after this number of rounds."""
        last = [agent for agent in self.agents if len(agent.endings) == rounds]
        return any(agent.has_later_output for agent in (last[-1:] if self._is_merged else last))

    @property
    def _is_merged(self) -> bool:
        """Whether lines of several agents are in the order of time, and not behind one another."""
        ends = self._ends()
        first = [
            min(a.endings[at].first for a in self.agents if len(a.endings) > at)
            for at in range(self.rounds)
        ]
        is_backwards = any(
            after.is_earlier(before) for before, after in itertools.pairwise(self.agents)
        )
        is_backwards |= any(agent.started_over for agent in self.agents[:-1])
        spans = [(agent.endings[0].first, agent.endings[-1].last) for agent in self.agents]
        is_apart = all(end < begin for (_, end), (begin, _) in itertools.pairwise(spans))
        is_in_turn = all(end < begin for end, begin in zip(ends, first[1:], strict=False))
        return not is_apart or (is_in_turn and not is_backwards)

    def _ends(self) -> list[int]:
        """Return the line in which each round ends:
        workers start when all agents have ended those before.
        """
        return [
            max(a.endings[at].last for a in self.agents if len(a.endings) > at)
            for at in range(self.rounds)
        ]

    def begins(self, rounds: int) -> Iterator[tuple[int, int]]:
        """Yield the first line and the number of each round that the job had."""
        yield self.begin, 0
        if self._is_merged:
            yield from ((end + 1, at) for at, end in enumerate(self._ends(), 1) if at < rounds)
            return
        for before, agent in zip([None, *self.agents], self.agents, strict=False):
            if before is not None:
                last = before.endings[-1].last
                ends = [
                    number + 1
                    for number in self.report_ends
                    if last < number < agent.endings[0].first
                ]
                yield max(ends, default=before.until or last + 1), 0
            yield from (
                (ending.last + 1, at) for at, ending in enumerate(agent.endings, 1) if at < rounds
            )


class AttemptIndex:
    """Finds the attempt to which a line belongs."""

    def __init__(self, marks_by_node: Mapping[Where, AttemptMarks]) -> None:
        self._marks_by_node = marks_by_node
        jobs = {where: marks.jobs() for where, marks in marks_by_node.items()}
        self._begins: dict[Where, list[tuple[int, Key]]] = {where: [] for where in jobs}
        for number in range(max(map(len, jobs.values()), default=0)):
            here = {
                where: of_node[number] for where, of_node in jobs.items() if len(of_node) > number
            }
            rounds = max(job.rounds for job in here.values())
            if not any(job.report_ends for job in here.values()):
                rounds += any(job.has_later_output(rounds) for job in here.values())
            for where, job in here.items():
                self._begins[where] += [(line, (number, at)) for line, at in job.begins(rounds)]
        keys = sorted({key for begins in self._begins.values() for _, key in begins})
        self.count = max(min(len(keys), _MAX_ATTEMPTS), 1)
        self._numbers = {
            key: max(number + self.count - len(keys), 0) for number, key in enumerate(keys)
        }

    def drop_starts(self, numbers: Iterable[int]) -> bool:
        """Drop the starts of jobs with which attempts of these numbers begin;
        return whether there were any.
        """
        keys = {key for key, number in self._numbers.items() if number in numbers and key[1] == 0}
        # no agent's round has ended in it
        keys = {(job, 0) for job, _ in keys if (job, 1) not in self._numbers}
        is_changed = False
        for where, begins in self._begins.items():
            is_changed |= self._marks_by_node[where].drop_begins(
                {line for line, key in begins if key in keys}
            )
        return is_changed

    def find_attempt(self, where: Where, line: int) -> int:
        """Return the number of a line's attempt."""
        # tasks without a node are reported together
        begins = self._begins.get(where) or self._begins[where[0], ""]
        return self._numbers[begins[bisect_right(begins, (line, (1 << 62, 0))) - 1][1]]
