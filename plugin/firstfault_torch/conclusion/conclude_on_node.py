"""Concludes on the failure on this node: reads the documents, runs strategy and retry policy,
each within a limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from firstfault.errors import StoreError
from firstfault.model import JobErrors, NodePresence
from firstfault.model.job import nodes_done
from firstfault.retry import RetryContext, RetryPolicy, find_machine
from firstfault.strategies import DEFAULT_STRATEGY, list_strategy_names
from firstfault.wire.json_schemas import to_json
from firstfault_torch import time_limits
from firstfault_torch.conclusion.previous_attempt import count_retries_left, find_previous_verdict
from firstfault_torch.conclusion.sealed_verdict import NodeConclusion
from firstfault_torch.engine import Engine
from firstfault_torch.guard import call_with_timeout, logger, try_call
from firstfault_torch.node_context import NodeContext
from firstfault_torch.protocol.shutdown import ExitStep, Hurry, get_limit

if TYPE_CHECKING:
    from firstfault.conclude import Conclusion, RestartContext
    from firstfault_torch.options import Options

_FALLBACK_STRATEGY = "earliest"
"""The strategy that replaces one that raises: the simplest one."""


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a node waits for all other nodes, and what ends the wait earlier."""

    seconds: float
    expected_nodes: int | None = None
    """Number of nodes in place of the number in the roster."""
    hurry: Hurry = Hurry.NONE
    """Whether the process is about to exit, so only the wait for the nodes may take long."""
    complete: bool = True
    """False if a live node is known not to have reported."""
    shutdown_requested: threading.Event | None = None
    """Once set, ends the wait."""


def conclude_on_node(  # noqa: PLR0913 - the parts of a verdict
    node_context: NodeContext,
    copies: Mapping[str, bytes],
    engine: Engine,
    options: Options,
    wait: Wait,
    *,
    restart: RestartContext | None = None,
) -> NodeConclusion:
    """Return the verdict on the attempt and the decision.

    The copies count in any case, also if the storage can't be listed. A policy that raises is
    replaced by the default policy, a strategy that raises by `earliest`; if they take too long,
    both are. Each with a warning.

    `copies` are documents and roster entries that this node has, by path below the output prefix;
    `wait` is for the nodes that live. With `restart`, decide whether torch restarts the workers
    within the attempt; without it, whether another attempt follows.

    Raises:
        LookupError: no failure is recorded, on this node or in storage.
    """
    job, files = _read_job(node_context, copies, wait)
    if restart is None:
        context = _build_retry_context(job, node_context, engine, options, wait)
    else:
        # a pod that left may have sealed a verdict on the attempt, and with it another decision
        job = replace(job, seals=())
        context = restart.to_retry_context(
            RetryContext(attempt=node_context.identity.attempt, retries=options.retries)
        )
    conclusion = _first_conclusion(job, node_context.strategy, options.retry_policy, context, wait)
    if conclusion is None:
        raise LookupError("no failure is recorded, on this node or in storage")
    return NodeConclusion(conclusion, files)


def import_conclusion_modules() -> None:
    """Import it once the workers have started: they need not wait for it,
    and after a failure the disk may be gone.
    """
    strategies = ("strategies.earliest", "strategies.rules")
    for name in (
        "conclude",
        "attempt_reader",
        "reading.attempt",
        "render.flyte_message",
        "report",
        *strategies,
    ):
        import_module(f"firstfault.{name}")


class _TooLateError(Exception):
    """A strategy or a policy didn't end in time."""


def _first_conclusion(
    job: JobErrors,
    strategy: str,
    policy: RetryPolicy | None,
    context: RetryContext,
    wait: Wait,
) -> Conclusion | None:
    """Return what the first strategy and policy conclude that neither raise nor take too long.

    Tried in turn: the task's own; without its strategy; without its policy; without both.
    """
    strategies = [strategy] if strategy == _FALLBACK_STRATEGY else [strategy, _FALLBACK_STRATEGY]
    policies = [None] if policy is None else [policy, None]
    *tried, last = [(name, chosen) for chosen in policies for name in strategies]
    hurried = get_limit(ExitStep.CONCLUDE, Hurry.TERMINATED)
    seconds = get_limit(ExitStep.CONCLUDE, wait.hurry)
    logged = ""
    for name, chosen in tried:
        # In a thread that stays behind after the timeout, perhaps for ever: it has its own result,
        # and nothing waits for it.
        call = partial(try_call, partial(_conclude, job, name, chosen, context), Exception)
        shutdown = wait.shutdown_requested
        found = call_with_timeout(
            call,
            seconds,
            "concluding",
            shutdown,
            shutdown_seconds=hurried,
            local=True,
        )
        conclusion, error = found or (None, _TooLateError("it takes too long"))
        if error is None:
            return conclusion
        # both may be third-party code: the attempt still needs a verdict, and each error one log
        # line
        if str(error) != logged:
            text = (
                "the strategy %s or the task's retry policy failed (%s: %s); using firstfault's"
                " defaults"
            )
            logger.warning(text, name, type(error).__name__, error)
        logged = str(error)
        if isinstance(error, _TooLateError):
            break  # either of the two may be slow
    # The defaults last, without a thread and without a limit: they are this project's code, and
    # need no storage.
    return _conclude(job, *last, context)


