"""Lists and times as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from firstfault.evidence.clocks import Interval
from firstfault.utils.text import duration
from firstfault.wire.json_schemas import format_timestamp

MAX_LISTED_ITEMS = 5
"""Suspects, threads or collectives that a report lists one by one."""
BOUNDS_PRECISION_FACTOR = 10
"""Bounds narrower than a tenth of a time are as good as one number."""
_MIN_ASSUMED_INEXACTNESS_NS = 30_000_000_000
"""No measurement is this inexact: the failed process left no own time."""
_MIN_SHOWN_NS = 1_000
"""Shorter times count as none."""


def format_ranks(ranks: Sequence[int], limit: int = 0) -> str:
    """Return ascending ranks as ranges, "0-2, 5, 8-63". Ranks beyond `limit` characters are only
    counted, without their numbers.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    text = ", ".join(parts)
    if not limit or len(text) <= limit:
        return text
    # room for the longest count: `world_size` accepts no more than 100,000 ranks
    shown = 0
    while shown < len(parts) and len(", ".join(parts[: shown + 1])) <= limit - len(
        " and 99999 more"
    ):
        shown += 1
    unlisted_count = len(ranks) - sum(high - low + 1 for low, high in runs[:shown])
    return (
        f"{', '.join(parts[:shown])} and {unlisted_count} more" if shown else f"{len(ranks)} ranks"
    )


def shorten_names(names: Iterable[str]) -> dict[str, str]:
    """Return names without shared parts, such as "worker-2" for "job-worker-2.cluster.local"."""
    unique_names = [name for name in dict.fromkeys(names) if name]
    if len(unique_names) <= 1:
        return {name: name for name in unique_names}
    if len({name.partition(".")[2] for name in unique_names}) == 1:  # a domain that all hosts share
        parts = [name.partition(".")[0].split("-") for name in unique_names]
    else:
        parts = [name.split("-") for name in unique_names]
    alike = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    # the part in which names differ is often a number, which means nothing alone
    shared = max(min(sum(1 for _ in alike), *(len(part) - 2 for part in parts)), 0)
    return {name: "-".join(part[shared:]) for name, part in zip(unique_names, parts, strict=True)}


def shorten_list(lines: Sequence[str], limit: int, more: str = "and {} more") -> list[str]:
    """Return the first `limit` lines, and a count of the rest; if only one line is left,
    the line itself.
    """
    unlisted_count = len(lines) - limit
    return [*lines[:limit], more.format(unlisted_count)] if unlisted_count > 1 else list(lines)


def format_time(nanoseconds: int) -> str:
    """Return a moment since the Unix epoch as people write it, to the millisecond:
    "2026-11-14 22:13:20.000 UTC".
    """
    text = format_timestamp(nanoseconds) or ""
    return f"{text[:10]} {text[11:23]} UTC"


def format_log_time(nanoseconds: int) -> str:
    """Return a moment as a console log printed it,
    which may lack milliseconds and doesn't name its time zone.
    """
    text = format_timestamp(nanoseconds) or ""
    return f"{text[:10]} {text[11:23]}".removesuffix(".000")


def later_text(bounds: Interval) -> str:
    """Return bounds of a time difference, nanoseconds, in words."""
    low, high = bounds.low, bounds.high
    if (high - low) * BOUNDS_PRECISION_FACTOR <= abs(low + high) // 2:
        return format_shift((low + high) // 2)
    if low >= 0:
        return f"{format_delay(low, high)} later"
    if high <= 0:
        return f"{format_range(-high, -low)} earlier"
    return f"between {duration(low)} earlier and {duration(high)} later"


def format_delay(low: int, high: int) -> str:
    """Return the bounds of a delay: "8.0 ms to 260 ms", or "at least 8.0 ms" if the upper one is
    only an assumption.
    """
    if low > 0 and high - low >= _MIN_ASSUMED_INEXACTNESS_NS:
        return f"at least {duration(low, is_rounded_down=True)}"
    return format_range(low, high)


def format_range(low: int, high: int) -> str:
    """Return "8.0 ms to 260 ms", "up to 250 ms", or one time if both are the same when rounded."""
    texts = dict.fromkeys((duration(low), duration(high)))
    return f"up to {duration(high)}" if low < _MIN_SHOWN_NS < high else " to ".join(texts)


def format_signed(nanoseconds: int) -> str:
    """Return "+42 ms", "-1.2 s" or "0"."""
    return "0" if nanoseconds == 0 else f"{'+' if nanoseconds > 0 else '-'}{duration(nanoseconds)}"


def format_shift(nanoseconds: int) -> str:
    """Return "42 ms later", "1.2 s earlier" or "at the same time"."""
    if nanoseconds == 0:
        return "at the same time"
    return f"{duration(nanoseconds)} {'later' if nanoseconds > 0 else 'earlier'}"
