"""Hands a verdict to the task's next attempt, and reads that of the previous one."""

from __future__ import annotations

import threading
from functools import partial

from firstfault.model import Decision, Origin
from firstfault_torch import time_limits
from firstfault_torch.conclusion.sealed_verdict import adopt_sealed_verdict
from firstfault_torch.engine import SealedVerdict
from firstfault_torch.guard import call_with_timeout
from firstfault_torch.node.document_writer import get_file, put_file
from firstfault_torch.node_context import NodeContext

VERDICT = "firstfault/verdict.pb"
"""Below an attempt's handover URI."""


def hand_over_verdict(
    node_context: NodeContext, document: bytes, shutdown_requested: threading.Event | None = None
) -> None:
    """Write a sealed ``error.pb`` for the next attempt; a failure is only logged."""
    where = node_context.identity.handover_uri
    if where and document:
        put, doing = partial(put_file, where, VERDICT, document), "leaving the verdict for the next attempt"
        call_with_timeout(put, time_limits.HANDOVER_TIMEOUT_SECONDS, doing, shutdown_requested)


def find_previous_verdict(
    node_context: NodeContext, seconds: float, shutdown_requested: threading.Event | None = None
) -> SealedVerdict | None:
    """Return how the attempt before ended; None if it left no verdict, or none that can be read in time."""
    where = node_context.identity.previous_handover_uri
    if not where:
        return None

    def read() -> SealedVerdict | None:
        document = get_file(where, VERDICT)
        # None: its pods were lost, or it ran without firstfault
        return adopt_sealed_verdict(document, node_context, durable=True) if document is not None else None

    return call_with_timeout(read, seconds, "reading the verdict on the attempt before", shutdown_requested)


def count_retries_left(attempt: int, retries: int | None, previous: Decision | None) -> int | None:
    """Return how many of the task's retries are left after the previous attempt's decision; None if unknown.

    The attempt's number, from 0, isn't enough: attempts that the platform lost don't use up the task's retries.
    """
    if not retries or attempt == 0:
        return retries
    if previous is None or previous.retries_left is None or not previous.enforced:
        return None
    return max(previous.retries_left - (previous.origin is not Origin.SYSTEM), 0)
