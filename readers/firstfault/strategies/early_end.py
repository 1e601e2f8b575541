"""What is known about a program that ran to its end while its peers still needed it."""

from __future__ import annotations

from collections.abc import Iterable

from firstfault.evidence.texts import find_message
from firstfault.exceptions.first_cause import find_own_frames
from firstfault.exceptions.stack_position import PositionKind, locate_main_thread
from firstfault.exceptions.traceback_format import format_place
from firstfault.model import CollectiveProgress, WorkerError


def describe_early_end(root: WorkerError, failures: Iterable[WorkerError]) -> str:
    """Return that a program reached its end, and where its peers were:
    "... were at all_reduce #12 (train.py:7)".

    The peers are named only if all that report their collectives were at the same one, which the
    root hadn't called.
    """
    text = find_message(root).text
    peers = [failure for failure in failures if failure.rank != root.rank and failure.collectives]
    for own in root.collectives:
        waits = [
            (peer, progress)
            for peer in peers
            for progress in peer.collectives
            if progress.group == own.group
        ]
        calls = {(_name_operation(progress), progress.enqueued) for _, progress in waits}
        if len(calls) != 1:
            continue
        ((operation, number),) = calls
        if number <= own.enqueued:
            continue
        places = {_find_wait(peer) for peer, _ in waits}
        place = places.pop() if len(places) == 1 else ""
        who = "its peers were" if len(waits) > 1 else f"rank {waits[0][0].rank} was"
        return f"{text} while {who} at {operation} #{number}" + (f" ({place})" if place else "")
    return text


def _name_operation(progress: CollectiveProgress) -> str:
    """Return the operation without its backend: "all_reduce"."""
    return progress.last_operation.rpartition(":")[2] or "collective"


def _find_wait(failure: WorkerError) -> str:
    """Return the line of the program from which a rank called its last collective, or an empty
    string if it is unknown.
    """
    if failure.exception is not None:
        frames = find_own_frames(failure.exception)
        return format_place(frames[-1]) if frames else ""
    where = locate_main_thread(failure)
    return where.frame if where.kind is PositionKind.COLLECTIVE else ""
