"""The cascade: every failure with its time, groups of identical ones,
and the state of every rank and node.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from firstfault.evidence.clocks import Clocks, Interval
from firstfault.evidence.diagnosis import Diagnosis
from firstfault.model import JobErrors, Verdict, WorkerError
from firstfault.report.cascade.failure_states import find_state
from firstfault.report.cascade.groups import build_groups_without_documents, group_events
from firstfault.report.cascade.ranks_and_nodes import list_nodes, list_ranks
from firstfault.report.cascade.records import (
    Cascade as Cascade,
    Event as Event,
    Group as Group,
    NodeState as NodeState,
    RankState as RankState,
)
from firstfault.report.states import State


def build_cascade(job: JobErrors, verdict: Verdict, diagnosis: Diagnosis) -> Cascade:
    """Return what happened to every rank and node of an attempt;
    the diagnosis is in the order of its failures.
    """
    origin = _find_origin(job, verdict)
    from_root = origin is not None and origin is verdict.root
    events = []
    for failure, judged in zip(job.failures, diagnosis.classified, strict=True):
        at_ns, bounds = _get_event_time(failure, origin, diagnosis.clocks)
        state = find_state(failure, judged, verdict)
        events.append(Event(failure, state, at_ns, bounds, failure is origin, from_root))
    events.sort(key=_build_sort_key)
    groups = group_events(job, verdict, events)
    ranks = list_ranks(job, verdict, events, groups)
    grouped = {rank for group in groups for rank in group.ranks}
    # ranks without a document, such as a silent suspect, are in none of the groups yet
    missing: dict[State, list[int]] = defaultdict(list)
    for item in ranks:
        if item.rank not in grouped:
            missing[item.state].append(item.rank)
    is_root_shown = any(group.state is State.ROOT for group in groups)
    groups += build_groups_without_documents(missing, job, verdict, is_root_shown=is_root_shown)
    groups.sort(
        key=lambda group: (group.state is not State.ROOT, -group.count, group.ranks[:1], group.what)
    )
    # number after sorting: drawings and `RankState.group` refer to the numbers that are printed
    groups = [replace(group, number=number) for number, group in enumerate(groups, 1)]
    of_rank = {rank: group.number for group in groups for rank in group.ranks}
    of_event = {group.first.key: group.number for group in groups if group.first is not None}
    # if two nodes have documents of one rank, the rank is in two groups
    of_rank |= {
        event.failure.rank: of_event[event.key]
        for event in reversed(events)
        if event.failure.rank is not None
    }
    numbered = tuple(replace(item, group=of_rank.get(item.rank)) for item in ranks)
    return Cascade(tuple(events), tuple(groups), numbered, list_nodes(job, verdict), from_root)


def _find_origin(job: JobErrors, verdict: Verdict) -> WorkerError | None:
    """Return the failure from which times are counted: the root cause, if its time is known.

    For a rank that hung only the time of its stop is known, so times are counted from the first
    failure instead; the end of a deadline is a time.
    """
    root = verdict.root
    is_timed = root is not None and root.timestamp_ns is not None
    began = verdict.category != "hang" or (root is not None and root.expired is not None)
    if root is not None and is_timed and not root.stopped_by_agent and began:
        return root
    timed = [
        failure
        for failure in job.failures
        if failure.timestamp_ns is not None and failure is not root
    ]
    return timed[0] if timed else root


def _get_event_time(
    failure: WorkerError, origin: WorkerError | None, clocks: Clocks
) -> tuple[int | None, Interval | None]:
    """Return how much later than the origin a failure was, in nanoseconds,
    and the bounds of that time.
    """
    if origin is None:
        return None, None
    gap = Interval(0, 0) if failure is origin else clocks.bound_time_between(origin, failure)
    if gap is not None:
        # an agent notices an exit late, but records when it stopped a process
        max_early_ns = 0 if failure.stopped_by_agent else clocks.get_max_notice_delay_ns(failure)
        max_late_ns = (
            0
            if failure is origin or origin.stopped_by_agent
            else clocks.get_max_notice_delay_ns(origin)
        )
        return (gap.low + gap.high) // 2, Interval(gap.low - max_early_ns, gap.high + max_late_ns)
    if failure.timestamp_ns is None or origin.timestamp_ns is None:
        return None, None
    # the clocks can't be compared: without bounds, the difference of the wall clocks is only a
    # guess
    return failure.timestamp_ns - origin.timestamp_ns, None


def _build_sort_key(event: Event) -> tuple[object, ...]:
    """Return the sort key of events: the root cause first, then by time."""
    failure = event.failure
    return (
        event.state is not State.ROOT,
        event.at_ns is None,
        event.at_ns or 0,
        failure.timestamp_ns or 0,
        # at the same time, agents and files without a rank follow the ranks
        failure.rank if failure.rank is not None else 1 << 62,
        failure.node,
        failure.message,
    )
