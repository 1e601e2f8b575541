"""The verdict and decision as this node publishes them, or takes them from another node."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from firstfault.errors import BadDocumentError
from firstfault.layout import ERROR_FILE, get_path_in_bundle
from firstfault.model import DocumentRef, Seal, Verdict
from firstfault.wire.documents import decode, encode_seal, pack
from firstfault.wire.json_schemas import from_json, to_json
from firstfault_torch import time_limits
from firstfault_torch.engine import OwnConclusion, Publication, SealedVerdict
from firstfault_torch.failures.torch_error_file import error_file_data
from firstfault_torch.guard import call_with_timeout, logger, try_call
from firstfault_torch.node_context import NodeContext

if TYPE_CHECKING:
    from firstfault.conclude import Conclusion

_NODES_WITH_SEPARATE_TURNS = 4
"""The number of nodes that each have a separate turn."""


class OtherVersionError(BadDocumentError):
    """A verdict was sealed by a version of firstfault that this one can't read."""


class NodeConclusion(NamedTuple):
    """What a node concluded, and from what."""

    conclusion: Conclusion
    files: Mapping[str, bytes]
    """The documents and roster entries that were read, by path below the output prefix."""


def seal_verdict(concluded: NodeConclusion, node_context: NodeContext) -> Publication:
    """Return a conclusion of this node with its report, its ``error.pb``,
    and copies of what it rests on.
    """
    conclusion = concluded.conclusion
    from firstfault.render.flyte_message import (  # noqa: PLC0415 - loaded by `import_conclusion_modules`
        flyte_message,
    )
    from firstfault.report.data import report_conclusion  # noqa: PLC0415 - as above

    report = report_conclusion(conclusion, uri=node_context.output_prefix)
    verdict, decision = report.verdict, report.decision
    seal = Seal(
        name="",
        digest=verdict.digest,
        count=verdict.document_count,
        strategy=verdict.strategy,
        json=to_json(verdict, decision),
        timestamp_ns=time.time_ns(),
        node=node_context.identity.node,
        code=verdict.root.code if verdict.root is not None else verdict.code,
        message=flyte_message(report),
        kind=decision.kind,
        origin=decision.origin,
        fault_timestamp_ns=verdict.timestamp_ns,
        worker=verdict.node or "",
    )
    bundle = pack({get_path_in_bundle(path): data for path, data in concluded.files.items()})
    sealed = SealedVerdict(verdict, decision, seal, encode_seal(seal))
    return Publication(sealed, node_context, OwnConclusion(conclusion, report), bundle=bundle)


def read_sealed_verdict(document: bytes) -> SealedVerdict:
    """Return the verdict that another node, or another attempt, sealed in this ``error.pb``.

    Raises:
        OtherVersionError: the verdict can't be read by this version.
        BadDocumentError: the document isn't a sealed verdict.
    """
    seal = decode(document, DocumentRef(ERROR_FILE))
    if not isinstance(seal, Seal):
        raise BadDocumentError(f"{ERROR_FILE} has no sealed verdict")
    if (sealed := from_json(seal.json)) is None:
        raise OtherVersionError(f"{ERROR_FILE} was sealed by a different version")
    return SealedVerdict(*sealed, seal, document)


def adopt_sealed_verdict(
    document: bytes, node_context: NodeContext, *, durable: bool
) -> Publication:
    """Return another node's verdict, to be published by this node; see `read_sealed_verdict`."""
    return Publication(read_sealed_verdict(document), node_context, for_all=True, durable=durable)


def build_torch_error_data(verdict: Verdict) -> dict[str, Any]:
    """Return the root cause as torch's ``error.json`` has it."""
    root = verdict.root
    exception = root.exception if root is not None else None
    name, message = (
        (verdict.code, verdict.headline)
        if exception is None
        else (exception.type, exception.message)
    )
    return error_file_data(name, message, verdict.message, verdict.timestamp_ns or time.time_ns())


def get_conclusion_delay(group_rank: int) -> float:
    """Return how many seconds after its report a node may conclude.

    Node 0 most likely hosted the store. If it lives, it concludes at once, as node 1 does. The
    first nodes by group rank each have a separate turn; then come ever larger groups, each node at
    a random moment.
    """
    position = max(group_rank - 1, 0)
    if position == 0:
        return 0.0
    if position < _NODES_WITH_SEPARATE_TURNS:
        return time_limits.SECOND_NODE_DELAY_SECONDS + time_limits.NEXT_NODE_DELAY_SECONDS * (
            position - 1
        )
    # Each group is twice as large as the one before. Hundreds of nodes can't all have separate
    # turns, and within a group the random moment makes it likely that one publishes before any
    # other looks.
    group = (position // _NODES_WITH_SEPARATE_TURNS).bit_length()
    # no secret
    later = time_limits.LATER_NODES_DELAY_SECONDS * (group - 1 + random.random())  # noqa: S311
    turns = time_limits.NEXT_NODE_DELAY_SECONDS * (_NODES_WITH_SEPARATE_TURNS - 1)
    return time_limits.SECOND_NODE_DELAY_SECONDS + turns + later


def wait_for_peer_verdict(
    find: Callable[[], Publication | None], seconds: float, shutdown_requested: threading.Event
) -> Publication | None:
    """Look for another node's verdict until this node's turn. Return None if there is none."""
    # Nodes lose the store at the same time. The random first pause keeps them from reading the
    # storage in step.
    deadline = time.monotonic() + seconds
    pause = time_limits.VERDICT_POLL_SECONDS * (1 + random.random())  # noqa: S311 - as above
    while True:
        look = partial(try_call, find, Exception)
        doing = "looking for another node's verdict"
        answer = call_with_timeout(
            look,
            time_limits.VERDICT_READ_TIMEOUT_SECONDS,
            doing,
            shutdown_requested,
        )
        found, error = answer or (None, None)
        if found is not None:
            return found
        if error is not None:
            logger.debug("no verdict of another node can be read: %s", error)
        # The last pause ends at the deadline, so there is one more look right before this node
        # concludes itself: another one may just have published.
        left = deadline - time.monotonic()
        if left <= 0 or shutdown_requested.wait(min(pause, left)):
            return None
        pause = min(1.5 * pause, time_limits.MAX_VERDICT_POLL_SECONDS)
