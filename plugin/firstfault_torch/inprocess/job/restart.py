"""What the agent and the workers need of restarts in the workers' processes: a task's option."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from firstfault_torch.inprocess.options import InProcessOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from firstfault_torch.agent.local_workers import LocalWorkers
    from firstfault_torch.agent.reporter import Reporter
    from firstfault_torch.engine import Engine
    from firstfault_torch.inprocess.job.recorded import Restarted
    from firstfault_torch.inprocess.job.survivors import Survivors
    from firstfault_torch.worker.recording import WorkerMonitor


@dataclass(frozen=True)
class InProcessRestart(InProcessOptions):
    """How the ranks of a function are started again in the same processes after a fault.

    It implements `firstfault_torch.options.RestartsInProcess`. Durations are ``timedelta`` or seconds.

    Raises:
        firstfault.errors.UsageError: an option has a value that is not valid, or two are in the wrong order.
    """

    def run(self, engine: Engine, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` with restarts in a worker process; an exception is recorded and passes unchanged."""
        from firstfault_torch.worker.recording import recorded  # noqa: PLC0415 - only firstfault's agent needs it

        with recorded(engine) as monitor:
            return self.call(partial(function, *args), monitor)

    def call(self, function: Callable[[], Any], monitor: WorkerMonitor) -> Restarted:
        """Call a function with restarts in a worker that already records; see `call_with_restarts`."""
        from firstfault_torch.inprocess.job.recorded import call_with_restarts  # noqa: PLC0415 - for the same reason

        return call_with_restarts(self, function, monitor)

    def by_last_rank(self, results: Mapping[int, Any]) -> dict[int, Any]:
        """Return what the workers returned, by the rank that each had in the last iteration."""
        from firstfault_torch.inprocess.job.recorded import by_last_rank  # noqa: PLC0415 - for the same reason

        return by_last_rank(results)

    def survivors(self, workers: LocalWorkers, rank_of: Callable[[int], int | None], reporter: Reporter) -> Survivors:
        """Return what looks at the workers of a node in torch's place."""
        from firstfault_torch.inprocess.job.survivors import Survivors  # noqa: PLC0415 - for the same reason

        return Survivors(workers, rank_of, reporter)
