"""Split the logs of a job into attempts: torch's agents restart workers, and several jobs may write
to one file.

`attempts` has the marks, which are collected per node and file while reading. They're counted here.
Starts without anything below are no attempts: a launcher printed its first lines, or its command,
again at its end.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from firstfault.exceptions.source_files import is_library_file
from firstfault_logs.attempt_logs import Attempt, Stream
from firstfault_logs.framing.lines import FRAME_LINE, TRACEBACK
from firstfault_logs.launchers import ReportKind
from firstfault_logs.tracebacks import LAUNCHER_FILE

if TYPE_CHECKING:
    from typing import TypeAlias

    from firstfault_logs.attempts import Agent, AttemptMarks, Where

    Key: TypeAlias = "tuple[int, int]"  # number of the job, and of its round

_MAX_BANNER_LINES = 10
"""Lines of a launcher when it starts; more are a program's."""
_MAX_LINES = 200
"""The same with a launcher's exceptions."""
_MIN_LATER_NS = 60_000_000_000
"""What is printed so much later isn't the end of the same start."""
_MAX_ATTEMPTS = 100
"""Those before count as one."""


def split_attempts(logs: Attempt, marks_by_node: Mapping[Where, AttemptMarks]) -> list[Attempt]:
    """Return the attempts in the logs of a job, in order.

    Args:
        logs: what all of them contain.
        marks_by_node: the marks of attempts that were found while reading.
    """
    index = _AttemptIndex(marks_by_node)
    attempts = _split(logs, index)
    # dropping starts shifts the numbers of later ones, so each pass drops only those that it has
    # looked at
    while (starts := _find_empty_starts(attempts)) and index.drop_job_starts(starts):
        index = _AttemptIndex(marks_by_node)
        attempts = _split(logs, index)
    return attempts


def _split(logs: Attempt, index: _AttemptIndex) -> list[Attempt]:
    if index.count == 1:
        return [logs]
    attempts = [replace(logs, streams={}, reports=[], entries=[]) for _ in range(index.count)]
    for key, stream in logs.streams.items():
        for attempt_number, part in _split_stream(stream, index).items():
            attempts[attempt_number].streams[key] = part
    for file, node, report in logs.reports:
        number = index.find_attempt((file, node), report.number)
        attempts[number].reports.append((file, node, report))
    for file, node, entry in logs.entries:
        number = index.find_attempt((file, node), entry.number)
        attempts[number].entries.append((file, node, entry))
    return attempts


def _split_stream(stream: Stream, index: _AttemptIndex) -> dict[int, Stream]:
    """Return what was printed in each attempt, by its number."""
    streams: dict[int, Stream] = {}
    where = (stream.file, stream.node)

    def part(number: int) -> Stream:
        return streams.setdefault(
            index.find_attempt(where, number),
            Stream(*where, stream.label, declared_ranks=stream.declared_ranks),
        )

    for record in stream.tail:
        part(record.number).tail.append(record)
    for record in stream.by_torch:
        part(record.number).by_torch.append(record)
    for record in stream.completions or ():
        at = part(record.number)
        at.completions = at.completions or deque()
        at.completions.append(record)
    for excerpt in stream.excerpts:
        begin = excerpt.lines[excerpt.at].number
        of = index.find_attempt(where, begin)
        lines = [
            record for record in excerpt.lines if index.find_attempt(where, record.number) == of
        ]
        part(begin).excerpts.append(replace(excerpt, lines=lines))
    if stream.progress is not None:
        part(stream.progress.number).progress = stream.progress
        part(stream.progress.number).loops = stream.loops
    for step in stream.last_steps:
        part(step.number).last_steps.append(step)
    return streams


