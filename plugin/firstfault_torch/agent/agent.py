"""torch's LocalElasticAgent with firstfault's hooks."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from firstfault.model import TERMINATED, Phase
from firstfault_torch.agent.deaths import WorkerExit
from firstfault_torch.agent.node_round import NodeRound
from firstfault_torch.agent.observed_logs import ObservedLogsSpecs
from firstfault_torch.agent.settings import AgentSettings
from firstfault_torch.agent.signals import suppress_internal_errors_in_main
from firstfault_torch.compat import torch_agent
from firstfault_torch.guard import try_call
from firstfault_torch.node.fork_gate import hold_forked_workers
from firstfault_torch.node_context import NodeContext, environment_set
from firstfault_torch.options import with_node
from firstfault_torch.protocol.notices import FailureNotice
from firstfault_torch.protocol.stopping import AGENT_FAILED, NEW_RENDEZVOUS
from firstfault_torch.rounds.rendezvous_fixes import PatchedRendezvous
from firstfault_torch.rounds.round_store import begin_round, has_shared_store
from firstfault_torch.watchdog.timers import TORCH_ENABLED_VARIABLE

_FAILED = {WorkerState.FAILED, WorkerState.UNHEALTHY}
_NO_PAUSE = 1e-6
"""torch's sleep between two looks at the workers: here `monitor_workers` itself waits,
and is woken by events.
"""


class PeerFailedError(Exception):
    """Another node failed; this node's workers were stopped because of it."""

    def __init__(self, failure: FailureNotice) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class UnsupportedTorchError(Exception):
    """This torch's agent lacks private names that `ReportingAgent` needs."""


