"""What is unknown about a failure."""

from __future__ import annotations

from collections.abc import Iterator

from firstfault.evidence.texts import find_message
from firstfault.model import JobErrors, Scope, Subject, Suspect, Verdict, WorkerError
from firstfault.model.failure import CANCELLED, CTRL_C, HANGUP, PREEMPTED, REQUEUED
from firstfault.model.job import UNNAMED_PROCESS
from firstfault.report.case import Case, count_terminated_nodes, find_machine
from firstfault.report.engine_words import EngineWords
from firstfault.report.formatting import MAX_LISTED_ITEMS, format_ranks, shorten_list
from firstfault.report.states import State
from firstfault.strategies.reasons import has_computed_time
from firstfault.utils.text import counted

_MAX_RANKS_CHARACTERS = 60
"""Characters."""
_FROM_OUTSIDE = {"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"}
"""Signals that usually come from another process; a crash has others, such as SIGSEGV."""


def list_unknowns(case: Case) -> Iterator[str]:
    """Yield what is unknown, the most important first."""
    verdict, cascade, engine = case.verdict, case.cascade, case.engine
    if verdict.scope is Scope.UNDETERMINED and len(case.job.failures) == 1:
        why = "" if case.job.named_ranks else f": {engine.source} names none"
        yield f"which rank and node failed{why}"
    elif verdict.scope is Scope.UNDETERMINED:
        yield "which rank failed first: the evidence doesn't single one out"
    elif verdict.confidence != "high":
        yield "not proven to be the first failure"
    # several processes without a name may have failed alike
    suspects = dict.fromkeys(_describe_suspect(suspect) for suspect in verdict.suspects)
    yield from shorten_list(list(suspects), MAX_LISTED_ITEMS, "and {} more suspects")
    if not verdict.settled:
        yield f"failures on {engine.nodes} that didn't report within the timeout"
    yield from _list_unknown_nodes(verdict, engine)
    silent = [item for item in cascade.ranks if item.state is State.UNREPORTED]
    for reason in dict.fromkeys(item.line for item in silent):
        missing = [item.rank for item in silent if item.line == reason]
        ranks = format_ranks(missing, _MAX_RANKS_CHARACTERS)
        yield f"what happened to {'rank' if len(missing) == 1 else 'ranks'} {ranks}: {reason}"
    if verdict.scope is not Scope.UNDETERMINED:
        yield from _list_unknown_about_root(case)
    unknown = [item.rank for item in case.job.failures if item.is_silent or item.stopped_by_agent]
    if engine.cites and unknown:
        ranks = format_ranks(
            sorted(rank for rank in unknown if rank is not None), _MAX_RANKS_CHARACTERS
        )
        which = f"rank {ranks} was" if len(unknown) == 1 else f"ranks {ranks} were"
        yield f"where {which} in the code: a log doesn't show it, firstfault in the job does"
    timed = [event for event in cascade.events if event.at_ns is not None]
    unclear = {event.failure.node for event in timed if event.bounds is None}
    if unclear and engine.cites:
        # in a log, a process without a node may be on any: only two names are two clocks
        unclear = {event.failure.node for event in timed if event.failure.node}
    if len(unclear) > engine.cites:
        yield (
            f"the order of failures on {counted(len(unclear), engine.node)}: couldn't compare their"
            " clocks"
        )


def _describe_suspect(suspect: Suspect) -> str:
    if suspect.name == UNNAMED_PROCESS:
        return (
            "whether another process failed first: it"
            f" {suspect.why.removeprefix(f'{UNNAMED_PROCESS} ')}"
        )
    return f"whether {suspect.name} failed first: {suspect.why}"


