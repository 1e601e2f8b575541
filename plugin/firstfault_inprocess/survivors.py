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
from firstfault_torch.node_context import OTHERS_CONTINUE_FIELD

if TYPE_CHECKING:
    from firstfault_torch.agent.local_workers import LocalWorkers
    from firstfault_torch.agent.reporter import Reporter

_NODES_WITHOUT_WORKERS_KEY = "firstfault/inprocess/no-workers"
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
        self._logged_lost: set[int] = set()
        self._shutdown_requested_at = 0.0
        self._node_counts: BackgroundCall[tuple[int, int]] | None = None
        self._counted_at = 0.0

    def poll(self, group: WorkerGroup, context: Any) -> RunResult | None:
        """Return healthy or succeeded workers' state, or None if the agent has to handle a failure.

        The failure is that the ranks gave up, that no node has a worker left, or that the results
        lack one of a rank that was lost after all ranks had completed.
        """
        # A worker that leaves while its peers continue sets OTHERS_CONTINUE_FIELD. Any other report
        # means that all ranks give up.
        reap_adopted_helpers()
        shutdown_requested = [
            report
            for report in self._workers.reported().values()
            if not report.get(OTHERS_CONTINUE_FIELD)
        ]
        lost = self._find_lost()
        for local_rank in sorted(lost - self._logged_lost):
            logger.warning(
                "rank %s exited; the remaining ranks restart without it", self._rank_of(local_rank)
            )
        self._logged_lost = lost
        local_ranks = range(len(torch_agent.worker_processes(context)))
        survivors = set(local_ranks) - lost
        if shutdown_requested:
            now = time.monotonic()
            self._shutdown_requested_at = self._shutdown_requested_at or now
            # All ranks give up at the same time, but their reports arrive one by one: torch's stop
            # would cut off the later ones.
            if (
                survivors
                and now - self._shutdown_requested_at < time_limits.SURVIVORS_EXIT_GRACE_SECONDS
            ):
                return RunResult(WorkerState.HEALTHY)
            self.forget_recovered(group)
            return None
        if not survivors:
            return self._await_nodes_with_workers(group, local_ranks)
        # Read in each poll: a worker with a large result blocks in its write to the queue's pipe
        # until somebody reads.
        results = torch_agent.collect_results(context, survivors)
        if not survivors <= results.keys():
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
        inform = partial(torch_agent.let_workers_exit, context)
        # `local`: without it, a moment without free threads would leave them waiting for ever
        doing = "informing the workers that they may end"
        call_with_timeout(inform, time_limits.SURVIVORS_STORE_TIMEOUT_SECONDS, doing, local=True)
        processes = torch_agent.worker_processes(context)
        deadline = time.monotonic() + (
            time_limits.SURVIVORS_EXIT_GRACE_SECONDS if lost else float("inf")
        )
        # torch stops those that are left when the agent ends
        while (
            any(processes[rank].exitcode is None for rank in survivors)
            and time.monotonic() < deadline
        ):
            time.sleep(time_limits.SURVIVORS_POLL_SECONDS)
        return self._build_success(local_ranks, results, survivors)

    def _build_success(
        self,
        local_ranks: range,
        results: dict[int, Any],
        survivors: set[int],
    ) -> RunResult:
        # torch wants a value for each of its workers
        results = {
            self._rank_of(rank) or 0: results[rank] if rank in survivors else None
            for rank in local_ranks
        }
        return RunResult(WorkerState.SUCCEEDED, return_values=results)

    def _await_nodes_with_workers(self, group: WorkerGroup, local_ranks: range) -> RunResult | None:
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
        if self._node_counts is None:
            doing = "counting the nodes that have no workers"
            count = partial(store.add, _NODES_WITHOUT_WORKERS_KEY, 1)
            call_with_timeout(count, time_limits.SURVIVORS_STORE_TIMEOUT_SECONDS, doing, local=True)
            self._node_counts = BackgroundCall(
                lambda: (
                    int(store.add(_NODES_WITHOUT_WORKERS_KEY, 0)),
                    int(store.add(torch_agent.BARRIER_MEMBERS_KEY, 0)),
                ),
                (0, 0),
            )
        if time.monotonic() - self._counted_at < time_limits.SURVIVORS_CHECK_INTERVAL_SECONDS:
            return RunResult(WorkerState.HEALTHY)
        self._counted_at = time.monotonic()
        without, finished = self._node_counts()
        # All nodes are without workers: nobody continues. Otherwise wait until the nodes with
        # workers are in torch's exit barrier.
        if without >= nodes:
            return None
        if without and finished >= nodes - without:
            return self._build_success(local_ranks, {}, set())
        return RunResult(WorkerState.HEALTHY)

    def await_all_exits(self) -> None:
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

        def read_recovered() -> set[int]:
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
            read_recovered,
            time_limits.SURVIVORS_STORE_TIMEOUT_SECONDS,
            doing,
            local=True,
        )
