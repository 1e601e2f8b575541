"""Groups of a cascade: failures of one fault and one state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from firstfault.evidence.texts import find_message, has_reached_end
from firstfault.model import JobErrors, Scope, Verdict, WorkerError
from firstfault.model.failure import OF_LOGS
from firstfault.report.cascade.records import Event, Group
from firstfault.report.engine_words import find_engine_words
from firstfault.report.headline import headline_parts, summarize_failure
from firstfault.report.states import State
from firstfault.utils.text import printable

_NOT_OPENED = "documents listed but not opened"


def group_events(job: JobErrors, verdict: Verdict, events: Sequence[Event]) -> list[Group]:
    """Return the groups of the events, and of documents that weren't opened;
    neither sorted nor numbered.
    """
    alike: dict[tuple[str, State], list[Event]] = defaultdict(list)
    states: dict[str, set[State]] = defaultdict(set)
    for event in events:
        alike[event.key].append(event)
        states[event.key[0]].add(event.state)
    # a rank may have opened and unopened documents; it counts once
    opened = {failure.rank for failure in job.failures}
    ranks: dict[str, set[int]] = defaultdict(set)
    counts: dict[str, int] = defaultdict(int)  # documents without a rank
    for unopened in job.unopened:
        ranks[unopened.fingerprint] |= set(unopened.ranks) - opened
        counts[unopened.fingerprint] += unopened.count if not unopened.ranks else 0
    groups = []
    for (fault, _), members in alike.items():
        unopened_ranks: set[int] = set()
        # unopened ranks have the state of their fault, if all its opened ranks have one
        if len(states[fault]) == 1:
            unopened_ranks = ranks.pop(fault, unopened_ranks)
            _ = counts.pop(fault, 0)
        groups.append(_build_group(members, unopened_ranks, verdict))
    # what is left: faults without an opened document, or with opened ranks in different states
    for fault, count in counts.items():
        of_fault = tuple(sorted(ranks[fault]))
        if of_fault or count:
            groups.append(
                Group(
                    State.UNCLEAR,
                    "not opened",
                    _NOT_OPENED,
                    of_fault,
                    (),
                    max(count, len(of_fault)),
                )
            )
    return groups


def _build_group(events: Sequence[Event], unopened: set[int], verdict: Verdict) -> Group:
    first = events[0]
    ranks = {event.failure.rank for event in events if event.failure.rank is not None} | unopened
    what = printable(find_message(first.failure).what)
    line = summarize_failure(first.failure)
    if first.state is State.ROOT and first.failure.stopped_by_agent:
        # the reason for stopping it isn't its fault
        what, line = headline_parts(verdict)
    # the reason that an agent recorded for its signal repeats the root cause
    elif first.failure.has_unseen_end:
        line = first.failure.sent_signals[0].reason
    elif first.state is State.STOPPED:
        line = _describe_stop(first.failure, len(events))
    elif has_reached_end(first.failure) and first.state is State.FINISHED:
        # not "ended early": no peer needed it
        what = State.FINISHED.value
        line = find_message(first.failure).text
    nodes = tuple(sorted({event.failure.node for event in events if event.failure.node}))
    count = len(events) + len(unopened)
    return Group(
        first.state,
        what,
        line,
        tuple(sorted(ranks)),
        nodes,
        count,
        opened=len(events),
        first=first,
    )


def _describe_stop(failure: WorkerError, count: int) -> str:
    """Return by what processes were stopped: "SIGTERM from their agents"."""
    sent = failure.sent_signals[0]
    if failure.place.engine != OF_LOGS:
        return f"{sent.signal} from {'its agent' if count == 1 else 'their agents'}"
    launcher = f"{'its' if count == 1 else 'their'} launcher"
    return f"{sent.signal} from {launcher}" if sent.signal else f"by {launcher}"


def build_groups_without_documents(
    ranks: Mapping[State, list[int]],
    job: JobErrors,
    verdict: Verdict,
    *,
    is_root_shown: bool,
) -> Iterator[Group]:
    """Yield the groups of a root cause, of suspects and of silent ranks without a document;
    `ranks` are by state.
    """
    # a lost node leaves no document; without this group the root cause would be missing
    if verdict.scope in {Scope.NODE, Scope.EXTERNAL} and verdict.node and not is_root_shown:
        yield Group(State.ROOT, *headline_parts(verdict), (), (verdict.node,), 1)
    words = find_engine_words(job, verdict)
    named = set(job.named_ranks)
    for state in (State.ROOT, State.SUSPECT, State.UNREPORTED):
        for has_lines in (False, True):
            texts = (
                headline_parts(verdict)
                if state is State.ROOT
                else ("no report", words.describe_missing(has_lines=has_lines))
            )
            if missing := [rank for rank in ranks.get(state, ()) if (rank in named) is has_lines]:
                yield Group(state, *texts, tuple(missing), (), len(missing))
