"""The processes, nodes and launchers in the logs of one attempt,
each with everything that is known about it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from firstfault.exceptions.exceptions_in_text import parse_exceptions
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault.utils.stored_text import clean
from firstfault_logs.framing.labels import parse_time_ns
from firstfault_logs.launchers import LauncherReport, ReportKind

if TYPE_CHECKING:
    from firstfault.model import ExceptionInfo
    from firstfault_logs.attempt_logs import Attempt, Stream
    from firstfault_logs.attempts import Where
    from firstfault_logs.launchers import Entry
    from firstfault_logs.own_reports import OwnReport
    from firstfault_logs.tracebacks import Traceback

MAX_TEXT_CHARACTERS = 64 * 1024
LAUNCHER_STOPPED = "its launcher ended it because of another failure"
SCHEDULER_STOPPED = "its scheduler ended the job"
NO_EXIT_STATUS = "no exit status in the log"
LOST_WITH_NODE = "its node was lost"
_WRAPPER = "torch/distributed/elastic/multiprocessing/errors/"
"""The frames of torch's `record` do not belong to the failure."""

# Ends the name of a pod that belongs to several: its number, perhaps its role and a random part.
POD_NUMBER = LazyPattern(
    r"(?:-(?:master|worker|chief|ps|launcher|node|replica|workers?))?-\d{1,6}(?:-[a-z0-9]{5})?$"
)


@dataclass(slots=True)
class Process:
    """One training process, as the logs show it."""

    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    node: str = ""
    host: str = ""
    ip: str = ""
    exit_code: int | None = None
    signal: str = ""
    is_oom: bool = False
    stopped: str = ""
    """Why its launcher ended it, or empty if the log doesn't show that it did."""
    stop_signal: str = ""
    """The signal that its launcher sent, or empty if the log doesn't have it."""
    streams: list[Stream] = field(default_factory=list)
    raised: ExceptionInfo | None = None
    raised_text: str = ""
    text: str = ""
    """The end of what it printed."""
    launcher_text: str = ""
    """What its launcher printed about its end."""
    launcher_time_ns: int | None = None
    """When it printed that."""
    own_error: str = ""
    """What it printed last about a failure."""
    reports_own_end: bool = False
    """Whether it printed itself how it ended."""
    time_ns: int | None = None
    hardware_error: str = ""
    """What the kernel's log reports about its GPU."""
    is_driver: bool = False
    """Whether what it printed is about a failure of another process, which it started."""
    uncaught: bool = False
    """Whether torch printed its exception because nothing had caught it."""
    is_ended_by_exception: bool = False
    """Whether Python printed its exception because nothing had caught it."""
    lines: set[tuple[str, int, int]] = field(default_factory=set)
    """Files, and the first and last lines in them that are about it."""

    @property
    def has_ended(self) -> bool:
        """Whether the log shows how it ended."""
        return self.exit_code is not None or bool(self.signal)

    @property
    def is_known(self) -> bool:
        """Whether a rank, a local rank or a process id distinguishes it."""
        return not (self.rank is None and self.local_rank is None and self.pid is None)

    @property
    def message(self) -> str:
        """What it printed last about a failure, or its launcher about it,
        if no line reports how it ended.
        """
        if self.has_ended or self.raised is not None or self.stopped:
            return ""
        return self.launcher_text or self.own_error

    @property
    def has_failed(self) -> bool:
        """Whether it ended by itself, or wasn't killed by its launcher."""
        if self.raised is not None or self.is_oom:
            return True
        return not self.stopped and bool(self.signal or self.exit_code or self.message)

    def set_exception(self, traceback: Traceback) -> None:
        """Record the exception that ended it."""
        self.raised, self.raised_text = traceback.exception, traceback.text
        self.is_ended_by_exception = traceback.is_uncaught
        self.time_ns = self.time_ns or traceback.time_ns
        self.lines.add((traceback.stream.file, *traceback.lines))

    def set_own_report(self, report: OwnReport) -> None:
        """Record what it printed itself about its end, if anything."""
        if not report.text:
            return
        self.raised = report.raised
        self.signal = self.signal or report.signal
        self.raised_text = report.text if report.raised is not None else ""
        self.own_error = "" if report.raised is not None or report.signal else report.text
        self.reports_own_end = bool(report.signal)
        self.uncaught = report.uncaught
        self.lines.add((self.streams[0].file, *report.lines))
        first, last = report.lines
        records = (
            record
            for stream in self.streams
            for record in stream.tail
            if first <= record.number <= last
        )
        times = (record.time_ns for record in records if record.time_ns is not None)
        # other lines above may be much older than the failure
        self.time_ns = self.time_ns or min(times, default=None)

    def cite_last_line(self) -> None:
        """Refer to the last line of a process if no line reports its end."""
        last = max((stream.tail[-1].number for stream in self.streams if stream.tail), default=None)
        if not self.lines and last is not None:
            self.lines.add((self.streams[0].file, last, last))

    def may_be_on(self, node: str) -> bool:
        """Whether it may have run on a node of this name; an empty name is any node's."""
        return not node or not self.node or node in {self.node, self.host, self.ip}


