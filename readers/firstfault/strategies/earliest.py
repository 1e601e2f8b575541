"""The earliest recorded time of the last round: the strategy of Flyte's RFC 5598, with its open cases closed."""

from __future__ import annotations

from collections.abc import Sequence

from firstfault.model import DocumentsNeeded, JobErrors, Reason, Subject, Verdict, WorkerError, Writer
from firstfault.strategies.headlines import who
from firstfault.strategies.running import needs_documents
from firstfault.strategies.verdicts import candidates, verdict_for

_MS = 1_000_000
_S = 1_000_000_000
_AHEAD_S = 2
"""If a document's time is this much later than the end of its upload, its node's clock is ahead."""
_BEHIND_S = 60
"""If an upload took longer than this, its node's clock is behind."""


@needs_documents(DocumentsNeeded.EARLIEST)
def earliest(job: JobErrors) -> Verdict:
    """Pick the failure with the earliest recorded time.

    A failure without a time comes last. A process that its own agent stopped is not picked while there are other
    failures, unless it had an exception in flight before they failed.
    Equal times are decided by evidence (an exception before an exit without one), then by the lowest rank; never by the
    order of a listing. Clocks are not corrected, but the verdict names a clock that contradicts the storage's.
    """
    field = candidates(job)
    root = min(field, key=_order)
    followers = [failure for failure in field if failure is not root]
    warnings = clock_warnings(job.failures)
    why = [_first(root, followers)]
    tied = tuple(item for item in followers if item.timestamp_ns == root.timestamp_ns)
    if tied and root.timestamp_ns is not None:
        text = f"{len(tied)} more have the same time; decided by evidence, then by the lowest rank"
        why.append(Reason(text, tied))
    if same := tuple(item for item in followers if item.fingerprint and item.fingerprint == root.fingerprint):
        why.append(Reason(f"{len(same)} more recorded the same fault and are not counted as victims", same))
    if untimed := tuple(item for item in field if item.timestamp_ns is None):
        text = f"{len(untimed)} of {len(field)} failures have no recorded time and were put last"
        why.append(Reason(text, untimed))
    return verdict_for(
        job, root, strategy="earliest", why=[*why, *warnings], confidence=_confidence(job, root, followers, warnings)
    )


def _order(failure: WorkerError) -> tuple[object, ...]:
    """Return the sort key of failures: ties as `earliest` documents."""
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


def clock_warnings(failures: Sequence[WorkerError]) -> list[str]:
    """Return a sentence for each node whose recorded times contradict the storage's clock."""
    offsets: dict[str, int] = {}
    for failure in failures:
        if len(failure.documents) > 1:
            continue  # merged: its times may come from different documents
        for document in failure.documents:
            if failure.timestamp_ns is None or document.last_modified_ns is None:
                continue
            late = (document.last_modified_ns - failure.timestamp_ns - (failure.upload_delay_ns or 0)) // _S
            if not -_AHEAD_S <= late <= _BEHIND_S and failure.upload_delay_ns is not None:
                offsets[failure.node or document.name] = -late
    return [
        f"the clock of {node} differs from the storage's by about {offset:+d} s; the order of times is not reliable"
        for node, offset in sorted(offsets.items())
    ]


def _first(root: WorkerError, followers: Sequence[WorkerError]) -> Reason:
    timed = [failure for failure in followers if failure.timestamp_ns is not None]
    if root.timestamp_ns is None:
        return Reason(f"{who(root)} was picked by rank: no failure has a recorded time", (root,))
    if not timed:
        return Reason(f"{who(root)} is the only failure with a recorded time", (root,))
    after = min(timed, key=_order)
    gap = ((after.timestamp_ns or 0) - root.timestamp_ns) / _MS
    text = f"{who(root)} failed first; the next, {who(after)}, was recorded {gap:.1f} ms later"
    return Reason(text, (root, after))


def _confidence(job: JobErrors, root: WorkerError, followers: Sequence[WorkerError], warnings: Sequence[str]) -> str:
    if root.timestamp_ns is None or warnings:
        return "low"
    if any(failure.timestamp_ns == root.timestamp_ns for failure in followers):
        return "low"
    own = (item for item in (root, *followers) if item.writer is not Writer.STOCK and item.subject is Subject.WORKER)
    if any(failure.exception is None for failure in own):
        return "low"  # the agent notices an exit late, and records its own time
    one_clock = bool(root.boot_id) and all(failure.boot_id == root.boot_id for failure in followers)
    if job.coverage.complete and (one_clock or not followers):
        return "high"
    return "medium"
