"""Find the marks of attempts in the lines of a log: steps, and what torch's agents print about the
workers that they restart. `splitting` counts them when all lines were read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from firstfault.evidence.signatures import Pattern
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.framing.lines import EXCEPTION_LINE, TRACEBACK
from firstfault_logs.launchers import LauncherReport, ReportKind

if TYPE_CHECKING:
    from typing import TypeAlias

    from firstfault_logs.framing.labels import Label, LogRecord

    Where: TypeAlias = "tuple[str, str]"  # file and node

_MIN_RESTART_NS = 1_000_000_000
"""A step that is printed again later than this after a failure is another attempt's."""
_MAX_STOP_SECONDS = 2.0
"""An agent needs less time to signal its workers, and more to restart them."""
_CLOCK_SKEW_SECONDS = 0.1
_SECONDS_PER_DAY = 86_400
_MAX_JOB_BEGINS = 1000
"""Lines of one node in one file that begin another job."""
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


def find_progress(record: LogRecord) -> Progress | None:
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


def find_step_position(progress: Progress, text: str) -> tuple[float, ...]:
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


def shows_life(record: LogRecord) -> bool:
    """Whether a line shows that its process lives on: it has a step,
    or nothing that may follow a failure.
    """
    return find_progress(record) is not None or _FAILURE_OUTPUT.search(record.text) is None


@dataclass(slots=True)
class _WorkerStop:
    """The lines in which torch's agent reports that it ended its workers because
    one failed on some node.
    """

    first_line: int
    last_line: int
    pids: set[int] = field(default_factory=set)
    has_failed: bool = False
    """Whether one of its own workers failed; an agent reports this once per round."""


@dataclass(slots=True)
class Agent:
    """An agent of torch."""

    first_seconds: float | None
    """Time of its first line, seconds. Only the time of day counts: the line may have no date."""
    last_seconds: float | None = None
    worker_stops: list[_WorkerStop] = field(default_factory=list)
    has_later_output: bool = False
    """Whether something other than a failure was printed between its last line and another agent's.
    """
    later_exception_line: int = 0
    """The line, if any, in which a later exception ended a process. The process is another node's
    if logs aren't merged.
    """
    is_followed_by_new_start: bool = False
    """Whether the first lines of the log, or an earlier step, came again after its last words."""

    def began_before_end(self, other: Agent) -> bool:
        """Whether it began before another one had ended, by the clock."""
        if self.first_seconds is None or other.last_seconds is None:
            return False
        return (
            _CLOCK_SKEW_SECONDS
            < (other.last_seconds - self.first_seconds) % _SECONDS_PER_DAY
            < _SECONDS_PER_DAY / 2
        )


