"""After a failure: read what the nodes wrote, waiting a bounded time for those that have not, and conclude."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from firstfault.errors import StoreError
from firstfault.model import Phase
from firstfault.retry import RetryContext
from firstfault.strategies import DEFAULT_STRATEGY, strategy_names
from firstfault.wire.json_schemas import to_json
from firstfault_torch.budgets import (
    CONCLUDING_S,
    NO_ANSWER_S,
    PREVIOUS_S,
    READING_S,
    TERMINATED_CONCLUDING_S,
    TERMINATED_PREVIOUS_S,
    TERMINATED_READING_S,
)
from firstfault_torch.guard import bounded, caught, logger
from firstfault_torch.verdict.seal import NodeConclusion, previous_attempt, retries_left

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from firstfault.conclude import Conclusion
    from firstfault.model import JobErrors, NodePresence
    from firstfault.restart import RestartContext
    from firstfault.retry import RetryPolicy
    from firstfault_torch.context import Recording
    from firstfault_torch.engine import Engine
    from firstfault_torch.options import Options

_FALLBACK = "earliest"
"""The strategy that replaces one that raises: the simplest one."""


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a node waits for the others, and what ends the wait earlier."""

    seconds: float
    expected_nodes: int | None = None
    """Overrides the number in the roster."""
    is_hurried: bool = False
    """The process is about to end: nothing but the wait for the nodes may take long."""
    complete: bool = True
    """False: it is known that a node that lives has not reported."""
    give_up: threading.Event | None = None
    """Once set, ends the wait."""


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

    The copies count in any case, also if the storage cannot be listed. A policy that raises is replaced by
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
    conclusion = _first_conclusion(job, recording.strategy, options.retry_policy, context, wait)
    if conclusion is None:
        raise LookupError("no failure is on record, neither here nor in the storage")
    return NodeConclusion(conclusion, files)


def load_what_concluding_needs() -> None:
    """Import it once the workers have started: they need not wait for it, and after a failure the disk may be gone."""
    for name in ("conclude", "output_reader", "render.plain", "report"):
        import_module(f"firstfault.{name}")


class _TooLateError(Exception):
    """A strategy or a policy did not end in time."""


def _first_conclusion(
    job: JobErrors, strategy: str, policy: RetryPolicy | None, context: RetryContext, wait: Wait
) -> Conclusion | None:
    """Return what the first strategy and policy conclude that neither raise nor take too long.

    Tried in turn: the task's own; without its strategy; without its policy; without both.
    """
    strategies = [strategy] if strategy == _FALLBACK else [strategy, _FALLBACK]
    policies = [None] if policy is None else [policy, None]
    *tried, last = [(name, chosen) for chosen in policies for name in strategies]
    seconds = TERMINATED_CONCLUDING_S if wait.is_hurried else CONCLUDING_S
    logged = ""
    for name, chosen in tried:
        call = partial(caught, partial(_concluded, job, name, chosen, context), Exception)
        hurried = TERMINATED_CONCLUDING_S
        found = bounded(call, seconds, "concluding", wait.give_up, hurried_seconds=hurried, local=True)
        conclusion, error = found or (None, _TooLateError("it takes too long"))
        if error is None:
            return conclusion
        # both may be third-party code: the attempt still needs a verdict, and each error one log line
        if str(error) != logged:
            logger.warning(
                "the strategy %s or the task's retry policy failed (%s: %s); firstfault's defaults decide",
                name,
                type(error).__name__,
                error,
            )
        logged = str(error)
        if isinstance(error, _TooLateError):
            break  # it is not known which of the two takes so long
    return _concluded(job, *last, context)


def _concluded(job: JobErrors, strategy: str, policy: RetryPolicy | None, context: RetryContext) -> Conclusion | None:
    """Conclude, with an answer that can be sealed: both may be third-party code, which fills fields with anything."""
    from firstfault.conclude import conclude  # noqa: PLC0415 - loaded by `load_what_concluding_needs`

    conclusion = conclude(job, strategy=strategy, policy=policy, context=context)
    if conclusion is not None:
        to_json(conclusion.verdict, conclusion.decision)
    return conclusion


def _context(job: JobErrors, recording: Recording, engine: Engine, options: Options, wait: Wait) -> RetryContext:
    hurried = wait.is_hurried or (wait.give_up is not None and wait.give_up.is_set())
    previous = previous_attempt(recording, TERMINATED_PREVIOUS_S if hurried else PREVIOUS_S, wait.give_up)
    attempt = recording.identity.attempt
    return RetryContext(
        attempt=attempt,
        retries=options.retries,
        retries_left=retries_left(attempt, options.retries, previous.decision if previous is not None else None),
        pods_alive=engine.enforces(job),
        previous_fingerprint=previous.verdict.fingerprint if previous is not None else "",
    )


def _job(recording: Recording, copies: Mapping[str, bytes], wait: Wait) -> tuple[JobErrors, Mapping[str, bytes]]:
    # an unknown strategy is reported when it is asked for its verdict
    strategy = recording.strategy if recording.strategy in strategy_names() else DEFAULT_STRATEGY
    from firstfault.output_reader import MultiErrorFileOutputReader  # noqa: PLC0415 - as above

    reader = MultiErrorFileOutputReader(
        recording.output_prefix,
        strategy=strategy,
        settle_seconds=wait.seconds,
        copies=copies,
        expected_nodes=wait.expected_nodes,
        enough=partial(_all_but_one, time.monotonic()),
        give_up=wait.give_up,
    )

    def read() -> JobErrors | None:
        try:
            return reader.job()
        except StoreError as error:
            logger.warning("the attempt's documents cannot be read: %s", error)
            return None

    seconds = wait.seconds + (TERMINATED_READING_S if wait.is_hurried else READING_S)
    doing = "reading the nodes' documents"
    job = bounded(read, seconds, doing, wait.give_up, hurried_seconds=TERMINATED_READING_S)
    if job is None:
        alone = reader.job_of_copies("only the documents at hand were read; the storage did not answer in time")
        return alone, reader.read_files
    return job if wait.complete else replace(job, settled=False), reader.read_files


def _all_but_one(began: float, roster: Sequence[NodePresence]) -> bool:
    """Whether every node but one has reported, a while after this one began to read.

    Nodes that cannot settle on a verdict through their store have lost its host.
    """
    if time.monotonic() - began < NO_ANSWER_S:
        return False
    last = max((entry.place.round for entry in roster), default=0)
    current = [entry for entry in roster if entry.place.round == last]
    nodes = max((entry.place.group_world_size for entry in current), default=0)
    done = {entry.place.group_rank for entry in current if entry.phase is not Phase.JOINED}
    return nodes > 1 and len(done) >= nodes - 1
