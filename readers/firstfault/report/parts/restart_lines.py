"""Lines about restarts and stalls within an attempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from firstfault.model import JobErrors, RestartKind, RestartRecord
from firstfault.report.formatting import shorten_list
from firstfault.report.headline import summarize_failure
from firstfault.strategies.headlines import name_process
from firstfault.utils.text import counted, one_line

_MAX_RESTART_CHARACTERS = 300
"""Characters of the line about a restart."""
_MAX_RECOVERED_FAILURES = 20
"""Recovered failures that are listed."""
_MAX_STALLED_RANKS = 3
"""Ranks that a line about stalls names."""


def recovered_lines(job: JobErrors, limit: int = _MAX_RECOVERED_FAILURES) -> list[str]:
    """Return the first `limit` failures that the job recovered from, one a line,
    and how many more there are.

    A round with a record of its restart has one line, about its root cause.
    """
    # `history` has the failures of recorded rounds, too; they would be listed twice
    recorded = {record.number for record in job.restarts if record.kind is RestartKind.ROUND}
    lines = [restart_line(record) for record in job.restarts if record.restart]
    others = (failure for failure in job.history if failure.place.round not in recorded)
    lines += [
        f"round {item.place.round}: {name_process(item)}: {summarize_failure(item)}"
        for item in others
    ]
    return shorten_list(lines, limit)


def restart_line(record: RestartRecord) -> str:
    """Return what failed before a restart, why the workers were restarted,
    and how long that took.
    """
    took = f", {record.lost_seconds:.0f} s lost" if record.lost_seconds is not None else ""
    sizes = (record.world_size_before, record.world_size_after)
    resized = (
        f", {sizes[1]} ranks instead of {sizes[0]}"
        if None not in sizes and sizes[0] != sizes[1]
        else ""
    )
    text = f"{name_restart(record)}: {record.headline} (restarted: {record.reason}{took}{resized})"
    return one_line(text, _MAX_RESTART_CHARACTERS)


def list_stalls(job: JobErrors) -> list[RestartRecord]:
    """Return the records of the times in which the job made no progress."""
    return [record for record in job.restarts if record.kind is RestartKind.STALL]


def stalls_line(stalls: Sequence[RestartRecord], ended_ns: int | None = None) -> str:
    """Return how often and how long a job made no progress, its cost, and the ranks it waited for,
    most frequent first.

    If the last one has no end, it lasted until `ended_ns`, nanoseconds since the Unix epoch.
    """
    seconds, last = [record.lost_seconds or 0 for record in stalls], stalls[-1]
    if last.lost_seconds is None and None not in {last.timestamp_ns, ended_ns}:
        seconds[-1] = max((ended_ns or 0) - (last.timestamp_ns or 0), 0) / 1e9
    hours = (
        sum(
            each * (record.world_size_before or 0)
            for each, record in zip(seconds, stalls, strict=True)
        )
        / 3600
    )
    places = Counter(record.headline for record in stalls)
    waits = [f"{place} ({counted(number, 'time')})" for place, number in places.most_common()]
    total = (
        f"{counted(len(stalls), 'stall')}, {sum(seconds):.0f} s in total, {hours:.2f} rank hours"
    )
    return f"{total}, waiting for {', '.join(shorten_list(waits, _MAX_STALLED_RANKS))}"


def name_restart(record: RestartRecord) -> str:
    """Return "round 2" or "in-process restart 2"."""
    return (
        f"{'round' if record.kind is RestartKind.ROUND else 'in-process restart'} {record.number}"
    )