def _conclude(
    job: JobErrors,
    strategy: str,
    policy: RetryPolicy | None,
    context: RetryContext,
) -> Conclusion | None:
    """Conclude, with an answer that can be sealed: both may be third-party code,
    which fills fields with anything.
    """
    from firstfault.conclude import (  # noqa: PLC0415 - loaded by `import_conclusion_modules`
        conclude,
    )

    conclusion = conclude(job, strategy=strategy, policy=policy, context=context)
    if conclusion is not None:
        to_json(conclusion.verdict, conclusion.decision)
    return conclusion


def _build_retry_context(
    job: JobErrors,
    node_context: NodeContext,
    engine: Engine,
    options: Options,
    wait: Wait,
) -> RetryContext:
    # The event may be set later than `wait` was made: a signal that arrived during the reading
    # hurries this, too.
    is_ending = wait.shutdown_requested is not None and wait.shutdown_requested.is_set()
    seconds = get_limit(ExitStep.PREVIOUS_VERDICT, Hurry.TERMINATED if is_ending else wait.hurry)
    previous = find_previous_verdict(node_context, seconds, wait.shutdown_requested)
    attempt = node_context.identity.attempt
    return RetryContext(
        attempt=attempt,
        retries=options.retries,
        retries_left=count_retries_left(
            attempt, options.retries, previous.decision if previous is not None else None
        ),
        pods_alive=engine.enforces(job),
        previous_fingerprint=previous.verdict.fingerprint if previous is not None else "",
        previous_machine=find_machine(previous.verdict) if previous is not None else "",
        lifetime_seconds=max(time.time() - node_context.incarnation / 1000, 0.0),
        failed_starts=previous.decision.failed_starts if previous is not None else 0,
        stops_repeats=options.stops_repeats,
    )


def _read_job(
    node_context: NodeContext, copies: Mapping[str, bytes], wait: Wait
) -> tuple[JobErrors, Mapping[str, bytes]]:
    # an unknown strategy is reported when it is asked for its verdict
    strategy = (
        node_context.strategy
        if node_context.strategy in list_strategy_names()
        else DEFAULT_STRATEGY
    )
    from firstfault.attempt_reader import AttemptReader  # noqa: PLC0415 - as above

    reader = AttemptReader(
        node_context.output_prefix,
        strategy=strategy,
        settle_seconds=wait.seconds,
        copies=copies,
        expected_nodes=wait.expected_nodes,
        enough=partial(_all_but_one, time.monotonic()),
        shutdown_requested=wait.shutdown_requested,
    )

    def read() -> JobErrors | None:
        try:
            return reader.job()
        except StoreError as error:
            logger.warning("the attempt's documents cannot be read: %s", error)
            return None

    doing = "reading the nodes' documents"
    hurried = get_limit(ExitStep.READ, Hurry.TERMINATED)
    seconds = wait.seconds + get_limit(ExitStep.READ, wait.hurry)
    job = call_with_timeout(read, seconds, doing, wait.shutdown_requested, shutdown_seconds=hurried)
    # The reading thread may still run, blocked in the storage. The copies are in memory: reading
    # them needs no request.
    if job is None:
        alone = reader.read_copies(
            "only the documents at hand were read; the storage did not answer in time"
        )
        return alone, reader.read_files
    return job if wait.complete else replace(job, settled=False), reader.read_files


def _all_but_one(began: float, roster: Sequence[NodePresence]) -> bool:
    """Whether every node but one has reported, a while after this one began to read.

    Nodes that can't settle on a verdict through their store have lost its host.
    """
    has_waited = time.monotonic() - began >= time_limits.ACKNOWLEDGMENT_TIMEOUT_SECONDS
    return has_waited and nodes_done(roster, missing=1)
