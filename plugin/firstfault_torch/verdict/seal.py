"""The sealed verdict: conclusion, report and the bytes of the ``error.pb``; its way to other nodes and attempts."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple

from firstfault.errors import BadDocumentError
from firstfault.layout import ERROR_FILE, bundle_path
from firstfault.model import DocumentRef, Origin, Seal
from firstfault.wire.documents import decode, encode_seal, pack
from firstfault.wire.json_schemas import decision_from_json, to_json, verdict_from_json
from firstfault_torch.budgets import (
    FIRST_TURN_S,
    LATER_TURN_S,
    LEAVING_FILES_S,
    LONGEST_TURN_PAUSE_S,
    NEXT_TURN_S,
    NOTIFIERS_S,
    PREVIOUS_S,
    TURN_LOOK_S,
    TURN_PAUSE_S,
)
from firstfault_torch.error_file import error_file_data
from firstfault_torch.guard import begun, bounded, caught, logger
from firstfault_torch.node.document_writer import get_file, put_file

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping
    from importlib.metadata import EntryPoint

    from firstfault.conclude import Conclusion
    from firstfault.model import Decision, Verdict
    from firstfault.report import Report
    from firstfault_torch.context import Recording

VERDICT = "firstfault/verdict.pb"
"""Below an attempt's handover URI."""
NOTIFIERS = "firstfault.notifiers"
"""The entry-point group of notifiers."""
_SINGLE = 4
"""So many nodes have turns of their own."""


class NodeConclusion(NamedTuple):
    """What a node concluded, and from what."""

    conclusion: Conclusion
    files: Mapping[str, bytes]
    """The documents and roster entries that were read, by path below the output prefix."""


@dataclass(frozen=True, slots=True)
class SealedVerdict:
    """The verdict on a failed attempt, ready to be published."""

    verdict: Verdict
    """Without credentials."""
    decision: Decision
    seal: Seal
    document: bytes
    """The ``error.pb``."""
    recording: Recording
    """This node's."""
    conclusion: Conclusion | None = None
    """None: another node concluded."""
    report: Report | None = None
    """Without credentials; message and deck are rendered from it. None: another node concluded."""
    for_all: bool = False
    """All nodes settled on it: only the node that concluded publishes it."""
    durable: bool = False
    """Whether the ``error.pb`` is in the storage."""
    bundle: bytes = b""
    """Copies of what the verdict rests on, for later readers; of what all nodes wrote, also if another node concluded,
    if each has a folder of its own."""


def seal_verdict(concluded: NodeConclusion, recording: Recording) -> SealedVerdict:
    """Return a conclusion of this node with its report, its ``error.pb``, and copies of what it rests on."""
    conclusion = concluded.conclusion
    from firstfault.render.plain import flyte_message  # noqa: PLC0415 - loaded by `load_what_concluding_needs`
    from firstfault.report import report_of  # noqa: PLC0415 - as above

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
    """Return the verdict that another node, or another attempt, sealed in this ``error.pb``.

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


# --- nodes without a store ------------------------------------------------------------------------------------------


def turn_of(group_rank: int) -> float:
    """Return how many seconds after its report a node may conclude.

    Node 0 most likely hosted the store. If it lives, it concludes at once, as node 1 does. The first nodes by group
    rank each have a turn of their own; then come ever larger groups, each node at a random moment.
    """
    position = max(group_rank - 1, 0)
    if position == 0:
        return 0.0
    if position < _SINGLE:
        return FIRST_TURN_S + NEXT_TURN_S * (position - 1)
    group = (position // _SINGLE).bit_length()
    return FIRST_TURN_S + NEXT_TURN_S * (_SINGLE - 1) + LATER_TURN_S * (group - 1 + random.random())  # noqa: S311 - no secret


def await_turn(
    find: Callable[[], SealedVerdict | None], seconds: float, give_up: threading.Event
) -> SealedVerdict | None:
    """Look for another node's verdict until this node's turn has come; None if there is none."""
    deadline = time.monotonic() + seconds
    pause = TURN_PAUSE_S * (1 + random.random())  # noqa: S311 - as above
    while True:
        answer = bounded(partial(caught, find, Exception), TURN_LOOK_S, "looking for another node's verdict", give_up)
        found, error = answer or (None, None)
        if found is not None:
            return found
        if error is not None:
            logger.debug("no verdict of another node can be read: %s", error)
        left = deadline - time.monotonic()
        if left <= 0 or give_up.wait(min(pause, left)):
            return None
        pause = min(1.5 * pause, LONGEST_TURN_PAUSE_S)


# --- the next attempt -----------------------------------------------------------------------------------------------


def leave_verdict(recording: Recording, document: bytes, give_up: threading.Event | None = None) -> None:
    """Write a sealed ``error.pb`` for the next attempt; a failure is only logged."""
    where = recording.identity.handover_uri
    if where and document:
        doing = "leaving the verdict for the next attempt"
        bounded(lambda: put_file(where, VERDICT, document), LEAVING_FILES_S, doing, give_up)


def previous_attempt(
    recording: Recording, seconds: float = PREVIOUS_S, give_up: threading.Event | None = None
) -> SealedVerdict | None:
    """Return how the attempt before ended; None if it left no verdict, or none that can be read in time."""
    where = recording.identity.previous_handover_uri
    if not where:
        return None

    def read() -> SealedVerdict | None:
        document = get_file(where, VERDICT)
        # None: its pods were lost, or it ran without firstfault
        return sealed_elsewhere(document, recording, durable=True) if document is not None else None

    return bounded(read, min(seconds, PREVIOUS_S), "reading the verdict on the attempt before", give_up)


def retries_left(attempt: int, retries: int | None, previous: Decision | None) -> int | None:
    """Return how many of the task's retries are left after the previous attempt's decision; None if it is not known.

    The attempt's number, from 0, is not enough: attempts that the platform lost do not use up the task's retries.
    """
    if not retries or attempt == 0:
        return retries
    if previous is None or previous.retries_left is None or not previous.enforced:
        return None
    return max(previous.retries_left - (previous.origin is not Origin.SYSTEM), 0)


# --- notifiers ------------------------------------------------------------------------------------------------------


def notify(report: Report) -> None:
    """Call all installed notifiers at the same time; wait for them at most 3 s. A notifier that fails is a warning.

    A notifier is a callable with one argument, the report, in the entry-point group ``firstfault.notifiers``. The node
    that concludes calls each once, after the verdict is in the storage.
    """

    def tell(point: EntryPoint) -> None:
        _, error = caught(lambda: point.load()(report))
        if error is not None:
            logger.warning("the notifier %s failed (%s: %s)", point.name, type(error).__name__, error)

    deadline = time.monotonic() + NOTIFIERS_S
    # the lookup reads the metadata of every installed package, from a disk that may be slow
    found = bounded(lambda: list(entry_points(group=NOTIFIERS)), NOTIFIERS_S, "looking for installed notifiers")
    if found is None:
        logger.warning("installed notifiers are not called: they were not found within %g s", NOTIFIERS_S)
    told = [(point.name, begun(partial(tell, point), "calling a notifier")) for point in found or ()]
    for name, ended in told:
        if not ended.wait(max(deadline - time.monotonic(), 0)):
            logger.warning("the notifier %s has not ended within %g s; it is not waited for", name, NOTIFIERS_S)
