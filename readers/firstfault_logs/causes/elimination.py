"""Name the process that a signal ended, if all other processes of its node raised an exception."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firstfault_logs.collector import Attempt
    from firstfault_logs.processes import Process, Processes


def name_killed_rank(attempt: Attempt, processes: Processes) -> None:
    """Give the signal of a process that its launcher doesn't name to the only rank of the node
    that raised nothing.

    DeepSpeed reports "exits with return code = -9" for the process that it saw first, without its
    rank. Python exits with a code after an exception, so ranks that raised one weren't killed.
    """
    for killed in [one for one in processes.all if not one.is_known and one.signal]:
        ranks = set(_list_ranks(attempt, killed))
        raised = {one.rank for one in processes.all if one.raised is not None} & ranks
        if killed.raised is not None or len(ranks) < 2 or len(ranks - raised) != 1:  # noqa: PLR2004
            continue
        found = processes.find(rank=min(ranks - raised), node=killed.node)
        if found.has_ended or found.has_failed or found.stopped:
            continue
        found.signal, found.is_oom = killed.signal, killed.is_oom
        found.launcher_text = killed.launcher_text
        found.launcher_time_ns = killed.launcher_time_ns
        found.lines |= killed.lines
        processes.all = [one for one in processes.all if one is not killed]


def _list_ranks(attempt: Attempt, process: Process) -> Iterator[int]:
    """Yield the ranks of a process's node, as far as its launcher printed where they begin."""
    for file, _, _ in process.lines:
        found = attempt.first_ranks.get((file, process.node))
        first = attempt.find_first_rank((file, process.node))
        if found is not None and first is not None:
            yield from range(first, first + found.workers)
