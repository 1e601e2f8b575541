"""Separate failed processes from stopped ones, and find what killed them.

The functions run in the order of `mark_stops`; each checks only processes that still count as
failed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from firstfault.evidence.signatures import Role
from firstfault.evidence.texts import classify
from firstfault.exceptions.exceptions_in_text import get_short_name
from firstfault.exceptions.first_cause import find_first_cause
from firstfault.model.failure import LAST_LINES_OF_SUCCESS
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.attempts import AGENT_LOG_LINE
from firstfault_logs.completion.words import is_success_report
from firstfault_logs.launchers import ReportKind
from firstfault_logs.processes import (
    LAUNCHER_STOPPED,
    NO_EXIT_STATUS,
    SCHEDULER_STOPPED,
    Process,
    Processes,
)

if TYPE_CHECKING:
    from firstfault_logs.attempt_logs import Attempt
    from firstfault_logs.framing.labels import LogRecord


_MAX_WORLD_SIZE = 4096
"""In a larger job, ranks without a line aren't listed."""
_MAX_LINES_OF_END = 5
"""Lines in which a process that ended normally reports this."""
_MAX_SILENT_SUSPECTS = 3
"""More silent ranks than this are not suspects."""


def mark_stops(attempt: Attempt, processes: Processes) -> None:
    """Mark processes that were stopped, killed for memory, or failed because of a faulty GPU."""
    _mark_stopped_by_scheduler(attempt, processes)
    _mark_killed_with_the_rest(attempt, processes)
    _mark_terminated(attempt, processes)
    _mark_listed_by_agents(attempt, processes)
    _match_oom_kills(attempt, processes)
    _match_hardware_errors(attempt, processes)
    mark_blocked_tasks(attempt, processes)


def _mark_stopped_by_scheduler(attempt: Attempt, processes: Processes) -> None:
    """Mark processes with all lines below the scheduler's announcement that it ends the job."""
    announced: dict[str, int] = {}
    signals: set[str] = set()
    for file, _, report in attempt.reports:
        if report.kind is ReportKind.TERMINATED and report.reason:
            announced[file] = min(announced.get(file, report.number), report.number)
        if report.kind in {ReportKind.TERMINATED, ReportKind.STOPPED}:
            signals |= {report.signal} - {""}
    for process in processes.all:
        files = {file for file, _, _ in process.lines}
        is_later = all(first > announced.get(file, first) for file, first, _ in process.lines)
        if (
            files
            and files <= announced.keys()
            and is_later
            and process.has_failed
            and not process.is_oom
        ):
            process.raised, process.exit_code, process.signal = None, None, ""
            process.own_error, process.stopped = "", SCHEDULER_STOPPED
            process.stop_signal = min(signals) if len(signals) == 1 else ""


def _mark_killed_with_the_rest(attempt: Attempt, processes: Processes) -> None:
    """Mark processes that were killed, or aborted, after another one had crashed.

    mpirun kills all others with SIGKILL, and runtimes abort if they lose a peer.
    """
    ended = [report for _, _, report in attempt.reports if report.kind is ReportKind.ENDED]
    first = next((report for report in ended if report.ranks or report.tasks), None)
    killed = [
        process
        for process in processes.all
        if process.signal in {"SIGKILL", "SIGABRT"} and not process.is_oom
    ]
    has_crashed = first is not None and first.signal not in {"", "SIGABRT", "SIGKILL", "SIGTERM"}
    for process in killed if has_crashed and len(killed) > 1 and not attempt.is_torchrun else ():
        process.stop_signal = process.signal if process.signal == "SIGKILL" else ""
        process.signal, process.stopped = "", LAUNCHER_STOPPED


def _mark_terminated(attempt: Attempt, processes: Processes) -> None:
    """Mark processes that SIGTERM ended, if another one failed: launchers send it, too."""
    if not any(process.signal != "SIGTERM" and process.has_failed for process in processes.all):
        return
    signaled = {
        report.pid for _, _, report in attempt.reports if report.kind is ReportKind.STOPPED
    } - {None}
    # on these nodes, torch's agent printed a line for each process that it stopped
    listed_nodes = {process.node for process in processes.all if process.pid in signaled}
    for process in processes.all:
        is_unlisted = (
            process.pid is not None and process.pid not in signaled and process.node in listed_nodes
        )
        if process.signal == "SIGTERM" and process.raised is None and not is_unlisted:
            process.signal, process.stopped, process.stop_signal = "", LAUNCHER_STOPPED, "SIGTERM"


@dataclass(slots=True)
class _AgentList:
    """The processes that one of torch's agents lists when it ends its workers."""

    stopped: dict[int, int] = field(default_factory=dict)
    """By process id, the line that reports its signal."""
    failed: set[int] = field(default_factory=set)
    """Process ids."""
    signals: set[str] = field(default_factory=set)
    """With which it stopped them."""


