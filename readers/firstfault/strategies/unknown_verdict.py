"""The verdict without a root cause, and its suspects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from firstfault.evidence.classification import STORE_WAIT, FailureClass
from firstfault.evidence.diagnosis import Candidate, Diagnosis, describe_blame
from firstfault.evidence.hangs import find_different_calls, sort_by_rank
from firstfault.evidence.progress import describe_waits
from firstfault.evidence.texts import find_message
from firstfault.model import JobErrors, Reason, Subject, Suspect, Verdict
from firstfault.strategies import reasons
from firstfault.strategies.headlines import MAX_HEADLINE_CHARS, join_ranks, name_process
from firstfault.strategies.verdicts import build_undetermined_verdict, build_victims, list_sources
from firstfault.utils.text import one_line

_MAX_UNREPORTED_NODES = 8
_MAX_BLAMED_SUSPECTS = 5
"""Ranks, and nodes, that are suspects only because other failures name them."""


def build_unknown_cause_verdict(
    diagnosis: Diagnosis, candidates: Sequence[Candidate] = ()
) -> Verdict:
    """Return the verdict that the root cause isn't known; the candidates become suspects."""
    job, classified = diagnosis.job, diagnosis.classified
    exits = sorted(
        diagnosis.exits, key=lambda item: (item.failure.rank or 0, item.failure.node, item.why)
    )
    suspects = [
        Suspect(item.why, item.rank, item.node or None) for item in candidates
    ] + reasons.to_suspects(exits)
    waits = _describe_waits(diagnosis)
    # ranks may have waited for many others, but a text names only one
    suspects = suspects[: reasons.MAX_SUSPECTS] or ([] if waits else _list_blamed(diagnosis))
    by_time = reasons.get_time_sort_key
    likeliest = min(
        classified, key=lambda item: (item.failure_class, *by_time(item)[:2], item.failure.message)
    )
    unclear_count = reasons.count_class(classified, job, FailureClass.UNCLEAR)
    count = len(classified) + job.unopened_elsewhere()
    # victims point to another process; an unclear failure may be the root cause or a consequence
    pointing = "point to another process"
    text = f"all failures {pointing}"
    if unclear_count:
        text = f"any of {unclear_count} of {count} failures may be the cause"
        text += f", the rest {pointing}" if unclear_count < count else ""
    unclear = reasons.get_failures(
        item for item in classified if item.failure_class is FailureClass.UNCLEAR
    )
    why = [
        Reason(
            "no rank shows its own fault, and no single rank stands out",
            reasons.sample_failures(classified),
        ),
        Reason(text, unclear or reasons.sample_failures(classified)),
        *reasons.explain_wrong_clocks(diagnosis),
    ]
    # a node without firstfault explains an undetermined verdict best, so it comes first
    headline = f"undetermined: {_describe_unreported_nodes(job)}"
    headline += waits or _describe_common_failure(job) or _describe_expired_deadline(job)
    headline += ", suspects: " + ", ".join(item.name for item in suspects[:3]) if suspects else ""
    return replace(
        build_undetermined_verdict(job, reasons.STRATEGY_NAME),
        code="Undetermined",
        category="hang" if diagnosis.waits else _find_common_category(job),
        headline=one_line(headline, MAX_HEADLINE_CHARS),
        message=likeliest.failure.message,
        why=tuple(reason.text for reason in why),
        sources=list_sources(why),
        suspects=tuple(suspects),
        victims=build_victims(job, None),
    )


def _list_blamed(diagnosis: Diagnosis) -> list[Suspect]:
    """Return the ranks and nodes that failures name most often, in a stable order."""
    entries = sorted(diagnosis.job.roster, key=lambda entry: entry.place.node)
    node_by_rank = {rank: entry.place.node for entry in entries for rank in entry.ranks}
    ranks = sorted(diagnosis.blame_counts.ranks.items(), key=lambda item: (-item[1], item[0]))[
        :_MAX_BLAMED_SUSPECTS
    ]
    nodes = sorted(diagnosis.blame_counts.nodes.items(), key=lambda item: (-item[1], item[0]))[
        :_MAX_BLAMED_SUSPECTS
    ]
    suspects = [
        Suspect(describe_blame(count), rank, node_by_rank.get(rank)) for rank, count in ranks
    ]
    return suspects + [Suspect(describe_blame(count), None, node) for node, count in nodes]


