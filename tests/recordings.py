"""Makes recordings and conclusions of one node, for the tests of the agent and the verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from firstfault.layout.keys import error_key_for
from firstfault.wire.documents import encode
from firstfault_torch.context import Recording
from firstfault_torch.node.document_writer import document_path
from firstfault_torch.options import Options
from firstfault_torch.verdict.node_verdict import NodeConclusion, Wait, conclude_on_node
from firstfault_torch.verdict.seal import seal_verdict
from flytekitplugins.firstfault.flyte_engine import FlyteEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault.conclude import Conclusion
    from firstfault.model import WorkerError
    from firstfault_torch.verdict.seal import SealedVerdict

_IDENTITY = {"attempt", "node", "handover_uri", "previous_handover_uri"}


def recording_at(uri: str, deadline_seconds: float = 5.0, **fields: Any) -> Recording:
    """Return a recording into an output prefix, by the node that Flyte's variables name.

    Args:
        uri: the output prefix.
        deadline_seconds: of uploads.
        fields: of the recording, or of its identity.
    """
    identity = {name: fields.pop(name) for name in _IDENTITY & fields.keys()}
    strategy = fields.pop("strategy", "earliest")
    return Recording(strategy, replace(FlyteEngine(uri).identity(), **identity), deadline_seconds, **fields)


def concluded(
    recording: Recording,
    failures: Sequence[WorkerError],
    *,
    seconds: float = 0.0,
    policy: Any = None,
    retries: int | None = None,
    **wait: Any,
) -> Conclusion:
    """Return the conclusion of a node of a Flyte job."""
    options = Options(retry_policy=policy, retries=retries)
    copies = {
        document_path(failure.documents[0].name if failure.documents else error_key_for(failure)): encode(failure)
        for failure in failures
    }
    engine = FlyteEngine(recording.output_prefix)
    return conclude_on_node(recording, copies, engine, options, Wait(seconds, **wait)).conclusion


def sealed(conclusion: Conclusion, recording: Recording) -> SealedVerdict:
    """Return a conclusion's sealed verdict, without copies."""
    return seal_verdict(NodeConclusion(conclusion, {}), recording)
