"""The verdict without a root cause, and its suspects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from firstfault.evidence.classification import FailureClass
from firstfault.evidence.diagnosis import Candidate, Diagnosis, names_it
from firstfault.evidence.texts import message_of
from firstfault.model import JobErrors, Reason, Suspect, Verdict
from firstfault.strategies.headlines import HEADLINE, listed
from firstfault.strategies.reasons import (
    MAX_SUSPECTS,
    NAME,
    about_clocks,
    by_time,
    count_of,
    failures_of,
    first_few,
    suspects_of,
)
from firstfault.strategies.verdicts import sources_of, undetermined, victims_of
from firstfault.utils.text import one_line

_MAX_UNREPORTED_NODES = 8
_MAX_NAMED = 5
"""Ranks, and nodes, that are suspects only because others name them."""


def not_known(diagnosis: Diagnosis, found: Sequence[Candidate] = ()) -> Verdict:
    """Return the verdict that the root cause is not known; `found` are ranks and nodes that may be it."""
    job, classified = diagnosis.job, diagnosis.classified
    exits = sorted(diagnosis.exits, key=lambda item: (item.failure.rank or 0, item.failure.node, item.why))
    suspects = [Suspect(item.why, item.rank, item.node or None) for item in found] + suspects_of(exits)
    suspects = suspects[:MAX_SUSPECTS] or _accused(diagnosis)
    first = min(classified, key=lambda judged: (judged.failure_class, *by_time(judged)[:2], judged.failure.message))
    unclear = count_of(classified, job, FailureClass.UNCLEAR)
    count = len(classified) + job.unopened_elsewhere()
    pointing = "point to another process"
    text = f"{unclear} of {count} failures may be cause or consequence" if unclear else f"all failures {pointing}"
    text += f", the others {pointing}" if 0 < unclear < count else ""
    both_ways = failures_of(judged for judged in classified if judged.failure_class is FailureClass.UNCLEAR)
    why = [
        Reason("no rank shows a fault of its own, and none stands out", first_few(classified)),
        Reason(text, both_ways or first_few(classified)),
        *about_clocks(diagnosis),
    ]
    hint = "; suspects: " + ", ".join(item.name for item in suspects[:3]) if suspects else ""
    return replace(
        undetermined(job, NAME),
        code="Undetermined",
        category="hang" if diagnosis.waits else "unknown",
        headline=one_line(f"undetermined: {_silent(job)}{_alike(job) or _expired(job)}{hint}", HEADLINE),
        message=first.failure.message,
        why=tuple(reason.text for reason in why),
        sources=sources_of(why),
        suspects=tuple(suspects),
        victims=victims_of(job, None),
    )


def _accused(diagnosis: Diagnosis) -> list[Suspect]:
    """Return the ranks and nodes that failures name most often, in a stable order."""
    entries = sorted(diagnosis.job.roster, key=lambda entry: entry.place.node)
    at = {rank: entry.place.node for entry in entries for rank in entry.ranks}
    ranks = sorted(diagnosis.accusations.ranks.items(), key=lambda item: (-item[1], item[0]))[:_MAX_NAMED]
    nodes = sorted(diagnosis.accusations.nodes.items(), key=lambda item: (-item[1], item[0]))[:_MAX_NAMED]
    found = [Suspect(names_it(count), rank, at.get(rank)) for rank, count in ranks]
    return found + [Suspect(names_it(count), None, node) for node, count in nodes]


def _alike(job: JobErrors) -> str:
    """Return what all ranks wrote, if it is one thing: "all 4 ranks: RuntimeError: Timed out"; else nothing."""
    ranks = {failure.rank for failure in job.failures if failure.rank is not None}
    world = max((failure.place.world_size for failure in job.failures), default=0)
    if len(ranks) < 2 or job.unopened or len({failure.fingerprint for failure in job.failures}) > 1:  # noqa: PLR2004
        return ""
    first = job.failures[0]
    if first.exception is None or not first.fingerprint:
        return ""
    which = f"all {len(ranks)} ranks" if len(ranks) == world else f"{len(ranks)} ranks"
    found = message_of(first)
    return f"{which}: {found.what}: {found.text}".rstrip(": ")


def _expired(job: JobErrors) -> str:
    """Return which deadline ranks did not keep while they waited for each other."""
    expired = [failure for failure in job.failures if failure.expired is not None]
    if not expired or expired[0].expired is None:
        return "no rank shows a fault of its own"
    ranks = sorted({failure.rank for failure in expired if failure.rank is not None})
    which = f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"
    return f"{expired[0].expired.text} on {which}, in a collective; no rank stands out"


def _silent(job: JobErrors) -> str:
    """Return which nodes left no trace, as those on which firstfault does not run: "no report from node 1; "."""
    places = [failure.place for failure in job.failures] + [entry.place for entry in job.roster]
    expected = job.coverage.expected or 0
    reported = {place.group_rank for place in places if place.group_rank is not None and place.group_rank < expected}
    count = expected - len(reported)
    # a damaged document may state billions of nodes
    first = list(islice((number for number in range(expected) if number not in reported), _MAX_UNREPORTED_NODES))
    return f"no report from node{'s' if count > 1 else ''} {listed(first, count)}; " if count else ""
