"""Stores a verdict for the task's next attempt, and reads the verdict of the previous attempt."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace

from firstfault.layout import VERDICT, VERDICT_JSON
from firstfault.model import Decision, Origin
from firstfault.store import join
from firstfault_torch import time_limits
from firstfault_torch.conclusion.sealed_verdict import read_sealed_verdict
from firstfault_torch.engine import SealedVerdict
from firstfault_torch.guard import call_with_timeout
from firstfault_torch.node.document_writer import get_file, put_file
from firstfault_torch.node_context import NodeContext

_MAX_RANKS = 16
PREVIOUS_VARIABLE = "FIRSTFAULT_PREVIOUS"
"""Shows a program how the attempt before ended, as JSON, for example to lower its batch size."""


def hand_over_verdict(
    node_context: NodeContext,
    sealed: SealedVerdict,
    shutdown_requested: threading.Event | None = None,
) -> None:
    """Write a verdict for the next attempt and for schedulers; a failure is only logged."""
    where = node_context.identity.handover_uri
    if where and sealed.document:

        def put() -> None:
            put_file(where, VERDICT, sealed.document)
            put_file(where, VERDICT_JSON, sealed.seal.json.encode())

        doing = "leaving the verdict for the next attempt"
        call_with_timeout(put, time_limits.HANDOVER_TIMEOUT_SECONDS, doing, shutdown_requested)


def with_previous_verdict(node_context: NodeContext) -> NodeContext:
    """Return the context with `PREVIOUS_VARIABLE` for the workers; costs one request,
    in a repeated attempt only.
    """
    identity = node_context.identity
    found = find_previous_verdict(node_context, time_limits.PREVIOUS_VERDICT_TIMEOUT_SECONDS)
    if found is None:
        # a job that a worker started inherits the variable, which is about the worker's own job
        return _with_variable(node_context, "") if PREVIOUS_VARIABLE in os.environ else node_context
    verdict, decision = found.verdict, found.decision
    summary = {
        # Flyte 2 counts a JobSet's restarts from 0 in each attempt
        "attempt": max(identity.attempt - 1, 0),
        "headline": verdict.headline,
        "category": verdict.category,
        "ranks": verdict.ranks[:_MAX_RANKS],
        "node": verdict.node,
        "action": decision.action.value,
        "reason": decision.reason,
        "failed_starts": decision.failed_starts,
        "file": join(identity.previous_handover_uri, VERDICT_JSON),
    }
    return _with_variable(node_context, json.dumps(summary))


def _with_variable(node_context: NodeContext, value: str) -> NodeContext:
    variables = {**node_context.identity.worker_environment, PREVIOUS_VARIABLE: value}
    return replace(
        node_context, identity=replace(node_context.identity, worker_environment=variables)
    )


def find_previous_verdict(
    node_context: NodeContext, seconds: float, shutdown_requested: threading.Event | None = None
) -> SealedVerdict | None:
    """Return how the previous attempt ended. Return None if it left no verdict, or none that can be
    read in time.
    """
    where = node_context.identity.previous_handover_uri
    if not where:
        return None

    def read() -> SealedVerdict | None:
        document = get_file(where, VERDICT)
        # None if its pods were lost, or if it ran without firstfault
        return read_sealed_verdict(document) if document is not None else None

    return call_with_timeout(
        read,
        seconds,
        "reading the verdict on the attempt before",
        shutdown_requested,
    )


def count_retries_left(attempt: int, retries: int | None, previous: Decision | None) -> int | None:
    """Return how many of the task's retries the previous attempt's decision left, None if unknown.

    The attempt's number, from 0, isn't enough: attempts that the platform lost don't use up the
    task's retries.
    """
    if not retries or attempt == 0:
        return retries
    if previous is None or previous.retries_left is None or not previous.enforced:
        return None
    return max(previous.retries_left - (previous.origin is not Origin.SYSTEM), 0)