def _mark_listed_by_agents(attempt: Attempt, processes: Processes) -> None:
    """Mark the ranks of a node if its agent lists all of its workers by process id: one that
    failed, and the rest.

    The ranks of a node are consecutive, so the rank and the local rank of the failed worker
    determine the remaining ranks.
    """
    lists: dict[tuple[str, str, str], _AgentList] = defaultdict(_AgentList)
    for file, node, report in attempt.reports:
        agent_line = AGENT_LOG_LINE.match(report.text)
        agent = agent_line["pid"] or "" if agent_line is not None else ""
        if report.pid is None or not (agent or attempt.size.nodes <= 1):
            continue
        if report.kind is ReportKind.STOPPED:
            listed = lists[file, node, agent]
            listed.stopped.setdefault(report.pid, report.number)
            listed.signals.add(report.signal)
        elif report.kind is ReportKind.ENDED and report.local_rank is not None:
            lists[file, node, agent].failed.add(report.pid)
    workers = attempt.size.workers_per_node
    for (file, _, _), listed in lists.items():
        failed = [
            process
            for process in processes.all
            if process.pid in listed.failed and process.rank is not None
        ]
        firsts = {
            process.rank - process.local_rank
            for process in failed
            if process.rank is not None and process.local_rank is not None
        }
        stopped = listed.stopped.keys() - listed.failed
        if (
            len(firsts) != 1
            or len(failed) != len(listed.failed)
            or len(failed) + len(stopped) != workers
        ):
            continue
        ranks = set(range(min(firsts), min(firsts) + workers)) - {
            process.rank for process in failed
        }
        for rank in sorted(ranks):
            process = processes.find(rank=rank, node=failed[0].node)
            if not process.has_failed and not process.has_ended:
                process.stopped = LAUNCHER_STOPPED
                process.stop_signal = min(listed.signals) if len(listed.signals) == 1 else ""
                process.lines |= {
                    (file, listed.stopped[pid], listed.stopped[pid]) for pid in stopped
                }


def _match_oom_kills(attempt: Attempt, processes: Processes) -> None:
    """Find the killed processes on the nodes on which the kernel killed one for its memory."""
    killed = [
        process for process in processes.all if process.signal == "SIGKILL" and not process.stopped
    ]
    for file, _, report in attempt.reports:
        for process in killed if report.kind is ReportKind.OOM and report.pid is None else ():
            if not report.node or not process.node or report.node == process.node:
                process.is_oom = True
                process.lines.add((file, report.number, report.number))


_HARDWARE_XIDS = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    63: "ECC page retirement or row remapping",
    64: "ECC page retirement or row remapper failure",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP RPC timeout",
    120: "GSP error",
    140: "unrecovered ECC error",
}
"""Errors of NVIDIA's driver that hardware causes, not the application (NVIDIA's Xid catalog)."""

# An error of a program that a faulty GPU may have caused.
_GPU_ERROR = LazyPattern(r"(?:CUDA|HIP)(?:[ ]runtime)?[ ]error|CUDNN|CUBLAS")


def _match_hardware_errors(attempt: Attempt, processes: Processes) -> None:
    """Give a hardware error of a GPU to the process that it names,
    else to the only one that failed on its node.
    """
    for file, node, report in attempt.reports:
        if report.kind is not ReportKind.GPU or report.xid not in _HARDWARE_XIDS:
            continue
        failed = [process for process in processes.all if process.has_failed]
        failed_on_node = [process for process in failed if process.may_be_on(report.node or node)]
        named = [
            process
            for process in failed_on_node
            if report.pid is not None and process.pid == report.pid
        ]
        # a kernel's log has the name of the machine, and the program's log may have the pod's
        is_of_gpu = _GPU_ERROR.search
        on_gpu = [
            process
            for process in failed_on_node or failed
            if is_of_gpu(process.raised_text or process.own_error or process.text)
        ]
        candidates = named or on_gpu or failed_on_node
        for process in candidates if len(candidates) == 1 else ():
            process.hardware_error = f"Xid {report.xid}, {_HARDWARE_XIDS[report.xid]}"
            process.node = process.node or report.node or node
            process.lines.add((file, report.number, report.number))


