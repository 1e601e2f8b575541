"""Where the ranks of a job were when it was stopped, in one sentence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from firstfault.evidence.progress import drop_messages
from firstfault.exceptions.stack_position import PositionKind, locate_main_thread
from firstfault.model import WorkerError
from firstfault.utils.text import counted

MAX_LISTED_POSITIONS = 3
MAX_LISTED_RANKS = 4


def describe_positions(failures: Sequence[WorkerError]) -> str:
    """Return where ranks waited and where the rest was, from their agents' snapshots,
    largest groups last.

    "rank 1 was at train.py:5 in load_batch, rank 0 waited in all_reduce #6 (default_pg)". Empty if
    no rank waited in a collective: then nothing shows that ranks waited for each other.
    """
    waiting: dict[str, list[int]] = defaultdict(list)
    elsewhere: dict[str, list[int]] = defaultdict(list)
    for failure in failures:
        if failure.rank is None:
            continue
        position = locate_main_thread(failure)
        if call := _find_outstanding_call(failure):
            waiting[f"waited in {call}"].append(failure.rank)
        elif position.kind is PositionKind.COLLECTIVE:
            waiting["waited in a collective"].append(failure.rank)
        elif position.exit_stage or position.frame:
            elsewhere[position.description.removeprefix("it ")].append(failure.rank)
    if not waiting:
        return ""
    # the few ranks that differ are the answer; the many that waited for them come last
    groups = [*sorted(elsewhere.items(), key=lambda group: len(group[1])), *waiting.items()]
    shown = groups[:MAX_LISTED_POSITIONS]
    more = len(groups) - len(shown)
    texts = [f"{_name_ranks(sorted(ranks))} {text}" for text, ranks in shown]
    return ", ".join([*texts, *([f"and {counted(more, 'more position')}"] if more else [])])


def _find_outstanding_call(failure: WorkerError) -> str:
    """Return the first incomplete collective of a rank, "all_reduce #6 (default_pg)", or an empty
    string if all of its collectives are complete.
    """
    for progress in map(drop_messages, failure.collectives):
        for entry in progress.last if progress.is_outstanding else ():
            if entry.state != "completed" and entry.sequence > (progress.completed or 0):
                return f"{entry.operation.rpartition(':')[2]} #{entry.sequence} ({progress.group})"
    return ""


def _name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0, 2 and 3" or "rank 0 and 15 more ranks"."""
    *before, last = ranks
    if len(before) >= MAX_LISTED_RANKS:
        return f"rank {ranks[0]} and {len(before):,} more ranks"
    return f"ranks {', '.join(map(str, before))} and {last}" if before else f"rank {last}"
