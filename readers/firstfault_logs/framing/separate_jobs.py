"""Tell logs of several jobs from logs of one, and find out whether a log was cut off."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import NamedTuple

_MIN_GAP_NS = 600 * 1_000_000_000
"""Files of one job are written at the same time;
this much time without a line in any of them separates jobs.
"""
_MAX_LISTED_JOBS = 10


class TimeSpan(NamedTuple):
    """The times of the first and the last line of a file that have one,
    nanoseconds since the Unix epoch.
    """

    first_ns: int
    last_ns: int


def find_separate_jobs(spans: Mapping[str, TimeSpan]) -> list[list[str]]:
    """Return names of files that were written at the same time, the earliest first.

    Args:
        spans: of files with steps of a training. A file with errors alone may begin long after the
            rest of its job.
    """
    jobs: list[list[str]] = []
    end_ns = 0
    for name, span in sorted(spans.items(), key=lambda item: item[1]):
        if not jobs or span.first_ns - end_ns > _MIN_GAP_NS:
            jobs.append([])
        jobs[-1].append(name)
        end_ns = max(end_ns, span.last_ns)
    return jobs


def ask_for_one(names: Collection[str]) -> str:
    """Return an error message that lists a file of each job."""
    listed = ", ".join(list(names)[:_MAX_LISTED_JOBS])
    more = " ..." if len(names) > _MAX_LISTED_JOBS else ""
    return f"the logs are of at least {len(names)} jobs ({listed}{more}); give those of one"


@cache
def _inside_of_output() -> re.Pattern[str]:
    """Match a line that can't be the first or the last of a whole log: of a traceback,
    or a mark of left out lines.
    """
    return re.compile(
        r'\s+File "[^"]+", line \d+|\W*(?:\.\.\.|\u2026)\W*$|'
        r"\W*[.\[<(\u2026-]\W*(?:\w+ ){0,4}(?:snip|truncated|omitted|left out)",
        re.IGNORECASE,
    )


def describe_cut(first_lines: Iterable[str], last_lines: Iterable[str]) -> str:
    """Return a sentence that a log is cut at its beginning, its end or both, or "" if it isn't.

    Args:
        first_lines: the first lines of each file of the job.
        last_lines: the last lines of each file.
    """
    is_cut = _inside_of_output().match
    begins = any(map(is_cut, first_lines))
    ends = any(map(is_cut, last_lines))
    if begins and ends:
        return "the log is cut at both ends"
    return (
        "the log is cut at its beginning" if begins else "the log is cut at its end" if ends else ""
    )
