"""Seals a verdict: conclusion, report, and the bytes of the ``error.pb``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from firstfault.errors import BadDocumentError
from firstfault.layout.paths import ERROR_FILE, bundle_path
from firstfault.model import DocumentRef, Seal
from firstfault.render.flyte_message import flyte_message
from firstfault.report import report_of
from firstfault.wire.bundle import pack
from firstfault.wire.documents import decode, encode_seal
from firstfault.wire.verdict_json import decision_from_json, to_json, verdict_from_json
from firstfault_torch.error_file import error_file_data
from firstfault_torch.verdict.sealed import SealedVerdict

if TYPE_CHECKING:
    from firstfault.model import Verdict
    from firstfault_torch.context import Recording
    from firstfault_torch.verdict.node_verdict import NodeConclusion


def seal_verdict(concluded: NodeConclusion, recording: Recording) -> SealedVerdict:
    """Return a conclusion with its report, its ``error.pb``, and copies of what it rests on.

    Args:
        concluded: on the attempt.
        recording: whose node seals.
    """
    conclusion = concluded.conclusion
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
        code=verdict.root.code if verdict.root is not None else verdict.code,
        message=flyte_message(report),
        kind=decision.kind,
        origin=decision.origin,
        fault_timestamp_ns=verdict.timestamp_ns,
        worker=verdict.node or "",
    )
    bundle = pack({bundle_path(path): data for path, data in concluded.files.items()})
    return SealedVerdict(verdict, decision, seal, encode_seal(seal), recording, conclusion, report, bundle=bundle)


def sealed_elsewhere(document: bytes, recording: Recording, *, durable: bool) -> SealedVerdict:
    """Return the verdict that another node sealed.

    Args:
        document: its ``error.pb``.
        recording: this node's.
        durable: whether the document is in the storage.

    Raises:
        BadDocumentError: the document is not a sealed verdict of a version that can be read.
    """
    seal = decode(document, DocumentRef(ERROR_FILE))
    if not isinstance(seal, Seal):
        raise BadDocumentError(f"the {ERROR_FILE} holds no sealed verdict")
    verdict, decision = verdict_from_json(seal.json), decision_from_json(seal.json)
    if verdict is None or decision is None:
        raise BadDocumentError(f"the {ERROR_FILE} was sealed by another version")
    return SealedVerdict(verdict, decision, seal, document, recording, for_all=True, durable=durable)


def torch_error_data(verdict: Verdict) -> dict[str, Any]:
    """Return the root cause as torch's ``error.json`` has it."""
    root = verdict.root
    exception = root.exception if root is not None else None
    return error_file_data(
        exception.type if exception is not None else verdict.code,
        exception.message if exception is not None else verdict.headline,
        verdict.message,
        verdict.timestamp_ns or time.time_ns(),
    )