class Processes:
    """Finds out which streams, statements and boxes are about the same process."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.all: list[Process] = []
        self._by_rank: dict[int, Process] = {}
        self.shared: list[Stream] = []
        """Streams of several processes, or of one that nothing names."""
        self.tasks_are_ranks = not attempt.tasks_are_nodes and not attempt.is_torchrun
        labels = {
            (one.label.task, one.label.node)
            for one in attempt.streams.values()
            if one.label.task is not None
        }
        # "10.0.0.1 [0]" and "10.0.0.2 [0]" are two processes
        self.tasks_are_local = len({label for label, _ in labels}) < len(labels)
        self.rank_by_node = self._find_rank_by_node()
        self.task_nodes = {
            task: report.node
            for _, _, report in attempt.reports
            for task in report.tasks
            if report.node
        }
        for file, node, entry in attempt.entries:
            self._take_entry(entry, file, node)
        kept = (stream for stream in attempt.streams.values() if stream.tail)
        for stream in sorted(
            kept, key=lambda one: (one.label.rank is None, one.file, one.tail[0].number)
        ):
            self._take_stream(stream)

    def _find_rank_by_node(self) -> dict[str, int]:
        """Return the rank of each node's only process;
        empty if nodes may have several processes.
        """
        ranks: dict[str, set[int]] = defaultdict(set)
        for stream in self.attempt.streams.values():
            label = stream.label
            if label.node and not label.is_process:
                own_index = {label.node_index} if label.node_index is not None else set()
                ranks[label.node] |= stream.declared_ranks or own_index
        only_ranks = {node: min(numbers) for node, numbers in ranks.items() if len(numbers) == 1}
        # without a world size, nodes numbered from 0 have one process each if no process has
        # another number
        is_by_process = any(stream.label.is_process for stream in self.attempt.streams.values())
        size = self.attempt.world_size or (
            0 if self.attempt.is_torchrun or is_by_process else len(ranks)
        )
        is_one_each = 1 < len(only_ranks) == len(ranks) == size and sorted(
            only_ranks.values()
        ) == list(range(size))
        return only_ranks if is_one_each else {}

    def find(
        self,
        *,
        rank: int | None = None,
        pid: int | None = None,
        local_rank: int | None = None,
        node: str = "",
    ) -> Process:
        """Return the process that is known by one of these, or a new one."""
        process = None
        if rank is None and pid is not None:
            rank = self.attempt.rank_by_pid.get(pid)
        if rank is not None:
            process = self._by_rank.get(rank)
        if process is None and pid is not None:
            process = self._only(lambda item: item.pid == pid and item.may_be_on(node))
        if process is None and local_rank is not None:
            process = self._only(
                lambda item: item.local_rank == local_rank and item.may_be_on(node)
            )
        if process is not None and rank is not None and process.rank not in {None, rank}:
            process = None
        if process is None:
            process = Process()
            self.all.append(process)
        process.rank = process.rank if process.rank is not None else rank
        if process.rank is not None:
            self._by_rank[process.rank] = process
        process.pid = process.pid or pid
        process.local_rank = process.local_rank if process.local_rank is not None else local_rank
        process.node = process.node or node
        return process

    def _only(self, fits: Callable[[Process], bool]) -> Process | None:
        matching = [item for item in self.all if fits(item)]
        return matching[0] if len(matching) == 1 else None

    def resolve_node(self, node: str) -> str:
        """Return the name of a node, also for one that is known by the number of its task."""
        if node.startswith("task "):
            return self.task_nodes.get(int(node[5:]), node)
        return node

    def _take_entry(self, entry: Entry, file: str, node: str) -> None:
        node_name = self.resolve_node(node) or entry.host
        process = self.find(
            rank=entry.rank, pid=entry.pid, local_rank=entry.local_rank, node=node_name
        )
        process.host = process.host or entry.host
        process.exit_code, process.signal = entry.exit_code, entry.signal
        process.time_ns = process.time_ns or parse_time_ns(entry.time.replace("_", "T"))
        process.lines.add((file, entry.number, entry.last))
        text = "\n".join(entry.traceback)
        if text and (raised := exception_in(text, whole=True)):
            process.raised, process.raised_text = raised, text

    def _take_stream(self, stream: Stream) -> None:
        label = stream.label
        node = self.resolve_node(stream.label.node)
        if self.tasks_are_local and label.task is not None:
            local = label.task if label.local_rank is None else label.local_rank
            label = label._replace(local_rank=local, task=None)
        rank = (
            label.rank if label.rank is not None else label.task if self.tasks_are_ranks else None
        )
        rank = rank if label.is_process else self.rank_by_node.get(node)
        if label.task is not None and not self.tasks_are_ranks:
            node = node or self.resolve_node(f"task {label.task}")
        if rank is None and label.local_rank is not None:
            first = self.find_first_rank((stream.file, stream.label.node))
            rank = None if first is None else first + label.local_rank
        if rank is None and label.local_rank is None and label.pid is None:
            self.shared.append(replace(stream, label=label._replace(node=node)))
            return
        if rank is not None and not node:
            node = self.task_nodes.get(rank, "") if self.tasks_are_ranks else ""
        process = self.find(rank=rank, pid=label.pid, local_rank=label.local_rank, node=node)
        process.ip = process.ip or label.ip
        process.streams.append(stream)

    def find_first_rank(self, where: Where) -> int | None:
        """Return the rank of the first worker of a node, or None if it isn't known."""
        first_ranks = self.attempt.first_ranks.get(where)
        # a number of ranks that isn't stated as the job's may be that of a group
        return first_ranks.find_first(self.attempt.size.ranks) if first_ranks is not None else None

    def find_spawned(self, pid: int) -> tuple[int | None, int] | None:
        """Return the rank, if it's known, and the local rank of a process that its launcher
        started, or None if the process id was printed for no node or for several nodes.
        """
        candidates = [
            (self.find_first_rank(where), one.local_rank_by_pid[pid])
            for where, one in self.attempt.first_ranks.items()
            if pid in one.local_rank_by_pid
        ]
        if len(candidates) != 1:
            return None
        first, local = candidates[0]
        return (None if first is None else first + local), local

    def find_by_node(self, node: str) -> Process:
        """Return the process that is known by its node only, or a new one."""
        process = self._only(
            lambda item: bool(node) and item.node == node and not (item.is_known or item.raised)
        )
        if process is None:
            process = Process(node=node)
            self.all.append(process)
        return process


