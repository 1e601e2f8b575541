"""Find processes that waited in the kernel for a file system while their peers timed out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.evidence.signatures import Role
from firstfault.evidence.texts import classify
from firstfault.exceptions.first_cause import find_first_cause
from firstfault_logs.launchers import ReportKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault_logs.attempt_logs import Attempt
    from firstfault_logs.framing.labels import LogRecord
    from firstfault_logs.processes import Process, Processes

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
