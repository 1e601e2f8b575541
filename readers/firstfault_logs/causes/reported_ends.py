"""Find out how processes ended, from the reports of launchers and schedulers.

Reports on a failure that another process already has are left out: by its local rank, by a
launcher's exit code, or by the kills of a cleanup.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from firstfault.evidence.signatures import Role
from firstfault.evidence.texts import classify
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.launchers import LauncherReport, ReportKind
from firstfault_logs.processes import LAUNCHER_STOPPED, LOST_WITH_NODE, POD_NUMBER, Process

if TYPE_CHECKING:
    from firstfault_logs.attempt_logs import Attempt
    from firstfault_logs.processes import Processes


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
            first_rank = self._attempt.find_first_rank((file, node))
            ranks = () if first_rank is None else (first_rank + report.local_rank,)
        if ranks:
            local_rank = report.local_rank if len(ranks) == 1 else None
            return [
                self._processes.find(rank=rank, pid=report.pid, local_rank=local_rank, node=node)
                for rank in ranks
            ]
        if report.tasks:
            return []
        launched_ranks = self._attempt.find_spawned(report.pid) if report.pid is not None else None
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


def merge_local_ranks(processes: Processes) -> None:
    """Merge ends that torch's agent reported by local rank with exceptions
    that were printed by rank.

    `failed (exitcode: 1) local_rank: 3 (pid: 88123)` is about one of the ranks that raised, not
    a further failure.
    """
    everything = processes.all
    ended = [one for one in everything if one.rank is None and one.has_ended and not one.streams]
    ended = [one for one in ended if one.raised is None and one.local_rank is not None]
    raised = [
        one
        for one in everything
        if one.raised is not None and not one.has_ended and one.rank is not None
    ]
    if len(ended) > len(raised):
        return
    if len(ended) == len(raised) == 1:
        raised[0].exit_code, raised[0].signal = ended[0].exit_code, ended[0].signal
        raised[0].pid, raised[0].local_rank = ended[0].pid, ended[0].local_rank
        raised[0].lines |= ended[0].lines
    processes.all = [one for one in everything if all(one is not other for other in ended)]


def drop_repeated_deaths(attempt: Attempt, processes: Processes) -> None:
    """Drop deaths of unknown processes that another failure explains.

    A launcher may exit with the code of one of its workers, and it kills the rest. No exception
    explains a kill.
    """
    processes.all = [one for one in processes.all if not _has_been_restarted(attempt, one)]
    everything = processes.all
    ends = {one.signal for one in everything if one.is_known and one.has_ended}
    is_explained = bool(ends) or any(one.raised is not None for one in everything)
    explained = {"", "SIGABRT", "SIGTERM", *ends} if is_explained else set()
    processes.all = [
        one
        for one in everything
        if not (one.has_ended or (one.launcher_text and one.raised is None))
        or one.is_known
        or one.is_oom
        or not (one.signal in explained or _is_of_cleanup(attempt, one))
    ]


def _has_been_restarted(attempt: Attempt, process: Process) -> bool:
    """Whether the training went on below a report, without an exit code,
    that a container had ended.
    """
    if (
        process.is_known
        or process.has_ended
        or process.raised is not None
        or not process.launcher_text
    ):
        return False
    streams = attempt.streams.values()
    return all(
        any(one.has_steps_after(last) for one in streams if one.file == file)
        for file, _, last in process.lines
    )


def _is_of_cleanup(attempt: Attempt, process: Process) -> bool:
    """Whether a kill follows the report of another failure, or a node is lost anyway."""
    if process.signal != "SIGKILL":
        return False
    begins = {file: first for file, first, _ in process.lines}
    failed = [
        (file, report) for file, _, report in attempt.reports if report.kind is ReportKind.ENDED
    ]
    is_later = any(
        report.number < begins.get(file, 0)
        and report.exit_code
        and report.text != process.launcher_text
        for file, report in failed
    )
    return is_later or any(report.kind is ReportKind.LOST for _, _, report in attempt.reports)


def drop_kills_below_exceptions(processes: Processes) -> None:
    """Drop kills of unknown processes below the faults that ended others:
    a launcher or a person cleaned up.
    """
    if not any(one.signal == "SIGKILL" and not one.is_known for one in processes.all):
        return
    faults = [one for one in processes.all if one.raised is not None]
    faults = [one for one in faults if classify(one.raised_text).role is not Role.SECONDARY]
    raised = {file: last for one in faults for file, _, last in one.lines}
    processes.all = [
        one
        for one in processes.all
        if one.signal != "SIGKILL" or one.is_known or one.is_oom or not _is_below(one, raised)
    ]


def _is_below(process: Process, lines: Mapping[str, int]) -> bool:
    return any(first > lines.get(file, first) for file, first, _ in process.lines)
