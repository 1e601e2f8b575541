"""Find starts without anything below: a launcher printed its first lines, or its command,
again at its end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from firstfault.exceptions.source_files import is_library_file
from firstfault_logs.framing.lines import FRAME_LINE, TRACEBACK
from firstfault_logs.launchers import ReportKind
from firstfault_logs.tracebacks import LAUNCHER_FILE

if TYPE_CHECKING:
    from firstfault_logs.attempt_logs import Attempt, Stream

_MAX_BANNER_LINES = 10
"""Lines of a launcher when it starts; more are a program's."""
_MAX_LINES = 200
"""The same with a launcher's exceptions."""
_MIN_LATER_NS = 60_000_000_000
"""What is printed so much later isn't the end of the same start."""


@cache
def _job_number() -> re.Pattern[str]:
    return re.compile(r"\bjob(?:[_ ]?id)?[ =:#]{1,3}(\d{3,12})\b", re.IGNORECASE)


def find_empty_starts(attempts: Sequence[Attempt]) -> list[int]:
    """Return the indices of attempts that are only the end of the previous attempt.

    A start is followed by steps, lines of ranks, a failure of its own, a later date, or another
    job's number.
    """
    return [
        number
        for number in range(1, len(attempts))
        if _is_empty(attempts[number], attempts[number - 1])
    ]


def _is_empty(attempt: Attempt, before: Attempt) -> bool:
    streams = [stream for stream in attempt.streams.values() if stream.tail]
    if any(stream.progress is not None or stream.by_torch for stream in streams):
        return False
    if sum(len(stream.tail) for stream in streams) > _MAX_LINES or (
        _has_ends(attempt) and _has_ends(before)
    ):
        return False
    if sum(map(_count_own_lines, streams)) > _MAX_BANNER_LINES:
        return False
    numbers = _find_job_numbers(attempt)
    earlier = _find_job_numbers(before)
    if earlier and numbers - earlier:
        return False
    begin = min(_times(attempt), default=None)
    end = max(_times(before), default=None)
    return begin is None or end is None or begin - end < _MIN_LATER_NS


def _has_ends(attempt: Attempt) -> bool:
    return bool(attempt.entries) or any(
        report.kind is ReportKind.ENDED for _, _, report in attempt.reports
    )


def _count_own_lines(stream: Stream) -> int:
    """Return how many lines aren't of a launcher's exception; more than a banner has,
    if another one is among them.
    """
    for record in stream.tail:
        frame = FRAME_LINE.match(record.text)
        if frame is not None and not (
            LAUNCHER_FILE.search(frame["file"]) or is_library_file(frame["file"])
        ):
            return _MAX_BANNER_LINES + 1
    return sum(
        not record.text[:1].isspace() and TRACEBACK not in record.text for record in stream.tail
    )


def _find_job_numbers(attempt: Attempt) -> set[str]:
    return {
        match[1]
        for stream in attempt.streams.values()
        for record in stream.tail
        for match in _job_number().finditer(record.text)
    }


def _times(attempt: Attempt) -> list[int]:
    return [
        record.time_ns
        for stream in attempt.streams.values()
        for record in stream.tail
        if record.time_ns is not None
    ]
