"""Leave out processes that report a failure again which another process already has: by its local
rank, by a launcher's exit code, or by the kills of a cleanup.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from firstfault.evidence.signatures import Role
from firstfault.evidence.texts import classify
from firstfault_logs.launchers import ReportKind

if TYPE_CHECKING:
    from firstfault_logs.attempt_logs import Attempt
    from firstfault_logs.processes import Process, Processes


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
