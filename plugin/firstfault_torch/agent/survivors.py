"""Lets the workers of a node go on after one of them has ended, because they restart in their processes.

torch's agent stops all workers of a node when one has ended. Here they are looked at without torch, until they have
completed or have given up.
"""

from __future__ import annotations

import datetime as dt
import time
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState

from firstfault_torch.compat.torch_agent import handed_over, let_workers_end, worker_processes
from firstfault_torch.guard import bounded, logger
from firstfault_torch.inprocess.store import TCPStore, recovered_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from firstfault_torch.agent.local_workers import LocalWorkers
    from firstfault_torch.agent.reporter import Reporter

__all__ = ["Survivors"]

_STORE_S = 2.0
_NO_WORKERS = "firstfault/inprocess/no-workers"
"""Counts the nodes of a round of which no worker goes on."""
_GIVING_UP_S = 2.0
"""Longest wait for the other workers when one has given up."""
_ENDING_S = 0.05


class Survivors:
    """The workers of one node that go on.

    Args:
        workers: of the node.
        rank_of: global rank of a local rank, as the agent gave it.
        reporter: knows the round.
    """

    def __init__(self, workers: LocalWorkers, rank_of: Callable[[int], int | None], reporter: Reporter) -> None:
        self._workers = workers
        self._rank_of = rank_of
        self._reporter = reporter
        self._lost: set[int] = set()
        self._has_none = False
        self._gave_up = 0.0

    def begin_round(self) -> None:
        """Forget the round before."""
        self._lost = set()
        self._has_none = False
        self._gave_up = 0.0

    def look(self, group: WorkerGroup, context: Any) -> RunResult | None:
        """Return the state of the workers; None if they have given up, or all nodes have lost all of theirs."""
        gave_up = [report for report in self._workers.reported().values() if not report.get("others_go_on")]
        lost = self._ended()
        for local_rank in sorted(lost - self._lost):
            logger.warning("rank %s has ended; the others restart without it", self._rank_of(local_rank))
        self._lost = lost
        local = range(len(worker_processes(context)))
        goes_on = set(local) - lost
        if gave_up and goes_on and self._is_within(_GIVING_UP_S):
            return RunResult(WorkerState.HEALTHY)
        if gave_up or (not goes_on and self._is_last_node(group)):
            self.forget_recovered(group)
            return None
        values = handed_over(context)
        if not goes_on <= values.keys():
            return RunResult(WorkerState.HEALTHY)
        let_workers_end(context)
        processes = worker_processes(context)
        while any(processes[rank].exitcode is None for rank in goes_on):
            time.sleep(_ENDING_S)
        # torch wants a value for each of its workers
        results = {self._rank_of(rank) or 0: values[rank] if rank in goes_on else None for rank in local}
        return RunResult(WorkerState.SUCCEEDED, return_values=results)

    def _is_last_node(self, group: WorkerGroup) -> bool:
        """Whether no node has workers that go on; else this one waits for the others as if it had succeeded."""
        nodes = group.group_world_size or 1
        if nodes == 1:
            return True
        if self._has_none:
            return False
        self._has_none = True
        store: Any = group.store
        count = bounded(lambda: store.add(_NO_WORKERS, 1), _STORE_S, "counting the nodes that have no workers")
        return count is None or count >= nodes

    def _is_within(self, seconds: float) -> bool:
        """Whether the first worker gave up less than so many seconds ago."""
        now = time.monotonic()
        self._gave_up = self._gave_up or now
        return now - self._gave_up < seconds

    def await_end(self) -> None:
        """Wait a while for all workers to give up, because those of another node have: all do so at the same time.

        A worker that is stopped before that says less.
        """
        deadline = time.monotonic() + _GIVING_UP_S
        while len(self._ended()) < self._workers.number and time.monotonic() < deadline:
            time.sleep(_ENDING_S)

    def _ended(self) -> set[int]:
        """Return the local ranks of the workers that have ended without a result, or are about to."""
        return set(self._workers.reported()) | {death.local_rank for death in self._workers.deaths()}

    def forget_recovered(self, group: WorkerGroup) -> None:
        """Take those workers for ended without a failure, without which the others had gone on before they gave up."""
        ranks = {self._rank_of(local_rank): local_rank for local_rank in self._ended()}
        round_ = str(self._reporter.recording.round)

        def ask() -> list[int | None]:
            store = TCPStore(group.master_addr, group.master_port, timeout=dt.timedelta(seconds=_STORE_S))
            return [rank for rank in ranks if rank is not None and store.check([recovered_key(rank, round_)])]

        found = bounded(ask, _STORE_S, "asking from which faults the ranks had recovered") if ranks else None
        self._workers.forget(frozenset(ranks[rank] for rank in found or ()))
