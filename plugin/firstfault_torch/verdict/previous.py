"""Passes the verdict on an attempt to the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from firstfault.model import DocumentRef, Origin, Seal
from firstfault.wire.documents import decode
from firstfault.wire.verdict_json import decision_from_json, verdict_from_json
from firstfault_torch.budgets import LEAVING_FILES_S, PREVIOUS_S
from firstfault_torch.guard import bounded
from firstfault_torch.node.document_writer import get_file, put_file

if TYPE_CHECKING:
    import threading

    from firstfault.model import Decision, Verdict
    from firstfault_torch.context import Recording

VERDICT = "firstfault/verdict.pb"
"""Below an attempt's handover URI."""


class Previous(NamedTuple):
    """How the attempt before ended."""

    verdict: Verdict
    decision: Decision


def leave_verdict(recording: Recording, document: bytes, give_up: threading.Event | None = None) -> None:
    """Write a sealed verdict for the next attempt; a failure is only logged.

    Args:
        recording: where.
        document: the sealed verdict, as Flyte gets it.
        give_up: once set, ends the wait.
    """
    where = recording.identity.handover_uri
    if where and document:
        doing = "leaving the verdict for the next attempt"
        bounded(lambda: put_file(where, VERDICT, document), LEAVING_FILES_S, doing, give_up)


def retries_left(attempt: int, retries: int | None, previous: Previous | None) -> int | None:
    """Return how many of the task's retries are left; None if it is not known.

    The attempt's number is not enough: attempts that the platform lost do not use up the task's retries.

    Args:
        attempt: number of this attempt, from 0.
        retries: the task's.
        previous: how the attempt before ended.
    """
    if not retries or attempt == 0:
        return retries
    if previous is None or previous.decision.retries_left is None or not previous.decision.enforced:
        return None
    return max(previous.decision.retries_left - (previous.decision.origin is not Origin.SYSTEM), 0)


def previous_attempt(
    recording: Recording, seconds: float = PREVIOUS_S, give_up: threading.Event | None = None
) -> Previous | None:
    """Return how the attempt before ended; None if it left no verdict, or none that can be read in time.

    Args:
        recording: where.
        seconds: longest wait, at most a few.
        give_up: once set, ends the wait.
    """
    where = recording.identity.previous_handover_uri
    if not where:
        return None

    def read() -> Previous | None:
        document = get_file(where, VERDICT)
        if document is None:
            return None  # it ended without a verdict: its pods were lost, or it ran without firstfault
        found = decode(document, DocumentRef(VERDICT))
        if not isinstance(found, Seal):
            return None
        verdict, decision = verdict_from_json(found.json), decision_from_json(found.json)
        return Previous(verdict, decision) if verdict is not None and decision is not None else None

    return bounded(read, min(seconds, PREVIOUS_S), "reading the verdict on the attempt before", give_up)
