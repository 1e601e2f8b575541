"""Decide which process each traceback, error message and unlabeled line is about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.causes.cluster_reports import (
    mark_ray_actors,
    read_ray_driver,
    take_reported_exceptions,
    take_spark_tasks,
)
from firstfault_logs.causes.survival import (
    choose_ending,
    drop_survived_tracebacks,
    find_thread_fault,
)
from firstfault_logs.causes.unnamed_ranks import (
    assign_unlabeled_lines,
    drop_kills_below_exceptions,
    drop_repeated_deaths,
    find_ranks_by_device,
    find_ranks_in_errors,
    merge_local_ranks,
    name_remaining_rank,
)
from firstfault_logs.completion.words import FAILURE_REPORT, is_below_error
from firstfault_logs.framing.lines import TRACEBACK
from firstfault_logs.launchers import ReportKind
from firstfault_logs.own_reports import find_last_error, find_uncaught_exception
from firstfault_logs.processes import Process, Processes
from firstfault_logs.tracebacks import (
    MAX_LINES_AFTER_END,
    Traceback,
    find_fault,
    find_shared_tracebacks,
    find_tracebacks,
)

if TYPE_CHECKING:
    from firstfault_logs.attempt_logs import Attempt
    from firstfault_logs.framing.labels import LogRecord

_MAX_LINES_OF_FAILURE = 40
"""Lines of a message in which a failure is reported."""

# torch.multiprocessing.spawn's report of an exception.
_SPAWN_PROCESS_ERROR = LazyPattern(
    r"--[ ]Process[ ](?P<rank>\d{1,6})[ ]terminated[ ]with[ ]the[ ]following[ ]error"
)

# A heading with the rank that the traceback below is about.
_RANK_HEADING = LazyPattern(
    r"(?i)^\W{0,3}(?:global[ _])?rank[ =:]{1,2}(?P<rank>\d{1,6})\W{0,3}(?:error|exception|traceback|failure)\b"
)


class Assignment:
    """Assigns what an attempt's logs contain to its processes, surest evidence first.

    Each step only completes processes about which the steps before left a question open:

    1. each process's own labeled lines
    2. Ray's driver, which prints a process id above the exception of that process
    3. reports of the same failure by two names (a rank and a local rank, a nameless launcher) are
       merged
    4. unlabeled tracebacks, then other unlabeled lines, if only one process can have printed them
    """

    def __init__(self, attempt: Attempt, processes: Processes) -> None:
        self.attempt, self.processes = attempt, processes
        self._ends: dict[str, int] = {}
        """Number of the last line of each file."""
        for stream in attempt.streams.values():
            if stream.tail:
                self._ends[stream.file] = max(
                    self._ends.get(stream.file, 0), stream.tail[-1].number
                )
        self.notes: list[str] = []
        """What could not be read."""
        self.launcher_failures: list[Traceback] = []
        """Exceptions of launchers that failed themselves."""

    def run(self) -> None:
        """Run all steps; they change the processes."""
        for process in list(self.processes.all):
            for stream in process.streams:
                read_ray_driver(self.processes, stream, process)
            self._read_own_lines(process)
        for stream in self.processes.shared:
            read_ray_driver(self.processes, stream)
        merge_local_ranks(self.processes)
        drop_repeated_deaths(self.attempt, self.processes)
        mark_ray_actors(self.attempt, self.processes)
        tracebacks = []
        for stream in self.processes.shared:
            printed, note = find_shared_tracebacks(stream)
            self.notes += [note] if note else []
            tracebacks += [one for one in printed if not self._take_launcher_exception(one)]
        tracebacks = take_spark_tasks(self.processes, tracebacks)
        tracebacks = take_reported_exceptions(self.attempt, self.processes, tracebacks)
        self._assign_tracebacks(tracebacks)
        for stream in self.processes.shared:
            last_number = self._ends.get(stream.file, 0)
            assign_unlabeled_lines(self.attempt, self.processes, stream, last_number)
        drop_kills_below_exceptions(self.processes)
        name_remaining_rank(self.attempt, self.processes)
        for process in self.processes.all:
            process.cite_last_line()

    # --- what a process printed itself ------------------------------------------------------------

    def _read_own_lines(self, process: Process) -> None:
        lines = sorted(
            (record for one in process.streams for record in one.tail),
            key=lambda record: record.number,
        )
        lines = _drop_lines_below_failure(lines)
        process.text = "\n".join(record.text for record in lines)
        if process.is_driver or self._take_headed_tracebacks(process):
            return
        if process.raised is None:
            by_torch = [record for stream in process.streams for record in stream.by_torch]
            process.set_own_report(find_uncaught_exception(by_torch, process.text))
        tracebacks = [
            traceback for stream in process.streams for traceback in find_tracebacks(stream)
        ]
        last = tracebacks[-1] if tracebacks else None
        # Ray's driver prints the exception of a failed task again
        is_rays = (
            last is not None
            and last.stream.label.pid is not None
            and self._has_continued(tracebacks)
        )
        if not process.has_ended and process.raised is None and not is_rays:
            if last is not None and not self._is_survived(process, last):
                process.set_exception(last)
            if process.raised is None and not process.stopped and lines:
                process.set_own_report(find_last_error(lines, self._ends[process.streams[0].file]))
        if process.raised is not None and (fault := find_thread_fault(tracebacks, process.raised)):
            process.set_exception(fault)

    def _take_headed_tracebacks(self, driver: Process) -> bool:
        """Take the exceptions of other ranks that a process printed below their numbers;
        return whether it did.
        """
        for stream in driver.streams:
            above = (excerpt.lines[0].text for excerpt in stream.excerpts)
            is_headed = driver.rank is None and any(map(_RANK_HEADING.match, above))
            for traceback in find_tracebacks(stream) if is_headed else ():
                if heading := _RANK_HEADING.match(traceback.heading):
                    self.processes.find(rank=int(heading["rank"])).set_exception(traceback)
                    driver.is_driver = True
        return driver.is_driver

    @staticmethod
    def _is_survived(process: Process, last: Traceback) -> bool:
        """Whether a process continued after its last traceback,
        or lines of others make that unclear.
        """
        steps = (stream.progress for stream in process.streams if stream.file == last.stream.file)
        has_progress = any(step is not None and step.number > last.lines[1] for step in steps)
        is_over = (
            last.is_handled or last.is_before_success or last.later_lines > MAX_LINES_AFTER_END
        )
        return has_progress or is_over or last.is_mixed

    # --- unlabeled tracebacks ---------------------------------------------------------------------

    def _take_launcher_exception(self, traceback: Traceback) -> bool:
        """Take a traceback that a launcher printed, or that names its rank;
        return whether it is one.
        """
        spawned = _SPAWN_PROCESS_ERROR.search("\n".join((*traceback.lines_around, traceback.text)))
        # the last error above a launcher's own traceback is a worker's
        is_launchers = traceback.is_of_launcher or traceback.is_summary
        logged = set() if is_launchers else find_ranks_in_errors(traceback.lines_around)
        if heading := _RANK_HEADING.match(traceback.heading):
            self.processes.find(rank=int(heading["rank"])).set_exception(traceback)
            return True
        if spawned is not None or (
            len(logged) == 1 and not traceback.is_handled and not traceback.is_before_success
        ):
            process = self.processes.find(
                rank=int(spawned["rank"]) if spawned is not None else min(logged)
            )
            if spawned is not None or not self._is_survived(process, traceback):
                process.set_exception(traceback)
                return True
        if traceback.is_of_launcher and not traceback.is_summary:
            self.launcher_failures.append(traceback)
        return is_launchers

    def _assign_tracebacks(self, tracebacks: Sequence[Traceback]) -> None:
        everything = self.processes.all
        for node in {traceback.stream.label.node for traceback in tracebacks}:
            node_tracebacks = [
                traceback
                for traceback in tracebacks
                if traceback.stream.label.node == node and not traceback.is_mixed
            ]
            is_any_failing = any(process.exit_code for process in everything)
            assigned = [traceback for traceback in node_tracebacks if not traceback.is_handled] or (
                node_tracebacks if is_any_failing else []
            )
            if any(process.uncaught for process in everything):
                # torch puts the rank before the traceback of each exception that ends a process of
                # a group
                counts = Counter(traceback.fault for traceback in assigned)
                # such an exception may be printed without a rank, too
                counts -= Counter(
                    find_fault(process.raised)
                    for process in everything
                    if process.uncaught and process.raised
                )
                assigned = [traceback for traceback in assigned if traceback.fault in counts]
                failing = sum(
                    process.exit_code is not None and process.raised is None
                    for process in everything
                )
                assigned = [
                    traceback for traceback in assigned if counts[traceback.fault] <= failing
                ]
            processes = [
                process for process in everything if not node or process.node in {node, ""}
            ]
            assigned = [
                traceback for traceback in assigned if not self._is_outlived(traceback, processes)
            ]
            assigned = drop_survived_tracebacks(self.attempt, processes, assigned)
            if not assigned or self._has_continued(assigned):
                continue
            by_rank = find_ranks_by_device(self.attempt, self.processes, assigned)
            for rank, traceback in by_rank.items():
                self.processes.find(rank=rank, node=node).set_exception(traceback)
            if not by_rank:
                self._assign_on_node(assigned, processes)

    @staticmethod
    def _is_outlived(traceback: Traceback, processes: Sequence[Process]) -> bool:
        """Whether each process of the node printed a later step, so none of them had raised."""
        steps = [
            max(
                (one.progress.number for one in process.streams if one.progress is not None),
                default=0,
            )
            for process in processes
            if process.rank is not None
        ]
        return bool(steps) and min(steps) > traceback.lines[1]

    def _assign_on_node(
        self, tracebacks: Sequence[Traceback], processes: Sequence[Process]
    ) -> None:
        ended = (
            process
            for process in processes
            if process.exit_code or (process.launcher_text and not process.has_ended)
        )
        failing = [
            process for process in ended if process.raised is None and TRACEBACK not in process.text
        ]
        by_fault = {traceback.fault: traceback for traceback in tracebacks}
        is_alike = len(by_fault) == 1 and len({process.exit_code for process in failing}) == 1
        if failing and (len(failing) == 1 or is_alike):
            for process in failing:
                process.set_exception(choose_ending(tracebacks))
            return
        if not self.processes.all and not self.attempt.is_torchrun:
            last = tracebacks[-1]  # one process: its last exception ended it
            if last.later_lines > MAX_LINES_AFTER_END or last.is_before_success or last.is_handled:
                return
            by_fault = {last.fault: choose_ending(tracebacks)}
        for fault, traceback in by_fault.items():
            process = Process(node=traceback.stream.label.node)
            process.set_exception(traceback)
            repeated = [other for other in tracebacks if other.fault == fault]
            process.lines |= {
                (other.stream.file, *other.lines) for other in (*repeated[:1], *repeated[-1:])
            }
            self.processes.all.append(process)

    def _has_continued(self, tracebacks: Sequence[Traceback]) -> bool:
        """Whether the job continued after these tracebacks,
        and no line reports a process that ended.
        """
        if self.attempt.entries or any(
            report.kind is ReportKind.ENDED for _, _, report in self.attempt.reports
        ):
            return False
        if self.attempt.is_torchrun and all(traceback.later_lines for traceback in tracebacks):
            return True  # its agent would have reported the end
        last = max((traceback.lines[1] for traceback in tracebacks), default=0)
        streams = self.attempt.streams.values()
        return any(
            stream.progress is not None and stream.progress.number > last for stream in streams
        )


def _drop_lines_below_failure(lines: list[LogRecord]) -> list[LogRecord]:
    """Return lines without what a library printed below a failure while the process ended,
    which would hide it.
    """
    end = len(lines)
    while end > 1 and is_below_error(lines[end - 1].text):
        end -= 1
    above = lines[max(end - _MAX_LINES_OF_FAILURE, 0) : end]
    has_failed = any(FAILURE_REPORT.search(record.text) for record in above)
    return lines[:end] if has_failed else lines
