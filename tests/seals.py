"""Makes sealed verdicts, as a pod leaves them in its ``error.pb``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from firstfault.model import Seal
from firstfault.testing import START_NS
from firstfault.wire.documents import encode_seal
from firstfault.wire.json_schemas import to_json

if TYPE_CHECKING:
    from firstfault.model import Decision, Verdict


def sealed(verdict: Verdict, decision: Decision, **changes: Any) -> bytes:
    """Return the file of a verdict; `changes` are other fields of its seal."""
    seal = Seal(
        name="",
        digest=verdict.digest,
        count=verdict.document_count,
        strategy=verdict.strategy,
        json=to_json(verdict, decision),
        timestamp_ns=START_NS,
        node="w-0",
        code=verdict.code,
        message=verdict.message,
        kind=decision.kind,
        origin=decision.origin,
        fault_timestamp_ns=verdict.timestamp_ns,
        worker=verdict.node or "",
    )
    return encode_seal(replace(seal, **changes))
