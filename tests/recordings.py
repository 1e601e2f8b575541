"""Makes recordings and conclusions of one node without Flyte,
for the tests of the agent and the verdict.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from firstfault.conclude import Conclusion
from firstfault.layout import error_key_for
from firstfault.model import JobErrors, WorkerError
from firstfault.model.job import pods_live
from firstfault.wire.documents import encode
from firstfault_torch.conclusion.conclude_on_node import Wait, conclude_on_node
from firstfault_torch.conclusion.sealed_verdict import NodeConclusion, seal_verdict
from firstfault_torch.engine import PlainEngine, Publication
from firstfault_torch.node.document_writer import document_path
from firstfault_torch.node_context import Identity, NodeContext
from firstfault_torch.options import Options

_IDENTITY = {"attempt", "node", "handover_uri", "previous_handover_uri"}


class RetryingEngine(PlainEngine):
    """An engine that retries a job whose pods live; the documents lie in the folder itself."""

    def identity(self) -> Identity:
        """Return the node that the variables name,
        without a place to hand files over to the next attempt.
        """
        places = {"output_prefix": self.folder, "handover_uri": "", "previous_handover_uri": ""}
        return replace(super().identity(), **places)

    def enforces(self, job: JobErrors) -> bool:
        """Whether all pods live."""
        return pods_live(job)


def make_node_context(uri: str, deadline_seconds: float = 5.0, **fields: Any) -> NodeContext:
    """Return a recording into an output prefix by the node in the variables;
    `fields` are its own or its identity's.
    """
    identity = {name: fields.pop(name) for name in _IDENTITY & fields.keys()}
    strategy = fields.pop("strategy", "earliest")
    return NodeContext(
        strategy,
        replace(RetryingEngine(uri).identity(), **identity),
        deadline_seconds,
        **fields,
    )


def conclude_node(
    node_context: NodeContext,
    failures: Sequence[WorkerError],
    *,
    seconds: float = 0.0,
    policy: Any = None,
    retries: int | None = None,
    **wait: Any,
) -> Conclusion:
    """Return the conclusion of a node of a job that its engine retries."""
    options = Options(retry_policy=policy, retries=retries)
    copies = {
        document_path(
            failure.documents[0].name if failure.documents else error_key_for(failure)
        ): encode(failure)
        for failure in failures
    }
    engine = RetryingEngine(node_context.output_prefix)
    return conclude_on_node(node_context, copies, engine, options, Wait(seconds, **wait)).conclusion


def seal_conclusion(conclusion: Conclusion, node_context: NodeContext) -> Publication:
    """Return a conclusion as its node publishes it, without copies."""
    return seal_verdict(NodeConclusion(conclusion, {}), node_context)