class _AttemptIndex:
    """Finds the attempt to which a line belongs."""

    def __init__(self, marks_by_node: Mapping[Where, AttemptMarks]) -> None:
        self._marks_by_node = marks_by_node
        jobs_by_node = {where: _list_jobs(marks) for where, marks in marks_by_node.items()}
        self._begins: dict[Where, list[tuple[int, Key]]] = {where: [] for where in jobs_by_node}
        for job_number in range(max(map(len, jobs_by_node.values()), default=0)):
            current_jobs = {
                where: node_jobs[job_number]
                for where, node_jobs in jobs_by_node.items()
                if len(node_jobs) > job_number
            }
            round_count = max(job.round_count for job in current_jobs.values())
            if not any(job.report_ends for job in current_jobs.values()):
                round_count += any(
                    job.has_later_output(round_count) for job in current_jobs.values()
                )
            for where, job in current_jobs.items():
                self._begins[where] += [
                    (line, (job_number, round_number))
                    for line, round_number in job.find_begins(round_count)
                ]
        keys = sorted({key for begins in self._begins.values() for _, key in begins})
        self.count = max(min(len(keys), _MAX_ATTEMPTS), 1)
        self._attempt_numbers = {
            key: max(index + self.count - len(keys), 0) for index, key in enumerate(keys)
        }

    def drop_job_starts(self, attempt_numbers: Iterable[int]) -> bool:
        """Drop the starts of jobs with which attempts of these numbers begin;
        return whether there were any.
        """
        keys = {
            key
            for key, attempt_number in self._attempt_numbers.items()
            if attempt_number in attempt_numbers and key[1] == 0
        }
        # no agent's round has ended in it
        keys = {(job, 0) for job, _ in keys if (job, 1) not in self._attempt_numbers}
        is_changed = False
        for where, begins in self._begins.items():
            is_changed |= self._marks_by_node[where].drop_job_begins(
                {line for line, key in begins if key in keys}
            )
        return is_changed

    def find_attempt(self, where: Where, line: int) -> int:
        """Return the number of a line's attempt."""
        # tasks without a node are reported together
        begins = self._begins.get(where) or self._begins[where[0], ""]
        return self._attempt_numbers[begins[bisect_right(begins, (line, (1 << 62, 0))) - 1][1]]


def _list_jobs(marks: AttemptMarks) -> list[_Job]:
    """Return the statements of the agents of each job."""
    begins = [
        0,
        *(begin for begin in marks.job_begins if not _begins_log_of_another_node(marks, begin)),
        1 << 62,
    ]
    return [
        _Job(
            begin,
            list(_cut_to_lines(marks.agents.values(), begin, end)),
            [line for line in marks.report_ends if begin <= line < end],
        )
        for begin, end in itertools.pairwise(begins)
    ]


def _cut_to_lines(agents: Iterable[Agent], begin: int, end: int) -> Iterator[Agent]:
    """Yield the agents that stopped workers in these lines, each with these stops only."""
    for agent in agents:
        stops = [stop for stop in agent.worker_stops if begin <= stop.first_line < end]
        if stops:
            yield replace(agent, worker_stops=stops)


def _begins_log_of_another_node(marks: AttemptMarks, begin: int) -> bool:
    """Whether lines go back in time here: the nodes' logs were put behind one another."""
    agents = marks.agents.values()
    last_agent_above = max(
        (agent for agent in agents if agent.worker_stops[-1].last_line < begin),
        key=lambda agent: agent.worker_stops[-1].last_line,
        default=None,
    )
    return last_agent_above is not None and any(
        agent.worker_stops[0].first_line > begin and agent.began_before_end(last_agent_above)
        for agent in agents
    )


