"""After a failure on this node: wait a bounded time for the other nodes, read, conclude."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from firstfault.conclude import conclude
from firstfault.errors import StoreError
from firstfault.model import Phase
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.reading.assemble import Snapshot, assemble
from firstfault.retry import RetryContext
from firstfault.strategies import DEFAULT_STRATEGY, strategy_names
from firstfault_torch.guard import bounded, caught, logger
from firstfault_torch.verdict.previous import previous_attempt, retries_left

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from firstfault.conclude import Conclusion
    from firstfault.model import JobErrors, NodePresence, WorkerError
    from firstfault.retry import RetryPolicy
    from firstfault_torch.context import Recording
    from firstfault_torch.engine import Engine
    from firstfault_torch.options import Options

__all__ = ["Wait", "conclude_on_node"]

_NO_ANSWER_S = 3.0
"""A node that has not acknowledged the failure after so many seconds counts as dead, and is not waited for."""
_FALLBACK = "earliest"
"""The strategy that replaces one that raises: the simplest one."""
_LEAST_S = 0.3
"""Minimum wait for the verdict on the attempt before, seconds, even if the node must not wait for the others."""
_STORAGE_S = 10.0
"""Longest time that listing and reading may take beyond the wait for the other nodes."""


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a node waits for the others, and what ends the wait earlier."""

    seconds: float
    expected_nodes: int | None = None
    """Overrides what the roster says."""
    heard_by: Callable[[], set[int] | None] = lambda: None
    """Returns the group ranks of the agents that acknowledged the failure; None: the store is gone."""
    give_up: threading.Event | None = None
    """Once set, ends the wait."""


def conclude_on_node(
    recording: Recording, failures: Sequence[WorkerError], engine: Engine, options: Options, wait: Wait
) -> Conclusion:
    """Return the verdict on the attempt and the decision.

    What this node knows counts in any case, also if the storage cannot be listed. A policy that raises is replaced by
    the default policy, a strategy that raises by `earliest`, with a warning.

    Args:
        recording: where the documents are, and the strategy.
        failures: what this node knows itself, as its documents say it.
        engine: that runs the attempt.
        options: the task's.
        wait: for the nodes that live.

    Raises:
        LookupError: no failure is on record, neither here nor in the storage.
    """
    job = _job(recording, failures, wait)
    previous = previous_attempt(recording, max(wait.seconds, _LEAST_S), wait.give_up)
    attempt = recording.identity.attempt
    context = RetryContext(
        attempt=attempt,
        retries=options.retries,
        retries_left=retries_left(attempt, options.retries, previous),
        pods_alive=engine.enforces(job),
        previous_fingerprint=previous.verdict.fingerprint if previous is not None else "",
    )
    logged = ""
    for strategy, policy in _alternatives(recording.strategy, options.retry_policy):
        conclusion, error = caught(partial(conclude, job, strategy=strategy, policy=policy, context=context), Exception)
        if error is None:
            break
        if (strategy, policy) == (_FALLBACK, None):
            raise error
        # both may be third-party code: the attempt still needs a verdict, and each error one log line
        if str(error) != logged:
            logger.warning(
                "the strategy %s or the task's retry policy failed (%s: %s); firstfault's defaults decide",
                strategy,
                type(error).__name__,
                error,
            )
        logged = str(error)
    if conclusion is None:
        raise LookupError("no failure is on record, neither here nor in the storage")
    return conclusion


def _job(recording: Recording, failures: Sequence[WorkerError], wait: Wait) -> JobErrors:
    own = Snapshot(documents=tuple(failures))
    # an unknown strategy is reported when it is asked for its verdict
    strategy = recording.strategy if recording.strategy in strategy_names() else DEFAULT_STRATEGY
    reader = MultiErrorFileOutputReader(
        recording.output_prefix,
        strategy=strategy,
        settle_seconds=wait.seconds,
        own_snapshot=own,
        expected_nodes=wait.expected_nodes,
        enough=_LivingNodes(wait.heard_by).have_reported,
        give_up=wait.give_up,
    )

    def read() -> JobErrors | None:
        try:
            return reader.job()
        except StoreError as error:
            logger.warning("only this node's own documents are read: %s", error)
            return None

    job = bounded(read, wait.seconds + _STORAGE_S, "reading the other nodes' documents")
    if job is not None:
        return job
    note = "own node only, the other nodes' documents could not be read in time"
    return assemble(replace(own, notes=(note,)), expected_nodes=wait.expected_nodes, settled=False)


def _alternatives(strategy: str, policy: RetryPolicy | None) -> list[tuple[str, RetryPolicy | None]]:
    """Return what to try in turn: the task's own; without its strategy; without its policy; without both."""
    found: list[tuple[str, RetryPolicy | None]] = [(strategy, policy), (_FALLBACK, policy)]
    return found if policy is None else [*found, (strategy, None), (_FALLBACK, None)]


class _LivingNodes:
    """Tells when every living node has reported: an agent that lives acknowledges a failure within milliseconds.

    Args:
        heard_by: returns the group ranks of the agents that acknowledged; None: the shared store is gone with its node.
    """

    def __init__(self, heard_by: Callable[[], set[int] | None]) -> None:
        self._heard_by = heard_by
        self._since = time.monotonic()

    def have_reported(self, roster: Sequence[NodePresence]) -> bool:
        """Whether every living node has reported."""
        if time.monotonic() - self._since < _NO_ANSWER_S:
            return False
        last = max((entry.place.round for entry in roster), default=0)
        current = [entry for entry in roster if entry.place.round == last]
        done = {entry.place.group_rank for entry in current if entry.phase is not Phase.JOINED}
        living = self._heard_by()
        if living is None:
            nodes = max((entry.place.group_world_size for entry in current), default=0)
            return nodes > 1 and len(done) >= nodes - 1
        return bool(living) and living <= done
