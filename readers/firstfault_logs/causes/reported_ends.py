"""Find out how processes ended, from the reports of launchers and schedulers."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
