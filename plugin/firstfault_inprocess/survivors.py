"""Lets the workers of a node continue after one of them has ended,
because they restart in their processes.

torch's agent stops all workers of a node when one has ended. So this module watches them without
torch, until they have completed or have given up.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState

from firstfault_inprocess.detached import reap_adopted_helpers
from firstfault_inprocess.store import TCPStore, recovered_key
from firstfault_torch import time_limits
from firstfault_torch.compat import torch_agent
from firstfault_torch.guard import BackgroundCall, call_with_timeout, logger
from firstfault_torch.node_context import OTHERS_CONTINUE

if TYPE_CHECKING:
    from firstfault_torch.agent.local_workers import LocalWorkers
    from firstfault_torch.agent.reporter import Reporter

_NO_WORKERS = "firstfault/inprocess/no-workers"
"""Counts the nodes of a round that have no worker left to continue."""


class SurvivingWorkers:
    """The workers of one node that continue; `rank_of` gives the global rank of a local one."""

    def __init__(
        self,
        workers: LocalWorkers,
        rank_of: Callable[[int], int | None],
        reporter: Reporter,
    ) -> None:
        self._workers = workers
        self._rank_of = rank_of
        self._reporter = reporter
        self.begin_round()

    def begin_round(self) -> None:
        """Forget the round before."""
        self._lost: set[int] = set()
        self._gave_up = 0.0
        self._others: BackgroundCall[tuple[int, int]] | None = None
        self._looked = 0.0

    def poll(self, group: WorkerGroup, context: Any) -> RunResult | None:
        """Return healthy or succeeded workers' state, or None if the agent has to handle a failure.

        The failure is that the ranks gave up, that no node has a worker left, or that the results
        lack one of a rank that was lost after all ranks had completed.
        """
        # A worker that leaves while its peers continue reports OTHERS_CONTINUE. Any other report
        # means that all ranks give up.
        reap_adopted_helpers()
        shutdown_requested = [
            report
            for report in self._workers.reported().values()
            if not report.get(OTHERS_CONTINUE)
        ]
        lost = self._find_lost()
        for local_rank in sorted(lost - self._lost):
            logger.warning(
                "rank %s exited; the remaining ranks restart without it", self._rank_of(local_rank)
            )
        self._lost = lost
        local = range(len(torch_agent.worker_processes(context)))
        continues = set(local) - lost
        if shutdown_requested:
            now = time.monotonic()
            self._gave_up = self._gave_up or now
            # All ranks give up at the same time, but their reports arrive one by one: torch's stop
            # would cut off the later ones.
            if continues and now - self._gave_up < time_limits.SURVIVORS_EXIT_GRACE_SECONDS:
                return RunResult(WorkerState.HEALTHY)
            self.forget_recovered(group)
            return None
        if not continues:
            return self._without_workers(group, local)
        # Read in each poll: a worker with a large result blocks in its write to the queue's pipe
        # until somebody reads.
        values = torch_agent.handed_over(context, continues)
        if not continues <= values.keys():
            return RunResult(WorkerState.HEALTHY)
        if lost:
            # Rank 2 dies: the first surviving rank writes a key for it when all continue. Rank 2
            # dies after the last iteration: nobody does, so its result is missing and the round has
            # failed.
            recovered = self._find_recovered(group)
            if recovered is not None and not lost <= recovered:
                return None  # a rank was lost after all had completed, and its result with it
        # they have handed over their results; the event for which they wait blocks for ever if one
        # died in that wait
        tell = partial(torch_agent.let_workers_end, context)
        # `local`: without it, a moment without free threads would leave them waiting for ever
        doing = "informing the workers that they may end"
        call_with_timeout(tell, time_limits.SURVIVORS_STORE_TIMEOUT_SECONDS, doing, local=True)
        processes = torch_agent.worker_processes(context)
        deadline = time.monotonic() + (
            time_limits.SURVIVORS_EXIT_GRACE_SECONDS if lost else float("inf")
        )
        # torch stops those that are left when the agent ends
        while (
            any(processes[rank].exitcode is None for rank in continues)
            and time.monotonic() < deadline
        ):
            time.sleep(time_limits.SURVIVORS_POLL_SECONDS)
        return self._build_success(local, values, continues)

    def _build_success(
        self,
        local: range,
        values: dict[int, Any],
        continues: set[int],
    ) -> RunResult:
        # torch wants a value for each of its workers
        results = {
            self._rank_of(rank) or 0: values[rank] if rank in continues else None for rank in local
        }
        return RunResult(WorkerState.SUCCEEDED, return_values=results)

    def _without_workers(self, group: WorkerGroup, local: range) -> RunResult | None:
        """Wait for other nodes, on which workers may continue;
        a failure there reaches the agent as always.

        The node counts as finished when all others have: its documents of what it lost may still be
        needed.
        """
        nodes = group.group_world_size or 1
        if nodes == 1:
            return None
        store: Any = group.store
        # Once per round, although this method runs in every poll.
        if self._others is None:
            doing = "counting the nodes that have no workers"
            count = partial(store.add, _NO_WORKERS, 1)
            call_with_timeout(count, time_limits.SURVIVORS_STORE_TIMEOUT_SECONDS, doing, local=True)
            self._others = BackgroundCall(
                lambda: (
                    int(store.add(_NO_WORKERS, 0)),
                    int(store.add(torch_agent.BARRIER_MEMBERS, 0)),
                ),
                (0, 0),
            )
        if time.monotonic() - self._looked < time_limits.SURVIVORS_CHECK_INTERVAL_SECONDS:
            return RunResult(WorkerState.HEALTHY)
        self._looked = time.monotonic()
        without, finished = self._others()
        # All nodes are without workers: nobody continues. Otherwise wait until the nodes with
        # workers are in torch's exit barrier.
        if without >= nodes:
            return None
        if without and finished >= nodes - without:
            return self._build_success(local, {}, set())
        return RunResult(WorkerState.HEALTHY)

    def await_end(self) -> None:
        """Wait a while for all workers to give up, because workers of another node did. All workers
        give up at the same time.

        A worker that is stopped earlier reports less.
        """
        deadline = time.monotonic() + time_limits.SURVIVORS_EXIT_GRACE_SECONDS
        while len(self._find_lost()) < self._workers.count and time.monotonic() < deadline:
            time.sleep(time_limits.SURVIVORS_POLL_SECONDS)

    def _find_lost(self) -> set[int]:
        """Return the local ranks of the workers that have ended without a result,
        or are about to.
        """
        return set(self._workers.reported()) | {
            death.local_rank for death in self._workers.get_exits()
        }

    def forget_recovered(self, group: WorkerGroup) -> None:
        """Leave out deaths of workers if the remaining ranks had continued without
        them before giving up.
        """
        self._workers.discard_exits(frozenset(self._find_recovered(group) or ()))

    def _find_recovered(self, group: WorkerGroup) -> set[int] | None:
        """Return the local ranks that the remaining ranks continued without;
        None if the store doesn't answer.
        """
        ranks = {self._rank_of(local_rank): local_rank for local_rank in self._find_lost()}
        round_ = str(self._reporter.node_context.round)

        def ask() -> set[int]:
            limit = dt.timedelta(seconds=time_limits.SURVIVORS_STORE_TIMEOUT_SECONDS)
            store = TCPStore(*torch_agent.master_address(group), timeout=limit)
            return {
                ranks[rank]
                for rank in ranks
                if rank is not None and store.check([recovered_key(rank, round_)])
            }

        if not ranks:
            return set()
        doing = "asking from which faults the ranks had recovered"
        return call_with_timeout(
            ask,
            time_limits.SURVIVORS_STORE_TIMEOUT_SECONDS,
            doing,
            local=True,
        )
