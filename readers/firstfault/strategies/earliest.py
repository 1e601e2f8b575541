"""The strategy ``earliest`` of Flyte's RFC 5598:
the earliest recorded time of the last round wins.
"""

from __future__ import annotations

from collections.abc import Sequence

from firstfault.model import (
    DocumentsNeeded,
    JobErrors,
    Reason,
    Subject,
    Verdict,
    WorkerError,
    Writer,
)
from firstfault.strategies.headlines import name_process
from firstfault.strategies.registry import needs_documents
from firstfault.strategies.verdicts import build_verdict, find_root_candidates
from firstfault.utils.text import duration

_NS_PER_SECOND = 1_000_000_000
_MAX_CLOCK_AHEAD_SECONDS = 2
"""If a document's recorded time is later than the end of its upload by more,
its node's clock is ahead.
"""
_MAX_UPLOAD_SECONDS = 60
"""If an upload seems to have taken longer, its node's clock is behind."""


@needs_documents(DocumentsNeeded.EARLIEST)
def earliest(job: JobErrors) -> Verdict:
    """Pick the failure with the earliest recorded time.

    Failures without a time come last. A process that its own agent stopped isn't picked if there
    are other failures, unless its exception was in flight before them. At equal times an exception
    comes before an exit without one, then the lowest rank; the order of a listing never decides.
    Clocks aren't corrected, but the verdict names clocks that contradict the storage's.
    """
    field = find_root_candidates(job)
    root = min(field, key=_sort_key)
    followers = [failure for failure in field if failure is not root]
    warnings = find_clock_warnings(job.failures)
    why = [_explain_order(root, followers)]
    tied = tuple(item for item in followers if item.timestamp_ns == root.timestamp_ns)
    if tied and root.timestamp_ns is not None:
        text = f"{len(tied)} more have the same time; decided by evidence, then by the lowest rank"
        why.append(Reason(text, tied))
    if failed_alike := tuple(
        item for item in followers if item.fingerprint and item.fingerprint == root.fingerprint
    ):
        why.append(
            Reason(
                f"{len(failed_alike)} more recorded the same fault and are not counted as victims",
                failed_alike,
            )
        )
    if untimed := tuple(item for item in field if item.timestamp_ns is None):
        text = f"{len(untimed)} of {len(field)} failures have no recorded time and were put last"
        why.append(Reason(text, untimed))
    confidence = _rate_confidence(job, root, followers, warnings)
    return build_verdict(
        job,
        root,
        strategy="earliest",
        why=[*why, *warnings],
        confidence=confidence,
    )


def _sort_key(failure: WorkerError) -> tuple[object, ...]:
    """Return the sort key of failures. After the rank, fields only make the order total,
    whatever the listing's.
    """
    rank = failure.rank if failure.rank is not None else 1 << 62
    return (
        failure.timestamp_ns is None,
        failure.timestamp_ns or 0,
        failure.exception is None,
        rank,
        failure.node,
        failure.message,
        failure.code,
        failure.fingerprint,
    )


def find_clock_warnings(failures: Sequence[WorkerError]) -> list[str]:
    """Return a sentence for each node with recorded times that contradict the storage's clock."""
    # The storage stamps each document with its own clock at the end of the upload, and the document
    # states how long after the fault its upload began. If the node's clock is right, the rest is
    # the time that the upload took.
    offsets: dict[str, int] = {}
    for failure in failures:
        if len(failure.documents) > 1:
            continue  # merged from several documents: its times may be from different ones
        for document in failure.documents:
            if failure.timestamp_ns is None or document.last_modified_ns is None:
                continue
            delays_seconds = (
                document.last_modified_ns - failure.timestamp_ns - (failure.upload_delay_ns or 0)
            ) // _NS_PER_SECOND
            if (
                not -_MAX_CLOCK_AHEAD_SECONDS <= delays_seconds <= _MAX_UPLOAD_SECONDS
                and failure.upload_delay_ns is not None
            ):
                offsets[failure.node or document.name] = -delays_seconds
    return [
        f"the clock of {node} differs from the storage's by about {offset:+d} s; the order of times"
        " is not reliable"
        for node, offset in sorted(offsets.items())
    ]


def _explain_order(root: WorkerError, followers: Sequence[WorkerError]) -> Reason:
    timed = [failure for failure in followers if failure.timestamp_ns is not None]
    if root.timestamp_ns is None:
        return Reason(
            f"{name_process(root)} was picked by rank: no failure has a recorded time", (root,)
        )
    if not timed:
        return Reason(f"{name_process(root)} is the only failure with a recorded time", (root,))
    next_failure = min(timed, key=_sort_key)
    gap = duration((next_failure.timestamp_ns or 0) - root.timestamp_ns)
    text = (
        f"{name_process(root)} failed first; the next, {name_process(next_failure)}, was recorded"
        f" {gap}"
        " later"
    )
    return Reason(text, (root, next_failure))


def _rate_confidence(
    job: JobErrors,
    root: WorkerError,
    followers: Sequence[WorkerError],
    warnings: Sequence[str],
) -> str:
    if root.timestamp_ns is None or warnings:
        return "low"
    if any(failure.timestamp_ns == root.timestamp_ns for failure in followers):
        return "low"
    own = (
        item
        for item in (root, *followers)
        if item.writer is not Writer.STOCK and item.subject is Subject.WORKER
    )
    if any(failure.exception is None for failure in own):
        return "low"  # an agent polls for exits, so the recorded time is later than the exit
    # one boot ID is one machine, with one clock
    one_clock = bool(root.boot_id) and all(failure.boot_id == root.boot_id for failure in followers)
    if job.coverage.complete and (one_clock or not followers):
        return "high"
    return "medium"
