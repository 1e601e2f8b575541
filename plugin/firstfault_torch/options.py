"""Options for recording and concluding: the fields of `Elastic` and `PyTorch` that do not depend on Flyte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from firstfault.strategies import DEFAULT_STRATEGY
from firstfault_torch.budgets import SETTLE_S, STOP_S, UPLOAD_DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup

    from firstfault.retry import RetryPolicy
    from firstfault_torch.agent.local_workers import LocalWorkers
    from firstfault_torch.agent.reporter import Reporter
    from firstfault_torch.engine import Engine
    from firstfault_torch.watchdog import Watchdog
    from firstfault_torch.worker.recording import WorkerMonitor


class RestartsInProcess(Protocol):
    """What the agent and the workers need of restarts in the workers' processes.

    `firstfault_torch.inprocess.InProcessRestart` implements it. That folder is optional, so nothing imports it: the
    user's option brings it.
    """

    def run(self, engine: Engine, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` with restarts in a worker process; an exception is recorded."""

    def call(self, function: Callable[[], Any], monitor: WorkerMonitor) -> Any:
        """Do the same for a function without arguments, in a worker that already records."""

    def by_last_rank(self, results: Mapping[int, Any]) -> dict[int, Any]:
        """Return what the workers returned, by the rank that each had in the last iteration."""

    def survivors(self, workers: LocalWorkers, rank_of: Callable[[int], int | None], reporter: Reporter) -> Survivors:
        """Return what looks at the workers of a node in torch's place."""


class Survivors(Protocol):
    """The workers of one node that continue after one of them has ended."""

    def begin_round(self) -> None:
        """Forget the round before."""

    def look(self, group: WorkerGroup, context: Any) -> RunResult | None:
        """Return the state of the workers; None if they have failed."""

    def forget_recovered(self, group: WorkerGroup) -> None:
        """Leave out the deaths from which the others have recovered."""

    def await_end(self) -> None:
        """Wait a while for all workers to give up."""


@dataclass(frozen=True, slots=True)
class Options:
    """Time limits, strategy and retry policy."""

    strategy: str = DEFAULT_STRATEGY
    """Name of the strategy that finds the root cause."""
    settle_seconds: float = SETTLE_S
    """Longest wait for the other nodes' reports after a failure on this node."""
    upload_deadline_seconds: float = UPLOAD_DEADLINE_S
    """Longest time a failing process waits for its error document to be durable."""
    stop_seconds: float = STOP_S
    """Time for workers to end after SIGTERM before they are killed."""
    retry_policy: RetryPolicy | None = None
    """None: firstfault's default."""
    in_process_restart: RestartsInProcess | None = None
    """How workers restart in their processes after a fault, an `InProcessRestart`; None: they do not."""
    retries: int | None = None
    """How often the engine may run the job again; None: not known."""
    restarts_follow_policy: bool = True
    """Whether the retry policy also decides on each of torch's `max_restarts`. False: torch restarts after any
    failure."""
    watchdog: Watchdog | None = None
    """Deadlines for the workers; None: off."""