class AttemptMarks:
    """The marks of attempts in the lines of one node in one file."""

    def __init__(self, begins: Iterable[int] = ()) -> None:
        self.agents: dict[tuple[int | None, str | None], Agent] = {}
        self.report_ends: list[int] = []
        """Lines in which an agent's report of failures ends."""
        self._box_ends: dict[int | None, int] = {}
        self.job_begins = [*begins]
        """First lines of jobs behind the first one."""
        self._last_agent: Agent | None = None
        self._has_ended = False
        """Whether a launcher has reported that its processes ended."""
        self._was_terminated = False
        """Whether the scheduler has announced the end of the job."""
        self._failed_ns: int | None = None
        """When the end of a process was reported: 0 if without a time, None if not reported."""
        self._last_raise_lines: dict[int | None, int] = {}
        """Where torch printed a rank's exception last."""
        self._last_steps: dict[Label, int] = {}
        self._opening_shapes: set[str] = set()
        self._opening_line_count = 0
        """Lines of the attempt that may begin one."""

    def drop_job_begins(self, begin_lines: Collection[int]) -> bool:
        """Drop the begins of jobs in these lines; return whether there were any."""
        kept_begins = [begin for begin in self.job_begins if begin not in begin_lines]
        is_changed = len(kept_begins) < len(self.job_begins)
        self.job_begins = kept_begins
        return is_changed

    def start_job(self, line: int) -> None:
        """Take the line in which somebody starts another job."""
        self.job_begins.append(line)
        self._begin_attempt(0, {})

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
            self._take_agent_report(record, report)
        elif report.kind is ReportKind.TERMINATED or (
            report.kind is ReportKind.ENDED and report.tasks
        ):
            self.report_ends.append(record.number)
        self._has_ended |= report.kind in {ReportKind.ENDED, ReportKind.TERMINATED}
        self._was_terminated |= report.kind is ReportKind.TERMINATED and bool(report.reason)
        self._failed_ns = self._failed_ns or record.time_ns or 0

    def take_report_box(self, end_line: int, first_rank: int | None) -> None:
        """Take the end of torch's report about the node with this first rank.

        An agent prints one report, so a second one of the same node is another job's.
        """
        last_end = self._box_ends.get(first_rank)
        if (
            first_rank is not None
            and last_end is not None
            and not any(last_end < begin for begin in self.job_begins)
        ):
            self.job_begins.append(last_end + 1)
        self._box_ends[first_rank] = end_line
        self.report_ends.append(end_line)
        self._has_ended = True

    def _take_agent_report(self, record: LogRecord, report: LauncherReport) -> None:
        log_line = AGENT_LOG_LINE.match(record.text)
        line_seconds = record.time_ns / 1e9 if record.time_ns is not None else None
        if log_line is not None:
            line_seconds = (
                int(log_line["hour"]) * 3600
                + int(log_line["minute"]) * 60
                + float(log_line["second"])
            )
        agent_key = (record.label.task, log_line and log_line["pid"])
        agent = self.agents.setdefault(agent_key, Agent(line_seconds))
        worker_stop = agent.worker_stops[-1] if agent.worker_stops else None
        is_failure = report.kind is ReportKind.ENDED
        if worker_stop is None:
            is_new_stop = True
        elif worker_stop.has_failed:
            is_identified = bool(record.label.node) or any(part is not None for part in agent_key)
            is_new_stop = report.kind is not ReportKind.RESTARTED and (
                agent.has_later_output or is_identified
            )
        else:
            is_after_pause = (
                line_seconds is None
                or agent.last_seconds is None
                or _MAX_STOP_SECONDS
                < (line_seconds - agent.last_seconds) % _SECONDS_PER_DAY
                < _SECONDS_PER_DAY / 2
            )
            is_new_stop = (
                is_after_pause
                and report.pid not in worker_stop.pids
                and (agent.has_later_output or not (is_failure or line_seconds is None))
            )
        if worker_stop is None or is_new_stop:
            agent.worker_stops.append(worker_stop := _WorkerStop(record.number, record.number))
        worker_stop.last_line, agent.last_seconds, self._last_agent = (
            record.number,
            line_seconds,
            agent,
        )
        agent.has_later_output, agent.later_exception_line, agent.is_followed_by_new_start = (
            False,
            0,
            False,
        )
        worker_stop.has_failed |= is_failure
        worker_stop.pids |= {report.pid} if report.pid is not None else set()

    def take(self, record: LogRecord, progress: Progress | None) -> None:
        """Take a line that may begin another job: the first lines of the log come again,
        or an earlier step.
        """
        agent = self._last_agent
        begins_another = self._take_possible_begin(record, progress)
        if agent is None or (
            self.report_ends and self.report_ends[-1] > agent.worker_stops[-1].last_line
        ):
            self.job_begins += (
                [record.number] if begins_another and len(self.job_begins) < _MAX_JOB_BEGINS else []
            )
        elif record.by_torch:
            # no process raises twice without a handler
            previous_stop_line = (
                agent.worker_stops[-2].last_line if len(agent.worker_stops) > 1 else 0
            )
            agent.has_later_output |= (
                TRACEBACK in record.text
                and self._last_raise_lines.get(record.label.rank, 0) > previous_stop_line
            )
            agent.later_exception_line = agent.later_exception_line or (
                record.number if agent.has_later_output else 0
            )
        else:
            agent.has_later_output |= _FAILURE_OUTPUT.search(record.text) is None
            agent.is_followed_by_new_start |= begins_another
        if record.by_torch and TRACEBACK in record.text:
            self._last_raise_lines[record.label.rank] = record.number
            self._failed_ns = self._failed_ns or record.time_ns or 0

    def _take_possible_begin(self, record: LogRecord, progress: Progress | None) -> bool:
        """Take the step or the text of a line; return whether the line begins another attempt."""
        if progress is not None and not record.by_torch:
            return self._take_step(record, progress.step)
        if (
            not self._has_ended
            and self._opening_line_count > _OPENING_LINES
            and not self._opening_shapes
        ):
            return False
        if record.by_torch or _FAILURE_OUTPUT.search(record.text) is not None:
            # what follows may be of the failure
            self._opening_line_count += _OPENING_LINES * bool(record.text.strip())
            return False
        shape = VARYING_PART.sub("#", record.text.strip())[:200]
        self._opening_line_count += 1
        if self._has_ended and shape in self._opening_shapes:
            return self._begin_attempt(1, {})
        if self._opening_line_count <= _OPENING_LINES and not self._has_ended:
            self._opening_shapes.add(shape)
        elif not self._has_ended:
            self._opening_shapes.discard(shape)  # any part of a log may have it
        return False

    def _take_step(self, record: LogRecord, step: int) -> bool:
        """Take a process's step; return whether it begins another attempt: below the report of a
        failure, it's an earlier step than before.
        """
        last_step = self._last_steps.get(record.label, -1)
        self._last_steps[record.label] = step
        if self._failed_ns is None or step >= last_step:
            return False
        # in a shared stream, a slow process may print an earlier step than its peers
        is_after_restart = self._was_terminated or (
            bool(self._failed_ns) and (record.time_ns or 0) - self._failed_ns > _MIN_RESTART_NS
        )
        return (record.label.is_process or is_after_restart) and self._begin_attempt(
            0, {record.label: step}
        )

    def _begin_attempt(self, opening_line_count: int, steps: dict[Label, int]) -> bool:
        """Forget what was taken of the previous attempt; return True."""
        self._has_ended = self._was_terminated = False
        self._failed_ns, self._opening_line_count, self._last_steps = (
            None,
            opening_line_count,
            steps,
        )
        return True
