"""Builds a verdict from a root cause: its scope, ranks and code, its victims,
and the sources of its reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from firstfault.evidence.texts import find_message
from firstfault.exceptions.fingerprint import compute_fingerprint
from firstfault.model import (
    JobErrors,
    Reason,
    Scope,
    Subject,
    Verdict,
    Victims,
    WorkerError,
    Writer,
)
from firstfault.model.failure import FROM_OUTSIDE, OF_LOGS
from firstfault.strategies.headlines import build_headline, find_category
from firstfault.utils.text import one_line

_MAX_VICTIMS = 100
MAX_SOURCES_PER_REASON = 8
"""Documents that `list_sources` names for one reason."""
_UNSPECIFIC_CODES = {"", "USER:RuntimeError"}
"""Codes that engines give to failures without a specific code."""


def find_root_candidates(job: JobErrors) -> tuple[WorkerError, ...]:
    """Return the failures that can be a root cause: all except those of stopped processes,
    if there are any.

    A process that was stopped with an exception in flight counts as stopped, unless it raised
    before any other failure.
    """
    unstopped = tuple(failure for failure in job.failures if not failure.stopped_by_agent)
    # Rank 3 failed, so the agents sent SIGTERM to all workers. Rank 5 was just then on its way out
    # of the task function with an exception: it may be rank 5's own, or the peer error that rank
    # 3's death caused.
    in_flight = {
        id(item)
        for item in unstopped
        if item.in_flight and item.exception is not None and item.sent_signals
    }
    finished = [failure for failure in unstopped if id(failure) not in in_flight]
    earliest_ns = min(
        (failure.timestamp_ns for failure in finished if failure.timestamp_ns is not None),
        default=0,
    )
    early = {
        id(item)
        for item in unstopped
        if item.timestamp_ns is not None and item.timestamp_ns < earliest_ns
    }
    victims = in_flight - early
    own = tuple(failure for failure in unstopped if id(failure) not in victims)
    return (own if finished else unstopped) or job.failures


def build_verdict(  # noqa: PLR0913 - the parts of a verdict
    job: JobErrors,
    root: WorkerError,
    *,
    strategy: str,
    why: Iterable[str | Reason],
    confidence: str,
    same: Sequence[WorkerError] = (),
) -> Verdict:
    """Return the verdict that `root` is the root cause.

    Args:
        job: what was read.
        root: one of its failures.
        strategy: the strategy's name; also becomes the verdict's `rule`.
        why: sentences that a person can check. A `Reason` also has the failures that it rests on.
        confidence: "high", "medium" or "low".
        same: the failures with the same fault as `root`, including `root`, if several ranks have
            it; else empty. Ranks with unread documents are added if every document with the fault
            that was read is in `same`.
    """
    members = {id(failure) for failure in same}
    reasons = [Reason(reason) if isinstance(reason, str) else reason for reason in why]
    # if a read document with this fault isn't in `same`, an unread one may not belong there either
    is_whole_fault = all(
        id(failure) in members
        for failure in job.failures
        if failure.fingerprint == root.fingerprint
    )
    unread = job.unopened_like(root.fingerprint) if same and is_whole_fault else ()
    ranks = tuple(
        sorted(
            {failure.rank for failure in same or [root] if failure.rank is not None} | set(unread)
        )
    )
    has_code = root.code not in _UNSPECIFIC_CODES or root.writer is Writer.STOCK
    return replace(
        build_undetermined_verdict(job, strategy),
        scope=_find_scope(root, ranks),
        ranks=ranks,
        node=root.node or None,
        # without a code: the exception's short name, the signal, or "ExitCode7"
        code=root.code if has_code else find_message(root).what.replace("exit code ", "ExitCode"),
        category=find_category(root),
        fingerprint=root.fingerprint or compute_fingerprint(root),
        headline=build_headline(root, ranks),
        message=root.message,
        timestamp_ns=root.timestamp_ns,
        confidence=confidence,
        rule=strategy,
        why=tuple(reason.text for reason in reasons),
        sources=list_sources(reasons),
        victims=build_victims(job, root, same),
        root=root,
    )


def list_sources(reasons: Iterable[Reason]) -> tuple[tuple[str, ...], ...]:
    """Return the names of the documents that each reason rests on, at most 8."""
    limit = MAX_SOURCES_PER_REASON
    samples = [reason.failures[:limit] for reason in reasons]
    return tuple(
        tuple(ref.name for item in sample for ref in item.documents)[:limit] for sample in samples
    )


def build_undetermined_verdict(job: JobErrors, strategy: str) -> Verdict:
    """Return the verdict without a root cause;
    its text is for an attempt without a readable document.
    """
    why = "a node reported a failure, but its error documents are missing"
    if job.coverage.unreadable:
        why = f"none of {job.coverage.unreadable} error documents could be read"
    return Verdict(
        scope=Scope.UNDETERMINED,
        code="ErrorFileBadFormat",
        category="unknown",
        headline=f"undetermined: {why}",
        message="\n".join(job.coverage.notes) or "no error document could be read",
        strategy=strategy,
        rule="undetermined",
        confidence="low",
        coverage=job.coverage,
        settled=job.settled,
        digest=job.digest,
        document_count=job.document_count,
    )


def _find_scope(root: WorkerError, ranks: Sequence[int]) -> Scope:
    # the platform or a person ended the node: no process of the job is at fault
    if root.category == "preemption" or (
        root.category in FROM_OUTSIDE and root.subject is Subject.AGENT
    ):
        return Scope.EXTERNAL
    if len(ranks) > 1:
        return Scope.RANKS
    if ranks:
        return Scope.RANK
    return Scope.NODE if root.node else Scope.UNDETERMINED


def build_victims(
    job: JobErrors, root: WorkerError | None, same: Sequence[WorkerError] = ()
) -> Victims:
    """Return the failures of other faults than the root cause's, and those of stopped processes."""
    fingerprint = root.fingerprint if root is not None else ""
    members = {id(root), *(id(failure) for failure in same)}
    victims = [
        failure
        for failure in job.failures
        if id(failure) not in members
        and not failure.has_unseen_end
        and (failure.stopped_by_agent or not fingerprint or failure.fingerprint != fingerprint)
    ]
    by_rank: dict[int, list[WorkerError]] = {}
    for failure in victims:
        if failure.rank is not None:
            by_rank.setdefault(failure.rank, []).append(failure)
    # two nodes may claim the same rank, so a rank may have several lines
    lines = [
        (rank, "; ".join(sorted(map(_describe_victim, by_rank[rank]))))
        for rank in sorted(by_rank)[:_MAX_VICTIMS]
    ]
    return Victims(count=len(victims) + job.unopened_elsewhere(fingerprint), by_rank=tuple(lines))


def _describe_victim(failure: WorkerError) -> str:
    if failure.stopped_by_agent:
        signal = failure.sent_signals[0]
        sender = "launcher" if failure.place.engine == OF_LOGS else "agent"
        stop = f"{signal.signal} from its {sender}" if signal.signal else f"stopped by its {sender}"
        return one_line(f"{stop}: {signal.reason}")
    message = find_message(failure)
    text = one_line(message.text or (failure.message if failure.exception is None else ""), 120)
    return one_line(f"{message.what}: {text}" if text else message.what)
