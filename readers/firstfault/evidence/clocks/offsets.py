"""How much each node's clock is ahead of the storage's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from firstfault.evidence.clocks.intervals import NS_PER_SECOND
from firstfault.layout import ErrorKey
from firstfault.model import DocumentRef, JobErrors, WorkerError

STORAGE_RESOLUTION_NS = NS_PER_SECOND
"""Resolution of the storage's times, which are often whole seconds."""
_MAX_UNKNOWN_OFFSET_NS = 3600 * NS_PER_SECOND
"""How far off an unmeasured clock may be."""


@dataclass(frozen=True, slots=True)
class Offset:
    """How much a node's clock is ahead of the storage's, nanoseconds, between two bounds."""

    low: int = -_MAX_UNKNOWN_OFFSET_NS
    high: int = _MAX_UNKNOWN_OFFSET_NS
    is_known: bool = False
    """Whether both bounds were measured."""


def measure_offsets(job: JobErrors) -> dict[str, Offset]:
    """Return the offset of each node that has uploaded a document."""
    took = {
        receipt.name: receipt.fault_to_durable_ns
        for entry in job.roster
        for receipt in entry.receipts
        if receipt.durable and receipt.fault_to_durable_ns is not None
    }
    lows: dict[str, int] = {}
    highs: defaultdict[str, list[int]] = defaultdict(list)
    for node, document, recorded, upload_delay in _iter_uploads(job.failures):
        stored = document.last_modified_ns or 0
        resolution_ns = (
            STORAGE_RESOLUTION_NS if stored % NS_PER_SECOND == 0 else NS_PER_SECOND // 20
        )
        # The object's time lies between the start of its upload and the storage's answer. The start
        # bounds the offset from below, the receipt bounds it from above.
        low = recorded + upload_delay - stored - resolution_ns
        lows[node] = max(low, lows.get(node, low))
        if document.name in took:
            highs[node].append(max(recorded + took[document.name] - stored, low))
    offsets = {}
    for node, low in lows.items():
        # A document that was stored again because its first upload hung looks like one from a slow
        # clock. Its upper bound may then contradict another document's lower bound, and is ignored.
        agreed = [high for high in highs[node] if high >= low]
        unknown = max(_MAX_UNKNOWN_OFFSET_NS, low + _MAX_UNKNOWN_OFFSET_NS)
        offsets[node] = Offset(low, min(agreed, default=unknown), is_known=bool(agreed))
    return offsets


def _iter_uploads(failures: Sequence[WorkerError]) -> Iterator[tuple[str, DocumentRef, int, int]]:
    """Yield each stored document's node, reference, recorded time,
    and the minimum delay until its upload began.

    A failure merged from several documents has the earliest document's time, so each document's
    time comes from its name. The delay is known for a single document only: a process may write
    two, in flight and at its end.
    """
    for failure in failures:
        has_several = len(failure.documents) > 1
        for document in failure.documents:
            key = ErrorKey.parse(document.name) if has_several else None
            recorded = (
                key.timestamp_ns
                if key is not None
                else None
                if has_several
                else failure.timestamp_ns
            )
            if recorded is not None and document.last_modified_ns is not None:
                yield (
                    failure.node,
                    document,
                    recorded,
                    0 if has_several else failure.upload_delay_ns or 0,
                )