class ReportingAgent(LocalElasticAgent):
    """torch's LocalElasticAgent, which also announces failures to its peers and reports
    why its workers ended.

    Raises:
        MissingNamesError: torch's agent doesn't have all hooks and attributes.
    """

    def __init__(
        self,
        node_context: NodeContext,
        settings: AgentSettings,
        *,
        spec: WorkerSpec,
        **kwargs: Any,
    ) -> None:
        handler: Any = PatchedRendezvous(spec.rdzv_handler)
        logs = kwargs["logs_specs"] = ObservedLogsSpecs(kwargs["logs_specs"])
        super().__init__(
            spec=replace(spec, monitor_interval=_NO_PAUSE, rdzv_handler=handler), **kwargs
        )
        if missing := torch_agent.find_missing_names(self):
            raise UnsupportedTorchError(", ".join(missing))
        self._interval = spec.monitor_interval
        self._terminated_seconds = (
            settings.options.terminated_stop_seconds or settings.options.stop_seconds
        )
        self._signals = settings.signals
        self._load = settings.load
        self._log_template: str | None = getattr(self, "_log_line_prefix_template", None)
        self.node = NodeRound(self._worker_group, node_context, settings)
        self._rounds = 0
        self._refused = 0
        """Restarts that torch had left and that the agents decided against."""
        logs.prepare = self.node.workers.prepare
        self._signals.on_received = self.node.report_signal
        torch_agent.format_exceptions_early()

    # --- torch's hooks ----------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Join the rendezvous, and number the round alike on all nodes."""
        # Before torch's rendezvous, which leads to the next fork: a thread of the last round that
        # is alive at a fork may leave a lock locked in the worker.
        with suppress_internal_errors_in_main("ending a round"):
            if self._rounds:
                self.node.end(is_last=False)
        super()._rendezvous(worker_group)
        # if the nodes can't agree on a number, it at least differs from the last round's
        number = self.node.reporter.node_context.round + 1 if self._rounds else 0
        self._rounds += 1
        # From now on the peers wait for this node. A signal must find a round through which it can
        # be sent.
        with self._signals.postponed():
            with suppress_internal_errors_in_main("numbering the round"):
                # Before anything else of the round: every later node waits in the store until the
                # first one has set the number.
                counted = self._rounds if has_shared_store(worker_group) else 0
                number = begin_round(worker_group.store, worker_group.group_rank, number, counted)
            with suppress_internal_errors_in_main("beginning a round"):
                used = worker_group.spec.max_restarts - self._remaining_restarts - self._refused
                self.node.begin(number, self._remaining_restarts, used)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers, then watch them and listen to other nodes."""
        node = self.node
        with suppress_internal_errors_in_main("preparing the workers' deadlines"):
            # Before the fork: the path of the FIFO goes into the workers' environments, and a
            # worker may write its first deadline before the agent's thread reads. The FIFO keeps
            # the line.
            self._worker_watchdog = node.workers.open_timers()  # torch stops it with the workers
        with suppress_internal_errors_in_main("filling in the prefix of log lines"):
            if self._log_template:
                place = node.places.of()
                values = {"group_rank": place.group_rank, "node": place.node}
                self._log_line_prefix_template = with_node(self._log_template, values)
        # spawned and forked workers both inherit this process's environment; torch's own watchdog
        # would kill the agent
        variables = torch_agent.flight_recorder_variables(os.environ)
        with suppress_internal_errors_in_main("sending the workers the place for their documents"):
            variables = {**variables, **node.reporter.node_context.to_environment()}
        if TORCH_ENABLED_VARIABLE in os.environ:
            variables[TORCH_ENABLED_VARIABLE] = "0"
        with hold_forked_workers(node.reporter.node_context.files), environment_set(variables):
            ids: dict[int, Any] = super()._start_workers(worker_group)
        # From here on in the order of need: no thread of the round may exist before the fork, a
        # worker's stderr needs its reader at once, and peers and stalls can wait.
        #
        # torch's `PContext.start` has just installed its own handlers, which `postponed` replaces.
        # A signal that arrived since then isn't lost: torch's handler raised, and `_shutdown`
        # connects to the peers; and the interpreter has also written the byte to the wakeup
        # descriptor.
        with self._signals.postponed():
            with suppress_internal_errors_in_main("watching the workers"):
                node.workers.started(self._pcontext, node.places.ranks)
            with suppress_internal_errors_in_main("connecting the agents"):
                node.listen_to_peers(self._interval)
        with suppress_internal_errors_in_main("keeping a record of the restart"):
            node.restarts.began_again(node.places.of(0).world_size)
        with suppress_internal_errors_in_main("looking for the workers' progress"):
            node.watch_progress()
        # Last, while the workers run: the imports take time that a start shouldn't wait for, and
        # after a failure the disk may be gone.
        with suppress_internal_errors_in_main("loading what a failure needs"):
            self._load()
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Wait for an event or the interval, and report a failure.

        Raises:
            PeerFailedError: another node has failed.
        """
        # Torch polls: it sleeps for the interval, then looks at its processes. Here the sleep ends
        # early when a worker exits or reports a failure, or when a peer's failure arrives.
        node = self.node
        node.wake.wait(self._interval)
        # Cleared before the looks below. Each thread stores its finding before it sets `wake`, so a
        # finding that arrives now is either seen below or ends the next wait at once. Cleared
        # afterwards, it would wait for the interval.
        node.wake.clear()
        # A peer's fatal failure comes first: workers of this node that fail now most likely lost
        # their connections to it. A worker that failed independently at the same time still gets
        # its own document, in `stop_after_peer_failure`.
        if node.peers is not None and (failure := node.peers.broadcast.failure) is not None:
            node.stop_after_peer_failure(failure)
            raise PeerFailedError(failure)
        # With in-process restarts the surviving ranks may recover from an exit that torch would
        # report as a failure.
        survivors = (
            node.survivors.poll(worker_group, self._pcontext)
            if node.survivors is not None
            else None
        )
        if survivors is not None:
            if survivors.state is WorkerState.HEALTHY:
                self._handle_peer_failure(worker_group)
            return survivors
        failed: list[WorkerExit] = []
        with suppress_internal_errors_in_main("looking at the workers"):
            # Before torch looks: torch stops the siblings at once, and their stacks and state would
            # be lost.
            failed = node.handle_failures()
        # A worker may end after that look. Then torch sees it first, and stops the siblings itself
        # within the next call, so every death after this moment may be torch's work.
        looked_ns = time.monotonic_ns()
        result = self._failed_result(failed) if failed else self._result_of_torch(worker_group)
        if result.state is WorkerState.SUCCEEDED:
            with suppress_internal_errors_in_main("looking for failures of workers that ended"):
                # All have exited with 0, perhaps before the report of one was read.
                if node.workers.has_failure_after_clean_exit() and (
                    failed := node.handle_failures()
                ):
                    result = self._failed_result(failed)
        if result.state in _FAILED:
            with suppress_internal_errors_in_main("reporting a failure"):
                node.report_failure(result, looked_ns)
            if node.needs_restart_vote and not node.may_restart():
                # Without restarts left, torch's `_invoke_run` stops the workers and returns, as
                # after a last failure.
                self._refused += self._remaining_restarts
                self._remaining_restarts = 0
            # After the last round the line waits for the verdict.
            if self._remaining_restarts > 0:
                with suppress_internal_errors_in_main("logging a failure"):
                    torch_agent.log_root_or_first_failure(node.reporter.report.failure_lines)
        elif result.state is WorkerState.HEALTHY:
            self._handle_peer_failure(worker_group)
        return result

    def _exit_barrier(self) -> None:
        """Wait for other nodes, without torch's limit of 300 s.

        Raises:
            PeerFailedError: another node has failed.
        """
        node = self.node
        with suppress_internal_errors_in_main("reporting success"):
            node.reporter.announce(Phase.SUCCEEDED, node.places.ranks)
        if node.peers is None:
            super()._exit_barrier()  # type: ignore[no-untyped-call]
        else:
            # Set during the wait, read by the signal thread: a signal now fails the job for all
            # nodes, because this node has finished and can't take part in a restart.
            node.waits_at_exit = True
            try:
                failure = node.peers.exit_barrier.await_all(node.wake, self._mark_finished)
            finally:
                node.waits_at_exit = False
            if failure is not None:
                raise PeerFailedError(failure)
        self._mark_finished()

    def _mark_finished(self) -> None:
        # Before `begin_shutdown`: the signal thread may be about to report a signal that arrived a
        # moment ago.
        self.node.finished = True
        # the job has succeeded: a signal must not keep its outputs from being written
        self._signals.begin_shutdown()

    def _stop_workers(self, worker_group: WorkerGroup, **more: Any) -> None:
        """Ask and stop the workers before torch does so, after a failure or when nodes join."""
        with suppress_internal_errors_in_main("stopping the workers"):
            self.node.stop_workers(NEW_RENDEZVOUS)
        # torch's `_stop_workers` calls `_shutdown`, so the workers are stopped a second time there,
        # which is a no-op.
        super()._stop_workers(worker_group, **more)

    def _shutdown(
        self,
        death_sig: signal.Signals = signal.SIGTERM,
        timeout: int = 30,
        **more: Any,
    ) -> None:
        """Ask and stop the workers before torch does so."""
        error = sys.exc_info()[1]  # torch calls this while it handles the error that ends the agent
        terminated = self._signals.shutdown_requested.is_set() or isinstance(error, SignalException)
        if terminated:
            # First: until this, the signal thread raises in this thread again and again, and would
            # interrupt the stop of the workers halfway.
            self._signals.acknowledge()
        if terminated or error is not None:
            # It may have come before this node was connected. The peers' workers wait for those of
            # this node, forever without a notice.
            with (
                self._signals.postponed(),
                suppress_internal_errors_in_main("connecting the agents"),
            ):
                self.node.listen_to_peers(self._interval)
        with suppress_internal_errors_in_main("stopping the workers"):
            if terminated:
                self.node.stop_workers(TERMINATED, death_sig)
            else:
                self.node.stop_workers(AGENT_FAILED, agent_error=error)
        # torch stops what is left if the lines above failed
        seconds = self._terminated_seconds if terminated else self.node.stop_seconds
        super()._shutdown(
            death_sig, **torch_agent.shutdown_timeout(max(1, min(timeout, round(seconds)))), **more
        )

    def close(self) -> None:
        """End all threads, after the uploads, each bounded by the deadline."""
        # It is a bound method of the node's round. `SignalWatch` outlives the agent, and must not
        # keep the round alive.
        self._signals.on_received = None
        self.node.end(is_last=True)

    # --- parts of `_monitor_workers` --------------------------------------------------------------

    def _result_of_torch(self, group: WorkerGroup) -> RunResult:
        """Let torch look at the workers.

        A worker that ends while torch writes its exception leaves half a file; torch raises when it
        reads or prints it.
        """
        found, error = try_call(partial(super()._monitor_workers, group), Exception)
        if error is not None:
            worker_exits = self.node.workers.get_exits()
            # Only a dead worker explains an error of torch's here; any other error is torch's own
            # or a signal's, and ends the agent.
            if isinstance(error, SignalException) or not worker_exits:
                raise error
            return self._failed_result(worker_exits)
        result = cast("RunResult", found)
        failures = {}
        for rank, kept in result.failures.items():
            failures[rank] = torch_agent.build_process_failure(
                kept.local_rank,
                kept.pid,
                kept.exitcode,
                kept.error_file,
            )
        return replace(result, failures=failures)

    def _failed_result(self, worker_exits: list[WorkerExit]) -> RunResult:
        """Return a result as torch's, about the worker that failed first,
        and keep what torch logs about each.

        Torch's own result and log name the failure that it finds first, which may be a stopped
        sibling; or none, while a child of the dead process keeps its sentinel open.
        """
        files, stopped = self.node.reporter.report.error_files, self.node.workers.stopper.stopped
        reported = stopped.failed_first if stopped is not None else frozenset()
        # Not simply the earliest death: a rank that raised, or called `sys.exit`, may be in its
        # teardown for seconds, and die after the siblings that failed because of it.
        began = self.node.workers.find_failure_times()
        ordered = sorted(
            worker_exits,
            key=lambda death: (
                death.local_rank not in reported,
                began.get(death.local_rank, death.monotonic_ns),
            ),
        )
        first = ordered[0]
        if stopped is None or first.local_rank in reported:
            with suppress_internal_errors_in_main("describing a failure"):
                # logged when the root cause is known
                lines = self.node.reporter.report.failure_lines
                lines.clear()
                for death in ordered:
                    lines[self.node.places.rank_of(death.local_rank) or 0] = self._describe(death)
        file = files.get(first.local_rank, "")
        failure = torch_agent.build_process_failure(
            first.local_rank, first.pid, first.exit_code, file
        )
        return RunResult(
            WorkerState.FAILED, failures={self.node.places.rank_of(first.local_rank) or 0: failure}
        )

    def _describe(self, death: WorkerExit) -> str:
        return torch_agent.describe_failure(
            self._pcontext, death.local_rank, death.pid, death.exit_code
        )

    def _handle_peer_failure(self, group: WorkerGroup) -> None:
        """If another node's failure asks, stop the workers, decide with its peers,
        and restart or leave.

        Raises:
            PeerFailedError: the workers aren't restarted.
        """
        peers = self.node.peers
        failure = peers.broadcast.restart_request if peers is not None else None
        if peers is None or failure is None:
            return
        # All nodes stop and report before the vote: the leader decides by all reports, and no rank
        # may still run in a round that is over.
        self.node.stop_after_peer_failure(failure)
        if not self.node.may_restart():
            raise PeerFailedError(peers.broadcast.failure or failure)
        # as in torch, a node without a failed worker uses up no restart
        self._restart_workers(group)
