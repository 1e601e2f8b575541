"""Seals a verdict: conclusion, report, and the bytes of the ``error.pb``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from firstfault.model import Seal
from firstfault.render.flyte_message import flyte_message
from firstfault.report import report_of
from firstfault.wire.documents import encode_seal
from firstfault.wire.verdict_json import to_json
from firstfault_torch.error_file import error_file_data

if TYPE_CHECKING:
    from firstfault.conclude import Conclusion
    from firstfault.report import Report
    from firstfault_torch.context import Recording

__all__ = ["SealedVerdict", "seal_verdict", "torch_error_data"]


@dataclass(frozen=True, slots=True)
class SealedVerdict:
    """What a node concluded from a failed attempt, ready to be published."""

    conclusion: Conclusion
    report: Report
    """Without credentials; message and deck are rendered from it."""
    seal: Seal
    document: bytes
    """The ``error.pb``."""
    recording: Recording
    """That of the node that sealed."""


def seal_verdict(conclusion: Conclusion, recording: Recording) -> SealedVerdict:
    """Return a conclusion with its report and its ``error.pb``.

    Args:
        conclusion: on the attempt.
        recording: whose node seals.
    """
    report = report_of(
        conclusion.job,
        conclusion.verdict,
        conclusion.decision,
        uri=recording.output_prefix,
        diagnosis=conclusion.diagnosis,
    )
    verdict, decision = report.verdict, report.decision
    seal = Seal(
        name="",
        digest=verdict.digest,
        count=verdict.document_count,
        strategy=verdict.strategy,
        json=to_json(verdict, decision),
        timestamp_ns=time.time_ns(),
        node=recording.identity.node,
        code=verdict.code,
        message=flyte_message(report),
        kind=decision.kind,
        origin=decision.origin,
        fault_timestamp_ns=verdict.timestamp_ns,
        worker=verdict.node or "",
    )
    return SealedVerdict(conclusion, report, seal, encode_seal(seal), recording)


def torch_error_data(conclusion: Conclusion) -> dict[str, Any]:
    """Return the root cause as torch's ``error.json`` has it."""
    verdict = conclusion.verdict
    root = verdict.root
    exception = root.exception if root is not None else None
    return error_file_data(
        exception.type if exception is not None else verdict.code,
        exception.message if exception is not None else verdict.headline,
        verdict.message,
        verdict.timestamp_ns or time.time_ns(),
    )