_HEALTHY_POD_STATES = (
    "Running",
    "Completed",
    "Succeeded",
    "Pending",
    "ContainerCreating",
    "PodInitializing",
)
"""The states of pods that haven't failed."""

# Ends the name of a pod that may replace another one.
_POD_SUFFIX = LazyPattern(r"-[a-z0-9]{5}$")


class ReportedEnds:
    """Adds what launchers reported about the ends of processes to these."""

    def __init__(self, attempt: Attempt, processes: Processes) -> None:
        self._attempt, self._processes = attempt, processes

    def take_reports(self) -> None:
        """Take the reports on processes that ended or were stopped, in the order of the log."""
        for file, node, report in self._attempt.reports:
            self._take_report(file, node, report)

    def _take_report(self, file: str, node: str, report: LauncherReport) -> None:
        if report.kind not in {ReportKind.ENDED, ReportKind.STOPPED, ReportKind.OOM}:
            return
        node = self._processes.resolve_node(report.node or report.ip or node)
        for process in self._find_reported(file, node, report):
            process.lines.add((file, report.number, report.number))
            process.node = process.node or node
            process.ip = process.ip or report.ip
            process.is_oom |= report.is_oom
            if report.kind is ReportKind.STOPPED:
                self._take_stop(process, report)
            elif not process.has_ended:
                self._take_end(process, report, node)

    def _take_stop(self, process: Process, report: LauncherReport) -> None:
        if process.has_ended and process.signal != report.signal:
            return
        # srun prints the first task that SIGTERM ended before it ends all others
        has_one_rank = len(report.tasks or report.ranks) == 1
        is_first = bool(report.tasks) and has_one_rank and self._attempt.reports[0][2] is report
        if is_first and not process.has_ended:
            process.signal, process.stopped = "SIGTERM", ""
            process.launcher_time_ns = report.time_ns
            return
        if process.has_ended:
            process.exit_code = None  # its launcher's signal
        else:
            process.launcher_time_ns = None
        process.signal, process.stopped = "", LAUNCHER_STOPPED
        process.stop_signal = report.signal

    def _take_end(self, process: Process, report: LauncherReport, node: str) -> None:
        is_after_rest_stopped = (
            bool(report.tasks) and report.signal == "SIGKILL" and self._rest_stopped_before(report)
        )
        if is_after_rest_stopped:
            is_node_lost = any(
                other.kind is ReportKind.LOST and other.node == node
                for _, _, other in self._attempt.reports
            )
            process.stopped = LOST_WITH_NODE if is_node_lost and node else LAUNCHER_STOPPED
            process.stop_signal = "" if is_node_lost else report.signal
            process.exit_code, process.signal = None, ""
        else:
            process.stopped = ""
            process.exit_code = report.exit_code
            process.signal = report.signal or ("SIGKILL" if report.is_oom else "")
        process.launcher_text, process.launcher_time_ns = report.text, report.time_ns

    def _find_reported(self, file: str, node: str, report: LauncherReport) -> list[Process]:
        """Return the processes that a report is about."""
        task_ranks = report.tasks if self._processes.tasks_are_ranks else ()
        ranks = task_ranks if report.tasks else report.ranks
        if not ranks and report.local_rank is None and node in self._processes.rank_by_node:
            ranks = (self._processes.rank_by_node[node],)
        elif not ranks and report.local_rank is not None:
            first_rank = self._processes.find_first_rank((file, node))
            ranks = () if first_rank is None else (first_rank + report.local_rank,)
        if ranks:
            local_rank = report.local_rank if len(ranks) == 1 else None
            return [
                self._processes.find(rank=rank, pid=report.pid, local_rank=local_rank, node=node)
                for rank in ranks
            ]
        if report.tasks:
            return []
        launched_ranks = (
            self._processes.find_spawned(report.pid) if report.pid is not None else None
        )
        if launched_ranks is not None and report.local_rank is None:
            rank, local_rank = launched_ranks
            return [
                self._processes.find(rank=rank, pid=report.pid, local_rank=local_rank, node=node)
            ]
        if report.pid is not None or report.local_rank is not None:
            return [self._processes.find(pid=report.pid, local_rank=report.local_rank, node=node)]
        is_end_of_pod = report.kind is ReportKind.ENDED and self._is_failed_pod_of_job(node)
        return [self._processes.find_by_node(node)] if is_end_of_pod else []

    def _rest_stopped_before(self, report: LauncherReport) -> bool:
        earlier = (
            other.kind for _, _, other in self._attempt.reports if other.number < report.number
        )
        return ReportKind.REST_STOPPED in earlier

    def _is_failed_pod_of_job(self, pod: str) -> bool:
        """Whether a pod in a table is one of the job's that failed in the end:
        a table may have pods of other jobs.
        """
        state_by_pod = self._attempt.listed_pods
        if pod not in state_by_pod:
            return True
        name = _POD_SUFFIX.sub("", pod)
        replacements = (other for other in state_by_pod if _POD_SUFFIX.sub("", other) == name)
        if any(state_by_pod[other] in _HEALTHY_POD_STATES for other in (pod, *replacements)):
            return False
        printing_pods = {
            stream.label.node for stream in self._attempt.streams.values() if stream.label.node
        }
        if printing_pods:
            return pod in printing_pods
        job = POD_NUMBER.sub("", pod)
        other_pods = (other for other in state_by_pod if other != pod)
        return len(state_by_pod) == 1 or any(
            POD_NUMBER.sub("", other) == job for other in other_pods
        )

    def take_launcher_ends(self) -> None:
        """Take launchers that ended with an error, such as torchrun in a task of srun:
        nothing else shows a failure.
        """
        for file, node, report in self._attempt.reports:
            if (
                report.kind is ReportKind.ENDED
                and report.tasks
                and (report.exit_code or report.signal)
            ):
                self._processes.all.append(
                    Process(
                        node=self._processes.resolve_node(report.node or node),
                        exit_code=report.exit_code,
                        signal=report.signal,
                        launcher_text=report.text,
                        launcher_time_ns=report.time_ns,
                        lines={(file, report.number, report.number)},
                    )
                )


def exception_in(text: str, *, whole: bool) -> ExceptionInfo | None:
    """Return the exception of the last traceback in a text, with its causes, printed before it."""
    chain = parse_exceptions(clean(text, MAX_TEXT_CHARACTERS), whole=whole)
    if not chain:
        return None
    first, *causes = (
        replace(link, frames=tuple(frame for frame in link.frames if _WRAPPER not in frame.file))
        for link in chain
    )
    return replace(first, relation="", causes=tuple(causes))
