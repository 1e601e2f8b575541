"""What clocks can tell: those of nodes are corrected by the storage's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from firstfault.evidence.clocks import Clocks
from firstfault.layout import ErrorKey
from firstfault.model import (
    DocumentRef,
    Receipt,
)
from firstfault.strategies.earliest import clock_warnings
from firstfault.strategies.rules import evidence
from firstfault.testing import make_job, make_presence
from tests.readers.scenes import (
    done,
    own,
)

if TYPE_CHECKING:
    from firstfault.model import WorkerError

S = 1_000_000_000


def _stored(failure: WorkerError, seconds: float, name: str) -> WorkerError:
    """The failure, with a document that the storage got so many seconds after the epoch of these tests."""
    assert failure.timestamp_ns is not None
    modified = (failure.timestamp_ns // S + int(seconds)) * S
    return replace(failure, documents=(DocumentRef(name, last_modified_ns=modified),), upload_delay_ns=0)


@pytest.mark.parametrize("wrong_s", [-600, 600])
def test_a_clock_that_is_wrong(wrong_s: int) -> None:
    """A node's clock is corrected by what the storage says of its uploads, and that it is wrong is said."""
    late = own(3, 8_000 + wrong_s * 1000, "KeyError", "'label'", boot_id="b")
    job = done(_stored(own(0, boot_id="a"), 0, "a.pb"), _stored(late, -wrong_s, "b.pb"))
    receipts = [(Receipt(name, durable=True, fault_to_durable_ns=10_000_000),) for name in ("a.pb", "b.pb")]
    roster = (replace(item, receipts=found) for item, found in zip(job.roster, receipts, strict=True))
    verdict = evidence(replace(job, roster=tuple(roster)))
    assert (verdict.ranks, verdict.confidence) == ((0,), "medium"), "known to be the first"
    (sources,) = [names for text, names in verdict.reasons if text.startswith("the clock of worker-1 is")]
    assert sources == ("b.pb",)


@pytest.mark.parametrize("uuids", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("last_stored_ms", [3005, 9000])
def test_a_clock_that_is_right(uuids: tuple[str, str], last_stored_ms: int) -> None:
    """One process wrote of a moment in flight and again later: each document is compared with its own times.

    They may come in any order, and an upload that had hung may store one again.
    """
    final, documents, receipts = own(1), [], []
    assert final.timestamp_ns is not None
    for in_flight, letter, began_ms, stored_ms in ((True, uuids[0], 10, 15), (False, uuids[1], 3000, last_stored_ms)):
        name = str(ErrorKey(0, final.timestamp_ns, 1, 0, "", 1, 32 * letter))
        stored = (DocumentRef(name, last_modified_ns=final.timestamp_ns + stored_ms * 1_000_000),)
        times = {"documents": stored, "upload_delay_ns": began_ms * 1_000_000}
        documents.append(replace(final, in_flight=in_flight, message=f"bad batch {in_flight}", **times))
        receipts.append(Receipt(name, durable=True, fault_to_durable_ns=(began_ms + 10) * 1_000_000))
    job = make_job(*documents, roster=(make_presence(receipts=tuple(receipts)),))
    assert len(job.failures) == 1
    assert (Clocks(job).sentences(), clock_warnings(job.failures)) == ([], [])
    assert Clocks(job).offset("worker-0").is_known
