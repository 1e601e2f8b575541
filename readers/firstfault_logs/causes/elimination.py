"""Name the process that ended, if all other processes of its node raised another exception."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from firstfault.evidence.signatures import Role
from firstfault.evidence.texts import classify
from firstfault_logs.launchers import ReportKind

if TYPE_CHECKING:
    from firstfault_logs.attempt_logs import Attempt
    from firstfault_logs.processes import Process, Processes

_MIN_RANKS = 2


def name_remaining_rank(attempt: Attempt, processes: Processes) -> None:
    """Give the SIGKILL or the exception of a process that nothing names to the only rank of its
    node that raised nothing.

    DeepSpeed reports "exits with return code = -9" for the process that it saw first, without its
    rank. Python exits with a code after an exception, so ranks that raised one weren't killed. If
    all others lost a peer, the exception without a rank is that peer's.
    """
    for unnamed in [one for one in processes.all if not one.is_known]:
        # after an exception, the teardown of a rank may abort or crash, but nothing kills it
        is_killed = unnamed.signal == "SIGKILL"
        if not is_killed and not (unnamed.raised and _has_exit_code(attempt)):
            continue
        ranks = set(_list_ranks(attempt, unnamed))
        others = [one for one in processes.all if one.rank in ranks and one.raised is not None]
        remaining = ranks - {one.rank for one in others}
        if len(ranks) < _MIN_RANKS or len(remaining) != 1:
            continue
        if unnamed.raised and not all(map(_has_lost_peer, others)):
            continue
        remaining_process = processes.find(rank=min(remaining), node=unnamed.node)
        if remaining_process.has_ended or remaining_process.has_failed or remaining_process.stopped:
            continue
        remaining_process.signal, remaining_process.is_oom = unnamed.signal, unnamed.is_oom
        remaining_process.raised, remaining_process.raised_text = (
            unnamed.raised,
            unnamed.raised_text,
        )
        remaining_process.time_ns = remaining_process.time_ns or unnamed.time_ns
        remaining_process.launcher_text = unnamed.launcher_text
        remaining_process.launcher_time_ns = unnamed.launcher_time_ns
        remaining_process.lines |= unnamed.lines
        processes.all = [one for one in processes.all if one is not unnamed]


def _has_lost_peer(process: Process) -> bool:
    return classify(process.raised_text).role is Role.SECONDARY


def _has_exit_code(attempt: Attempt) -> bool:
    """Whether a launcher reports that a process, which it doesn't name, exited with an error."""
    return any(
        report.kind is ReportKind.ENDED and bool(report.exit_code) and not report.ranks
        for _, _, report in attempt.reports
    )


def _list_ranks(attempt: Attempt, process: Process) -> Iterator[int]:
    """Yield the ranks of a process's node, as far as its launcher printed where they begin."""
    for file, _, _ in process.lines:
        first_ranks = attempt.first_ranks.get((file, process.node))
        first = attempt.find_first_rank((file, process.node))
        if first_ranks is not None and first is not None:
            yield from range(first, first + first_ranks.workers)
