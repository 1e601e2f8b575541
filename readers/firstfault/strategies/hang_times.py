"""When a hang began, computed from a watchdog's line on how long a collective had run."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from firstfault.evidence.progress import find_wait_begin
from firstfault.model.failure import OF_LOGS

if TYPE_CHECKING:
    from firstfault.evidence.diagnosis import Diagnosis
    from firstfault.model import Verdict

_NS_PER_SECOND = 1_000_000_000
_COMPUTED_TIME_REASON = "computed: a watchdog's line"


def has_computed_time(verdict: Verdict) -> bool:
    """Whether the time of a verdict is a computed one: when the hang began."""
    return any(_COMPUTED_TIME_REASON in reason for reason in verdict.why)


def add_hang_begin(verdict: Verdict, diagnosis: Diagnosis) -> Verdict:
    """Return the verdict on a hang in a log with the time at which it began,
    if a line with a time shows that.
    """
    is_of_logs = any(failure.place.engine == OF_LOGS for failure in diagnosis.job.failures)
    if verdict.category != "hang" or verdict.timestamp_ns is not None or not is_of_logs:
        return verdict
    begins = [
        wait for judged in diagnosis.waits if (wait := find_wait_begin(judged.failure)) is not None
    ]
    if not begins:
        return verdict
    began = min(begins, key=lambda wait: wait.time_ns)
    try:
        moment = datetime.fromtimestamp(began.time_ns // _NS_PER_SECOND, timezone.utc)
    except (OverflowError, OSError, ValueError):
        return verdict
    text = (
        f"the hang began at {moment:%Y-%m-%d %H:%M:%S}, {_COMPUTED_TIME_REASON},"
        f" less the {began.waited_ns / _NS_PER_SECOND:.0f} s that the collective had run"
    )
    names = tuple(document.name for document in began.failure.documents)
    return replace(
        verdict,
        timestamp_ns=began.time_ns,
        why=(*verdict.why, text),
        sources=(*verdict.sources, names),
    )
