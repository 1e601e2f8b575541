"""Parts of the verdicts of `evidence`: reasons with their failures, suspects and counts, and
sentences on where ranks were, on an early end and on when a hang began.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import islice
from typing import TYPE_CHECKING

from firstfault.evidence.classification import ClassifiedFailure, FailureClass
from firstfault.evidence.diagnosis import Diagnosis
from firstfault.evidence.progress import drop_messages, find_wait_begin
from firstfault.evidence.texts import find_message
from firstfault.exceptions.exceptions_in_text import format_place
from firstfault.exceptions.first_cause import find_own_frames
from firstfault.exceptions.stack_position import PositionKind, locate_main_thread
from firstfault.model import CollectiveProgress, JobErrors, Reason, Suspect, WorkerError
from firstfault.model.failure import OF_LOGS
from firstfault.strategies.headlines import name_process
from firstfault.utils.text import counted

if TYPE_CHECKING:
    from firstfault.model import Verdict


STRATEGY_NAME = "evidence"
MAX_SUSPECTS = 10
MAX_FAILURES_PER_REASON = 8
"""Failures that a sentence about all failures refers to."""


def get_time_sort_key(item: ClassifiedFailure) -> tuple[object, ...]:
    """Return the sort key of failures by their recorded times;
    failures without a time come last.
    """
    return item.failure.timestamp_ns or 1 << 62, item.failure.rank or 0, repr(item.failure)


def get_failures(classified: Iterable[ClassifiedFailure]) -> tuple[WorkerError, ...]:
    """Return the failures without their classes."""
    return tuple(item.failure for item in classified)


def sample_failures(classified: Iterable[ClassifiedFailure]) -> tuple[WorkerError, ...]:
    """Return as many failures as a sentence about all of them refers to."""
    return get_failures(islice(classified, MAX_FAILURES_PER_REASON))


def to_suspects(classified: Iterable[ClassifiedFailure], when: str = "") -> list[Suspect]:
    """Return failures as suspects: "rank 3 on worker-1 was killed by SIGKILL, later"."""
    items = ((name_process(item.failure), item) for item in classified)
    return [
        Suspect(f"{process} {item.why}{when}", item.failure.rank, item.node)
        for process, item in items
    ]


def explain_wrong_clocks(diagnosis: Diagnosis) -> list[Reason]:
    """Return a reason for each wrong clock, with failures of its nodes."""
    reasons = []
    for text, names in diagnosis.clocks.describe_wrong_clocks():
        nodes = set(names)
        failures = (failure for failure in diagnosis.job.failures if failure.node in nodes)
        reasons.append(Reason(text, tuple(islice(failures, MAX_FAILURES_PER_REASON))))
    return reasons


def count_class(
    classified: Iterable[ClassifiedFailure], job: JobErrors, failure_class: FailureClass
) -> int:
    """Return the number of failures of a class. An unread document has the class of the
    read ones of its fault.
    """
    members = [item for item in classified if item.failure_class is failure_class]
    return len(members) + len(job.unopened_like(*{item.failure.fingerprint for item in members}))


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
