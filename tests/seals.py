"""A verdict, a decision and the record of a restart; and a sealed verdict,
as a pod leaves it in its ``error.pb``.
"""

from dataclasses import replace
from typing import Any

from firstfault import model
from firstfault.testing import START_NS
from firstfault.wire.documents import encode_seal
from firstfault.wire.json_schemas import to_json

DECISION = model.Decision(
    retry=True,
    kind=model.Kind.RECOVERABLE,
    origin=model.Origin.SYSTEM,
    enforced=False,
    reason="because",
)
VERDICT = model.Verdict(
    scope=model.Scope.RANK,
    code="USER",
    category="data",
    headline="ValueError, rank 3",
    message="boom",
    strategy="evidence",
    rule="own-fault",
    ranks=(3,),
    node="w-1",
    fingerprint="1:0123456789ab",
    timestamp_ns=START_NS + 7,
    confidence="high",
    why=("it was first",),
    suspects=(
        model.Suspect("it was near", rank=4),
        model.Suspect("it is silent", node="w-2"),
        model.Suspect("both", rank=5, node="w-3"),
    ),
    victims=model.Victims(2, ((0, "peer"), (1, "peer"))),
    coverage=model.Coverage(2, 1, 1, complete=False, notes=("a note",)),
    settled=False,
    digest="d1",
    document_count=3,
)
RECORD = model.RestartRecord(
    kind=model.RestartKind.ROUND,
    number=2,
    headline="ValueError, rank 3 on worker-1: boom",
    restart=True,
    reason="it may help",
    rank=3,
    node="worker-1",
    fingerprint="1:0123456789ab",
    category="user_code",
    timestamp_ns=1_700_000_000_123_456_789,
    lost_seconds=12.5,
    world_size_before=8,
    world_size_after=4,
)


def encode_sealed_verdict(
    verdict: model.Verdict, decision: model.Decision, **changes: Any
) -> bytes:
    """Return the file of a verdict; `changes` are other fields of its seal."""
    seal = model.Seal(
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