def mark_remaining(attempt: Attempt, processes: Processes, failed: Sequence[Process]) -> None:
    """Mark the processes that didn't fail as stopped, and add the ranks that printed nothing;
    a few are suspects.
    """
    explained_ids = set(map(id, failed))
    stops = {ReportKind.STOPPED, ReportKind.REST_STOPPED}
    has_stopped = bool(attempt.entries) or any(
        report.kind in stops for _, _, report in attempt.reports
    )
    ranks = {process.rank for process in processes.all if process.rank is not None}
    world = max([attempt.world_size, *(rank + 1 for rank in ranks)], default=0)
    # if neither a second rank nor the number of ranks is in the log, it may be the log of one rank
    is_of_all = attempt.world_size > 0 or len(ranks) > 1
    if is_of_all and len(ranks) * 2 >= world and world <= _MAX_WORLD_SIZE:
        silent = [Process(rank=rank) for rank in range(world) if rank not in ranks]
        processes.all += silent
        # silence explains what nothing else does
        is_explained = any(process.has_ended and process.raised is None for process in failed)
        is_explained |= any(_reports_own_fault(process) for process in failed)
        # without a world size, another rank may have failed that isn't in the log
        is_complete = attempt.world_size > 0 or len(ranks) > 2 * len(silent)
        is_suspect = (
            is_complete
            and not has_stopped
            and not is_explained
            and len(silent) <= _MAX_SILENT_SUSPECTS
        )
        explained_ids |= set(map(id, silent)) if is_suspect else set()
    stopped_on = {
        processes.resolve_node(report.node or node)
        for _, node, report in attempt.reports
        if report.kind is ReportKind.STOPPED
    }
    # a launcher that starts agents reports their ends, not those of their workers
    stopped_all = processes.tasks_are_ranks and any(
        report.kind is ReportKind.REST_STOPPED for _, _, report in attempt.reports
    )
    stopped_all |= has_stopped and _is_on_one_node(attempt, processes)
    lost_nodes = {report.node for _, _, report in attempt.reports if report.kind is ReportKind.LOST}
    for process in processes.all:
        if id(process) in explained_ids or process.stopped or process.exit_code == 0:
            continue
        if any(map(is_success_report, process.text.splitlines()[-_MAX_LINES_OF_END:])):
            process.stopped = LAST_LINES_OF_SUCCESS
        else:
            # a launcher can end nothing on a lost node, and which ranks were there may not be in
            # the log
            is_reachable = not lost_nodes or (bool(process.node) and process.node not in lost_nodes)
            is_known = is_reachable and (stopped_all or process.node in stopped_on - {""})
            process.stopped = LAUNCHER_STOPPED if is_known else NO_EXIT_STATUS
            if is_known:
                _cite_stop(attempt, processes, process)


def _cite_stop(attempt: Attempt, processes: Processes, process: Process) -> None:
    """Refer to the line in which a launcher reports that it ended the rest of the job."""
    stops = [
        (file, report)
        for file, node, report in attempt.reports
        if report.kind is ReportKind.REST_STOPPED
        or (
            report.kind is ReportKind.STOPPED
            and processes.resolve_node(report.node or node) in {process.node, ""}
        )
    ]
    signals = {report.signal for _, report in stops} - {""}
    process.stop_signal = min(signals) if len(signals) == 1 else ""
    process.lines = {(file, report.number, report.number) for file, report in stops[:1]}


def _reports_own_fault(process: Process) -> bool:
    """Whether an exception shows a fault of its own process:
    nobody needs to be suspected of his silence.
    """
    raised = process.raised
    return (
        raised is not None
        and classify(raised.message, get_short_name(raised), raised.bases).role is Role.PRIMARY
    )


def _is_on_one_node(attempt: Attempt, processes: Processes) -> bool:
    """Whether the log names no second node, so what a launcher ends there is all
    that is left of the job.
    """
    machines = {process.host or process.node for process in processes.all} | attempt.size.machines
    return attempt.size.nodes <= 1 and len(machines - {""}) <= 1


_MAX_TRACE_LINES = 60


def mark_blocked_tasks(attempt: Attempt, processes: Processes) -> None:
    """Give the kernel's report of a blocked task to its process,
    if nothing else explains the job's failure.

    A slow file system alone fails no job, so some process must have failed, or the scheduler must
    have ended the job.
    """
    blocked = [entry for entry in attempt.reports if entry[2].kind is ReportKind.BLOCKED]
    if not blocked or not _is_unexplained(attempt, processes.all):
        return
    for file, node, report in blocked:
        report_text = report.text[report.text.index("task ") :]  # the kernel's level is INFO
        text = "\n".join(
            (report_text, *(record.text for record in _read_trace(attempt, file, report.number)))
        )
        judged = classify(text)
        if judged.category != "storage" or not judged.is_specific or report.pid is None:
            continue
        process = processes.find(pid=report.pid, node=processes.resolve_node(report.node or node))
        process.own_error, process.stopped, process.signal = text, "", ""
        process.exit_code = None
        process.lines.add((file, report.number, report.number))


def _is_unexplained(attempt: Attempt, processes: Sequence[Process]) -> bool:
    has_own_fault = any(map(_has_own_fault, processes))
    has_failed = any(one.has_failed for one in processes)
    was_ended = any(report.kind is ReportKind.TERMINATED for _, _, report in attempt.reports)
    return not has_own_fault and (has_failed or was_ended)


def _has_own_fault(process: Process) -> bool:
    """Whether a process failed for a reason of its own,
    and not only because a peer was gone or late.
    """
    if process.raised is not None:
        cause = find_first_cause(process.raised)
        return (
            classify(cause.message, cause.type, (*cause.bases, "BaseException")).role
            is Role.PRIMARY
        )
    return process.has_failed and classify(process.own_error or process.text).role is Role.PRIMARY


def _read_trace(attempt: Attempt, file: str, number: int) -> list[LogRecord]:
    """Return the lines of the kernel's stack below its report."""
    below = (
        record
        for stream in attempt.streams.values()
        if stream.file == file
        for record in stream.tail
        if number < record.number <= number + _MAX_TRACE_LINES
    )
    return sorted(below, key=lambda record: record.number)