def _describe_common_failure(job: JobErrors) -> str:
    """Return the exception that all ranks or agents raised, "all 4 ranks: RuntimeError: Timed out",
    or an empty string if there is none.
    """
    ranks = {failure.rank for failure in job.failures if failure.rank is not None}
    world_size = max((failure.place.world_size for failure in job.failures), default=0)
    is_of_agents = all(failure.subject is Subject.AGENT for failure in job.failures)
    is_common = (is_of_agents or len(ranks) > 1) and not job.unopened
    if not is_common or len({failure.fingerprint for failure in job.failures}) > 1:
        return ""
    failure = job.failures[0]
    if failure.exception is None or not failure.fingerprint:
        return ""
    subject = f"all {len(ranks)} ranks" if len(ranks) == world_size else f"{len(ranks)} ranks"
    if is_of_agents:
        subject = name_process(failure) if len(job.failures) == 1 else f"{len(job.failures)} agents"
    message = find_message(failure)
    return f"{subject}: {message.what}: {message.text}".rstrip(": ")


def _describe_waits(diagnosis: Diagnosis) -> str:
    """Return what ranks waited for if nothing else failed, "5 of 8 workers joined", or an empty
    string if it is unknown.
    """
    failures = diagnosis.job.failures
    is_wait = any(item.waited or item.signature == STORE_WAIT for item in diagnosis.classified)
    is_only = all(item.failure_class >= FailureClass.UNCLEAR for item in diagnosis.classified)
    what = describe_waits(failures) if is_wait and is_only and not diagnosis.job.unopened else ""
    return f"{what}, no rank shows its own fault" if what else ""


def _find_common_category(job: JobErrors) -> str:
    """Return the category that all failures were recorded with, such as "rendezvous";
    "unknown" if they differ.
    """
    categories = {failure.category for failure in job.failures}
    return (
        (categories.pop() or "unknown") if len(categories) == 1 and not job.unopened else "unknown"
    )


def _describe_expired_deadline(job: JobErrors) -> str:
    """Return the watchdog deadline that ranks missed while they waited for each other."""
    expired = [failure for failure in job.failures if failure.expired is not None]
    if not expired or expired[0].expired is None:
        return "no rank shows its own fault"
    ranks = sorted({failure.rank for failure in expired if failure.rank is not None})
    subject = f"rank{'s' if len(ranks) > 1 else ''} {join_ranks(ranks)}"
    waits = "in a collective, no rank stands out"
    if (different := find_different_calls(sort_by_rank(job.failures))) is not None:
        waits = f"in different collectives: {different.text}"
    return f"{expired[0].expired.text} on {subject}, {waits}"


def _describe_unreported_nodes(job: JobErrors) -> str:
    """Return the nodes without any report, such as nodes without firstfault:
    "no report from node 1; ".
    """
    places = [failure.place for failure in job.failures] + [entry.place for entry in job.roster]
    expected = job.coverage.expected or 0
    reported = {
        place.group_rank
        for place in places
        if place.group_rank is not None and place.group_rank < expected
    }
    count = expected - len(reported)
    # a damaged document may claim billions of nodes: never build the list of all of them
    unreported = list(
        islice(
            (number for number in range(expected) if number not in reported), _MAX_UNREPORTED_NODES
        )
    )
    # without any number of a node, nothing shows which ones are missing
    is_known = bool(reported) or not job.failures
    return (
        f"no report from node{'s' if count > 1 else ''} {join_ranks(unreported, count)}; "
        if count and is_known
        else ""
    )
