"""Builds verdicts: on a root cause, on nothing readable, with the victims and the documents behind each reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from firstfault.evidence.texts import message_of
from firstfault.exceptions.fingerprint import compute_fingerprint
from firstfault.model import JobErrors, Reason, Scope, Subject, Verdict, Victims, WorkerError, Writer
from firstfault.model.failure import FROM_OUTSIDE, OF_LOGS
from firstfault.strategies.headlines import category_of, headline_of
from firstfault.utils.text import one_line

_MAX_VICTIMS = 100
_MAX_SOURCES = 8
_NO_CODE = {"", "USER:RuntimeError"}
"""What an engine gives a failure that has no code of its own."""


def candidates(job: JobErrors) -> tuple[WorkerError, ...]:
    """Return the failures that can be a root cause: without processes that their own agent stopped, if others exist.

    A process that was stopped while an exception was in flight counts as stopped, unless it raised that exception
    before any other failure: later exceptions may be caused by the failure for which the agent stopped its workers.
    """
    raised = tuple(failure for failure in job.failures if not failure.stopped_by_agent)
    caught = {id(item) for item in raised if item.in_flight and item.exception is not None and item.sent_signals}
    others = [failure for failure in raised if id(failure) not in caught]
    began_ns = min((failure.timestamp_ns for failure in others if failure.timestamp_ns is not None), default=0)
    early = {id(item) for item in raised if item.timestamp_ns is not None and item.timestamp_ns < began_ns}
    stopped = caught - early
    own = tuple(failure for failure in raised if id(failure) not in stopped)
    return (own if others else raised) or job.failures


def verdict_for(  # noqa: PLR0913 - the parts of a verdict
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
        strategy: the strategy's name, also that of the verdict's rule.
        why: sentences a person can check, each with the failures it rests on if it is a `Reason`.
        confidence: "high", "medium" or "low".
        same: failures with the same fault as `root`, `root` included, if several ranks have it; else empty. Ranks with
            this fault whose documents were not opened are added if every opened document with it is in `same`.
    """
    own = {id(failure) for failure in same}
    reasons = [Reason(reason) if isinstance(reason, str) else reason for reason in why]
    # if an opened document with this fault is not in `same`, an unopened one may not belong there either
    all_are = all(id(failure) in own for failure in job.failures if failure.fingerprint == root.fingerprint)
    alike = job.unopened_like(root.fingerprint) if same and all_are else ()
    ranks = tuple(sorted({failure.rank for failure in (same or [root]) if failure.rank is not None} | set(alike)))
    has_code = root.code not in _NO_CODE or root.writer is Writer.STOCK
    return replace(
        undetermined(job, strategy),
        scope=_scope(root, ranks),
        ranks=ranks,
        node=root.node or None,
        # else the exception's short name, the signal, or "ExitCode7"
        code=root.code if has_code else message_of(root).what.replace("exit code ", "ExitCode"),
        category=category_of(root),
        fingerprint=root.fingerprint or compute_fingerprint(root),
        headline=headline_of(root, ranks),
        message=root.message,
        timestamp_ns=root.timestamp_ns,
        confidence=confidence,
        rule=strategy,
        why=tuple(reason.text for reason in reasons),
        sources=sources_of(reasons),
        victims=victims_of(job, root, same),
        root=root,
    )


def sources_of(reasons: Iterable[Reason]) -> tuple[tuple[str, ...], ...]:
    """Return for each reason the names of the documents it rests on, at most 8."""
    return tuple(
        tuple(ref.name for failure in reason.failures[:_MAX_SOURCES] for ref in failure.documents)[:_MAX_SOURCES]
        for reason in reasons
    )


def undetermined(job: JobErrors, strategy: str) -> Verdict:
    """Return the verdict on an attempt whose failures could not be read."""
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


def _scope(root: WorkerError, ranks: Sequence[int]) -> Scope:
    if root.category == "preemption" or (root.category in FROM_OUTSIDE and root.subject is Subject.AGENT):
        return Scope.EXTERNAL
    if len(ranks) > 1:
        return Scope.RANKS
    if ranks:
        return Scope.RANK
    return Scope.NODE if root.node else Scope.UNDETERMINED


def victims_of(job: JobErrors, root: WorkerError | None, same: Sequence[WorkerError] = ()) -> Victims:
    """Return all other failures, without those that have the root cause's fault and were not stopped by an agent."""
    fingerprint = root.fingerprint if root is not None else ""
    own = {id(root), *(id(failure) for failure in same)}
    victims = [
        failure
        for failure in job.failures
        if id(failure) not in own
        and (failure.stopped_by_agent or not fingerprint or failure.fingerprint != fingerprint)
    ]
    by_rank: dict[int, list[WorkerError]] = {}
    for failure in victims:
        if failure.rank is not None:
            by_rank.setdefault(failure.rank, []).append(failure)
    # two nodes may claim the same rank
    lines = [(rank, "; ".join(sorted(map(_line, by_rank[rank])))) for rank in sorted(by_rank)[:_MAX_VICTIMS]]
    return Victims(count=len(victims) + job.unopened_elsewhere(fingerprint), by_rank=tuple(lines))


def _line(failure: WorkerError) -> str:
    if failure.stopped_by_agent:
        sent = failure.sent_signals[0]
        by = "launcher" if failure.place.engine == OF_LOGS else "agent"
        return one_line(f"stopped by its {by} ({sent.signal}): {sent.reason}")
    said = message_of(failure)
    text = one_line(said.text or (failure.message if failure.exception is None else ""), 120)
    return one_line(f"{said.what}: {text}" if text else said.what)
