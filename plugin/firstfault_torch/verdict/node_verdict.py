"""After a failure: read what the nodes wrote, waiting a bounded time for those that have not, and conclude."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from firstfault.conclude import conclude
from firstfault.errors import StoreError
from firstfault.model import Phase
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.retry import RetryContext
from firstfault.strategies import DEFAULT_STRATEGY, strategy_names
from firstfault.wire.verdict_json import to_json
from firstfault_torch.guard import bounded, caught, logger
from firstfault_torch.verdict.previous import previous_attempt, retries_left

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from firstfault.conclude import Conclusion
    from firstfault.model import JobErrors, NodePresence
    from firstfault.restart import RestartContext
    from firstfault.retry import RetryPolicy
    from firstfault_torch.context import Recording
    from firstfault_torch.engine import Engine
    from firstfault_torch.options import Options

__all__ = ["NodeConclusion", "Wait", "conclude_on_node"]

_NO_ANSWER_S = 3.0
"""After so many seconds the node that hosted the store counts as dead, and is not waited for."""
_FALLBACK = "earliest"
"""The strategy that replaces one that raises: the simplest one."""
_CONCLUDING_S = 30.0
"""Longest time that a strategy and a policy may take; on 100,000 documents firstfault's own take seconds."""
_HURRIED_CONCLUDING_S = 3.0
"""The same if the process is about to end."""
_PREVIOUS_S = 2.0
"""Longest wait for the verdict on the attempt before, seconds."""
_LEAST_S = 0.3
"""The same if the process is about to end."""
_STORAGE_S = 10.0
"""Longest time that listing and reading may take beyond the wait for the other nodes."""
_HURRIED_STORAGE_S = 1.5
"""The same if the process is about to end."""


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a node waits for the others, and what ends the wait earlier."""

    seconds: float
    expected_nodes: int | None = None
    """Overrides what the roster says."""
    is_hurried: bool = False
    """The process is about to end: nothing but the wait for the nodes may take long."""
    complete: bool = True
    """False: it is known that a node that lives has not reported."""
    give_up: threading.Event | None = None
    """Once set, ends the wait."""


class NodeConclusion(NamedTuple):
    """What a node concluded, and from what."""

    conclusion: Conclusion
    files: Mapping[str, bytes]
    """The documents and roster entries that were read, by path below the output prefix."""


def conclude_on_node(  # noqa: PLR0913 - the parts of a verdict
    recording: Recording,
    copies: Mapping[str, bytes],
    engine: Engine,
    options: Options,
    wait: Wait,
    *,
    restart: RestartContext | None = None,
) -> NodeConclusion:
    """Return the verdict on the attempt and the decision.

    What the copies say counts in any case, also if the storage cannot be listed. A policy that raises is replaced by
    the default policy, a strategy that raises by `earliest`; if they take too long, both are. Each with a warning.

    Args:
        recording: where the documents are, and the strategy.
        copies: documents and roster entries that this node has, by path below the output prefix.
        engine: that runs the attempt.
        options: the task's.
        wait: for the nodes that live.
        restart: the question is whether torch restarts the workers within the attempt; None: whether the attempt is
            followed by another one.

    Raises:
        LookupError: no failure is on record, neither here nor in the storage.
    """
    job, files = _job(recording, copies, wait)
    if restart is None:
        context = _context(job, recording, engine, options, wait)
    else:
        # a pod that left may have sealed a verdict on the attempt, and with it another decision
        job = replace(job, seals=())
        context = restart.for_policy(RetryContext(attempt=recording.identity.attempt, retries=options.retries))
    logged = ""
    is_late = False
    for strategy, policy in _alternatives(recording.strategy, options.retry_policy):
        is_last = (strategy, policy) == (_FALLBACK, None)
        if is_late and not is_last:
            continue  # it is not known which of the two takes so long
        call = partial(_concluded, job, strategy, policy, context)
        conclusion, error = caught(call, Exception) if is_last else _in_time(call, wait)
        if error is None:
            break
        if is_last:
            raise error
        is_late = isinstance(error, _TooLateError)
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
    return NodeConclusion(conclusion, files)


class _TooLateError(Exception):
    """A strategy or a policy did not end in time."""


def _concluded(job: JobErrors, strategy: str, policy: RetryPolicy | None, context: RetryContext) -> Conclusion | None:
    """Conclude, with an answer that can be sealed: both may be third-party code, which fills fields with anything."""
    conclusion = conclude(job, strategy=strategy, policy=policy, context=context)
    if conclusion is not None:
        to_json(conclusion.verdict, conclusion.decision)
    return conclusion


def _in_time(call: Callable[[], Conclusion | None], wait: Wait) -> tuple[Conclusion | None, BaseException | None]:
    """Return what `call` returns, and what it raises: it must not hold the pod for ever."""
    seconds = _HURRIED_CONCLUDING_S if wait.is_hurried else _CONCLUDING_S
    found = bounded(
        lambda: caught(call, Exception),
        seconds,
        "concluding",
        wait.give_up,
        hurried_seconds=_HURRIED_CONCLUDING_S,
        local=True,
    )
    return found or (None, _TooLateError("it takes too long"))


def _context(job: JobErrors, recording: Recording, engine: Engine, options: Options, wait: Wait) -> RetryContext:
    hurried = wait.is_hurried or (wait.give_up is not None and wait.give_up.is_set())
    previous = previous_attempt(recording, _LEAST_S if hurried else _PREVIOUS_S, wait.give_up)
    attempt = recording.identity.attempt
    return RetryContext(
        attempt=attempt,
        retries=options.retries,
        retries_left=retries_left(attempt, options.retries, previous),
        pods_alive=engine.enforces(job),
        previous_fingerprint=previous.verdict.fingerprint if previous is not None else "",
    )


def _job(recording: Recording, copies: Mapping[str, bytes], wait: Wait) -> tuple[JobErrors, Mapping[str, bytes]]:
    # an unknown strategy is reported when it is asked for its verdict
    strategy = recording.strategy if recording.strategy in strategy_names() else DEFAULT_STRATEGY
    reader = MultiErrorFileOutputReader(
        recording.output_prefix,
        strategy=strategy,
        settle_seconds=wait.seconds,
        copies=copies,
        expected_nodes=wait.expected_nodes,
        enough=_AllButOne().have_reported,
        give_up=wait.give_up,
    )

    def read() -> JobErrors | None:
        try:
            return reader.job()
        except StoreError as error:
            logger.warning("the attempt's documents cannot be read: %s", error)
            return None

    seconds = wait.seconds + (_HURRIED_STORAGE_S if wait.is_hurried else _STORAGE_S)
    doing = "reading the nodes' documents"
    job = bounded(read, seconds, doing, wait.give_up, hurried_seconds=_HURRIED_STORAGE_S)
    if job is None:
        alone = reader.job_of_copies("only the documents at hand were read; the storage did not answer in time")
        return alone, reader.read_files
    return job if wait.complete else replace(job, settled=False), reader.read_files


def _alternatives(strategy: str, policy: RetryPolicy | None) -> list[tuple[str, RetryPolicy | None]]:
    """Return what to try in turn: the task's own; without its strategy; without its policy; without both."""
    found: list[tuple[str, RetryPolicy | None]] = [(strategy, policy), (_FALLBACK, policy)]
    return found if policy is None else [*found, (strategy, None), (_FALLBACK, None)]


class _AllButOne:
    """Tells when every node but one has reported, a while after this one.

    Nodes that cannot settle on a verdict through their store have lost its host.
    """

    def __init__(self) -> None:
        self._since = time.monotonic()

    def have_reported(self, roster: Sequence[NodePresence]) -> bool:
        """Whether they have."""
        if time.monotonic() - self._since < _NO_ANSWER_S:
            return False
        last = max((entry.place.round for entry in roster), default=0)
        current = [entry for entry in roster if entry.place.round == last]
        nodes = max((entry.place.group_world_size for entry in current), default=0)
        done = {entry.place.group_rank for entry in current if entry.phase is not Phase.JOINED}
        return nodes > 1 and len(done) >= nodes - 1