@dataclass(slots=True)
class _Job:
    """The rounds of one job in the lines of one node in one file."""

    begin: int
    agents: list[Agent]
    report_ends: list[int]

    def __post_init__(self) -> None:
        self.agents.sort(key=lambda agent: agent.worker_stops[0].first_line)

    @property
    def round_count(self) -> int:
        """Number of rounds that ended."""
        return max((len(agent.worker_stops) for agent in self.agents), default=0)

    def has_later_output(self, round_count: int) -> bool:
        """Whether anything was printed after this number of rounds."""
        last_agents = [agent for agent in self.agents if len(agent.worker_stops) == round_count]
        return any(
            agent.has_later_output
            for agent in (last_agents[-1:] if self._is_interleaved else last_agents)
        )

    @property
    def _is_interleaved(self) -> bool:
        """Whether lines of several agents are in the order of time, and not behind one another."""
        round_ends = self._find_round_ends()
        round_starts = [
            min(
                agent.worker_stops[round_index].first_line
                for agent in self.agents
                if len(agent.worker_stops) > round_index
            )
            for round_index in range(self.round_count)
        ]
        is_backwards = any(
            agent.began_before_end(previous_agent)
            for previous_agent, agent in itertools.pairwise(self.agents)
        )
        is_backwards |= any(agent.is_followed_by_new_start for agent in self.agents[:-1])
        spans = [
            (agent.worker_stops[0].first_line, agent.worker_stops[-1].last_line)
            for agent in self.agents
        ]
        are_agents_apart = all(end < begin for (_, end), (begin, _) in itertools.pairwise(spans))
        are_rounds_apart = all(
            end < begin for end, begin in zip(round_ends, round_starts[1:], strict=False)
        )
        return not are_agents_apart or (are_rounds_apart and not is_backwards)

    def _find_round_ends(self) -> list[int]:
        """Return the line in which each round ends:
        workers start when all agents have ended those before.
        """
        return [
            max(
                agent.worker_stops[round_index].last_line
                for agent in self.agents
                if len(agent.worker_stops) > round_index
            )
            for round_index in range(self.round_count)
        ]

    def find_begins(self, round_count: int) -> Iterator[tuple[int, int]]:
        """Yield the first line and the number of each round that the job had."""
        yield self.begin, 0
        if self._is_interleaved:
            yield from (
                (end + 1, round_number)
                for round_number, end in enumerate(self._find_round_ends(), 1)
                if round_number < round_count
            )
            return
        for previous_agent, agent in zip([None, *self.agents], self.agents, strict=False):
            if previous_agent is not None:
                last_line = previous_agent.worker_stops[-1].last_line
                report_ends = [
                    line + 1
                    for line in self.report_ends
                    if last_line < line < agent.worker_stops[0].first_line
                ]
                yield (
                    max(report_ends, default=previous_agent.later_exception_line or last_line + 1),
                    0,
                )
            yield from (
                (worker_stop.last_line + 1, round_number)
                for round_number, worker_stop in enumerate(agent.worker_stops, 1)
                if round_number < round_count
            )


@cache
def _job_number() -> re.Pattern[str]:
    return re.compile(r"\bjob(?:[_ ]?id)?[ =:#]{1,3}(\d{3,12})\b", re.IGNORECASE)


def _find_empty_starts(attempts: Sequence[Attempt]) -> list[int]:
    """Return the indices of attempts that are only the end of the previous attempt.

    A start is followed by steps, lines of ranks, a failure of its own, a later date, or another
    job's number.
    """
    return [
        number
        for number in range(1, len(attempts))
        if _is_empty(attempts[number], attempts[number - 1])
    ]


def _is_empty(attempt: Attempt, before: Attempt) -> bool:
    streams = [stream for stream in attempt.streams.values() if stream.tail]
    if any(stream.progress is not None or stream.by_torch for stream in streams):
        return False
    if sum(len(stream.tail) for stream in streams) > _MAX_LINES or (
        _has_ends(attempt) and _has_ends(before)
    ):
        return False
    if sum(map(_count_own_lines, streams)) > _MAX_BANNER_LINES:
        return False
    numbers = _find_job_numbers(attempt)
    earlier = _find_job_numbers(before)
    if earlier and numbers - earlier:
        return False
    begin = min(_times(attempt), default=None)
    end = max(_times(before), default=None)
    return begin is None or end is None or begin - end < _MIN_LATER_NS


def _has_ends(attempt: Attempt) -> bool:
    return bool(attempt.entries) or any(
        report.kind is ReportKind.ENDED for _, _, report in attempt.reports
    )


def _count_own_lines(stream: Stream) -> int:
    """Return how many lines aren't of a launcher's exception; more than a banner has,
    if another one is among them.
    """
    for record in stream.tail:
        frame = FRAME_LINE.match(record.text)
        if frame is not None and not (
            LAUNCHER_FILE.search(frame["file"]) or is_library_file(frame["file"])
        ):
            return _MAX_BANNER_LINES + 1
    return sum(
        not record.text[:1].isspace() and TRACEBACK not in record.text for record in stream.tail
    )


def _find_job_numbers(attempt: Attempt) -> set[str]:
    return {
        match[1]
        for stream in attempt.streams.values()
        for record in stream.tail
        for match in _job_number().finditer(record.text)
    }


def _times(attempt: Attempt) -> list[int]:
    return [
        record.time_ns
        for stream in attempt.streams.values()
        for record in stream.tail
        if record.time_ns is not None
    ]