def _list_unknown_nodes(verdict: Verdict, engine: EngineWords) -> Iterator[str]:
    coverage = verdict.coverage
    if coverage.unreadable:
        yield f"the content of {counted(coverage.unreadable, 'unreadable document')}"
    yield from coverage.notes
    if engine.cites:
        return  # a log has no nodes that report
    if coverage.expected is None:
        yield f"how many {engine.nodes} took part"
    # the notes have more detail on missing nodes than their number
    elif coverage.expected > coverage.reported and not coverage.notes:
        missing = coverage.expected - coverage.reported
        yield f"what happened on {missing} of {coverage.expected} {engine.nodes}: no report"


def _list_unknown_about_root(case: Case) -> Iterator[str]:
    """Yield what isn't known about this kind of fault, even if the root cause is certain."""
    verdict, root, engine = case.verdict, case.verdict.root, case.engine
    yield from _list_unknown_times(verdict)
    is_of_a_node = verdict.scope in {Scope.NODE, Scope.EXTERNAL} and verdict.node
    # A node is a machine without pods, and a pod that has its machine's name for a host, as on a
    # laptop.
    hosts = {place.host for place in case.job.places if place.node == verdict.node and place.host}
    is_known = find_machine(case.job, verdict) or hosts - {verdict.node}
    if is_of_a_node and engine.has_kubectl and not is_known:
        yield f"which machine ran {verdict.node}: its {engine.node} has no NODE_NAME"
    if verdict.category == "node_lost":
        yield "why the node or its agent disappeared: it left no report"
    if verdict.code == CANCELLED:
        yield "who canceled the job, a person or a script"
    elif verdict.code in {PREEMPTED, REQUEUED}:
        pass
    elif verdict.category == "preemption" and not verdict.is_at_time_limit:
        yield _why_terminated(case.job, engine)
    if (
        verdict.category == "interrupted"
        and verdict.scope is Scope.EXTERNAL
        and verdict.code not in {CTRL_C, HANGUP}
    ):
        yield "what sent SIGINT: the launcher wasn't in the foreground of a terminal"
    if root is not None:
        yield from _list_unknown_about_exit(root, engine)


def _list_unknown_times(verdict: Verdict) -> Iterator[str]:
    if verdict.category == "hang" and (verdict.root is None or verdict.root.expired is None):
        yield from () if has_computed_time(verdict) else ("when the hang began",)
    elif verdict.timestamp_ns is None:
        yield "when it happened"


def _why_terminated(job: JobErrors, engine: EngineWords) -> str:
    """Return what may have terminated a node, according to the number of the job's nodes that were
    terminated and when.

    From inside, an abort, a time limit, a drain and an eviction are the same signal.
    """
    terminated = count_terminated_nodes(job)
    if terminated.are_all:
        when = (
            " at once, as by an abort or a time limit"
            if terminated.at_once
            else ", but not at once"
        )
        return f"who ended the job: all {terminated.count} {engine.nodes} were terminated{when}"
    if terminated.expected is None or terminated.expected == 1 or not terminated.count:
        return (
            "why it was terminated: a preemption, a drain, an eviction, an abort, or a time limit"
        )
    were = "was" if terminated.count == 1 else "were"
    one = f"{terminated.count} of {terminated.expected} {engine.nodes} {were} terminated"
    return (
        f"why it was terminated: {one}, which suggests a preemption, a drain or an eviction, not an"
        " abort"
    )


def _list_unknown_about_exit(root: WorkerError, engine: EngineWords) -> Iterator[str]:
    # a message, a signal of its agent or a deadline explains the end of a process
    if (
        find_message(root).text
        or root.sent_signals
        or root.subject is Subject.AGENT
        or root.expired is not None
    ):
        return
    is_oom = root.signal == "SIGKILL" and root.resources.oom_kill
    if root.signal in _FROM_OUTSIDE and not is_oom:
        if engine.cites:
            yield f"which process sent {root.signal}"
            return
        is_no_oom = root.signal == "SIGKILL" and root.resources.oom_kill == 0
        yield (
            f"which process sent {root.signal}: not its"
            f" agent{', nor the OOM killer' if is_no_oom else ''}"
        )
    elif not root.signal and root.exit_code is not None:
        yield "why it exited: it raised no exception"
