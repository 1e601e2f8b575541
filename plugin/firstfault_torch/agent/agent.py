"""LocalElasticAgent that exchanges failure notices with its peers and documents why its workers died.

torch decides when a worker counts as failed, how often workers restart, and how nodes meet. The code of this agent is
guarded: if it breaks, this is a plain LocalElasticAgent and one warning.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException

from firstfault.model import TERMINATED, Phase
from firstfault_torch.agent.local_workers import ObservedLogs
from firstfault_torch.agent.node_round import NodeRound
from firstfault_torch.agent.signals import guarded_in_main
from firstfault_torch.compat.torch_agent import (
    HookedAgent,
    flight_recorder_variables,
    format_exceptions_early,
    log_failure,
    process_failure,
)
from firstfault_torch.guard import caught
from firstfault_torch.node.channel import starting
from firstfault_torch.options import with_node
from firstfault_torch.rounds.rendezvous import Rendezvous, begin_round, has_shared_store
from firstfault_torch.watchdog import TORCH_ENABLED_VARIABLE

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator

    from firstfault_torch.agent.death_documents import Death
    from firstfault_torch.agent.node_round import AgentSettings
    from firstfault_torch.context import Recording
    from firstfault_torch.rounds.failure_broadcast import FirstFailure

_FAILED = {WorkerState.FAILED, WorkerState.UNHEALTHY}
_NO_PAUSE = 1e-6
"""torch's sleep between two looks at the workers: here `monitor_workers` itself waits, and is woken by events."""


class PeerFailedError(Exception):
    """Another node failed; this node's workers were stopped because of it."""

    def __init__(self, failure: FirstFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class ReportingAgent(HookedAgent):
    """The elastic agent of one node. torch calls its hooks in the order of a round's life.

    - Join: `join_rendezvous` meets the other nodes and numbers the round.
    - Start: `start_workers` starts the workers, watches them, and connects to the other agents.
    - Watch: `monitor_workers` is called again and again. If a worker fails, here or on another node, it stops the other
      workers and reports. If restarts are left, the agents decide on one together; the next round begins with "join".
    - Finish: `exit_barrier` waits until the workers of all nodes have succeeded.
    - `stop_workers` and `shut_down` end the workers before a new round and when the agent ends.

    What follows is not the agent's: `launch_agent` returns how the last round ended, `run_node` settles on a verdict.
    """

    def __init__(self, recording: Recording, settings: AgentSettings, *, spec: WorkerSpec, **kwargs: Any) -> None:
        handler: Any = Rendezvous(spec.rdzv_handler)
        logs = kwargs["logs_specs"] = ObservedLogs(kwargs["logs_specs"])
        super().__init__(spec=replace(spec, monitor_interval=_NO_PAUSE, rdzv_handler=handler), **kwargs)
        self._interval = spec.monitor_interval
        self._stop_seconds = settings.options.stop_seconds
        self._terminated_seconds = settings.options.terminated_stop_seconds or self._stop_seconds
        self._signals = settings.signals
        self._load = settings.load
        self.node = NodeRound(self.group, recording, settings)
        self._rounds = 0
        logs.prepare = self.node.workers.prepare
        self._signals.when_received(self.node.report_signal)
        format_exceptions_early()

    # --- torch's hooks ------------------------------------------------------------------------------------------

    def join_rendezvous(self, group: WorkerGroup) -> None:
        """Join the rendezvous, and number the round alike on all nodes."""
        with guarded_in_main("ending a round"):
            if self._rounds:
                self.node.end(is_last=False)
        super().join_rendezvous(group)
        # if the nodes cannot agree on a number, it at least differs from the last round's
        number = self.node.reporter.recording.round + 1 if self._rounds else 0
        self._rounds += 1
        with guarded_in_main("numbering the round"):
            # first: the other nodes wait for it
            counted = self._rounds if has_shared_store(group) else 0
            number = begin_round(group.store, group.group_rank, number, counted)
        with guarded_in_main("beginning a round"):
            self.node.begin(number, self.restarts_left, self.restarts_used)

    def start_workers(self, group: WorkerGroup) -> dict[int, Any]:
        """Start the workers, then watch them and listen to the other nodes."""
        node = self.node
        with guarded_in_main("preparing the workers' deadlines"):
            self.watch_timers(node.workers.open_timers())
        with guarded_in_main("filling in the prefix of log lines"):
            place = node.places.of()
            self.fill_log_prefix(partial(with_node, values={"group_rank": place.group_rank, "node": place.node}))
        # spawned and forked workers both inherit this process's environment; torch's own watchdog would kill the agent
        variables = {**flight_recorder_variables(os.environ), **node.reporter.recording.environment()}
        if TORCH_ENABLED_VARIABLE in os.environ:
            variables[TORCH_ENABLED_VARIABLE] = "0"
        try:
            with starting(self._start_method) as gate, environment_set({**variables, **gate}):
                ids = super().start_workers(group)
        except Exception:
            with guarded_in_main("connecting the agents"):  # the workers of the others wait for these
                node.listen_to_peers(self._interval)
            raise
        with guarded_in_main("watching the workers"):
            self._signals.install()
            node.workers.started(self.process_context, node.places.ranks)
        with guarded_in_main("connecting the agents"):
            node.listen_to_peers(self._interval)
        with guarded_in_main("keeping a record of the restart"):
            node.restarts.began_again(node.places.of(0).world_size)
        with guarded_in_main("loading what a failure needs"):
            self._load()
        return ids

    def monitor_workers(self, group: WorkerGroup) -> RunResult:
        """Wait for an event or the interval, and report a failure.

        Raises:
            PeerFailedError: another node has failed.
        """
        node = self.node
        node.wake.wait(self._interval)
        node.wake.clear()
        if node.peers is not None and (failure := node.peers.broadcast.failure) is not None:
            node.stop_because_of(failure)
            raise PeerFailedError(failure)
        survivors = node.survivors.look(group, self.process_context) if node.survivors is not None else None
        if survivors is not None:
            if survivors.state is WorkerState.HEALTHY:
                self._restart_with_a_failed_peer(group)
            return survivors
        failed: list[Death] = []
        with guarded_in_main("looking at the workers"):
            failed = node.look()
        looked_ns = time.monotonic_ns()
        result = self._failed_result(failed) if failed else self._result_of_torch(group)
        if result.state in _FAILED:
            with guarded_in_main("reporting a failure"):
                node.report_failure(result, looked_ns)
            if node.asks and not node.may_restart():
                self.refuse_restarts()
        elif result.state is WorkerState.HEALTHY:
            self._restart_with_a_failed_peer(group)
        return result

    def exit_barrier(self) -> None:
        """Wait for the other nodes, without torch's limit of 300 s.

        Raises:
            PeerFailedError: another node has failed.
        """
        node = self.node
        with guarded_in_main("reporting success"):
            node.reporter.announce(Phase.SUCCEEDED, node.places.ranks)
        if node.peers is None:
            super().exit_barrier()
        else:
            node.waits_at_exit = True
            try:
                failure = node.peers.await_all(node.wake, node.reporter.recording)
            finally:
                node.waits_at_exit = False
            if failure is not None:
                raise PeerFailedError(failure)
        node.finished = True
        # the job has succeeded: a signal must not keep its outputs from being written
        self._signals.begin_shutdown()

    def stop_workers(self, group: WorkerGroup, **more: Any) -> None:
        """Ask and stop the workers before torch does so, after a failure or when nodes join."""
        with guarded_in_main("stopping the workers"):
            self.node.stop_workers("a new rendezvous begins")
        super().stop_workers(group, **more)

    def shut_down(self, death_signal: signal.Signals, timeout: int, **more: Any) -> None:
        """Ask and stop the workers before torch does so."""
        terminated = self._signals.gave_up.is_set()
        seconds = self._stop_seconds
        if terminated:
            self._signals.notice()
            seconds = self._terminated_seconds
        with guarded_in_main("stopping the workers"):
            if terminated:
                self.node.stop_workers(TERMINATED, death_signal, seconds)
            else:
                self.node.stop_workers("its agent had failed")
        super().shut_down(death_signal, max(1, min(timeout, round(seconds))), **more)

    def close(self) -> None:
        """End all threads, after the uploads, each bounded by the deadline."""
        self._signals.when_received(None)
        self.node.end(is_last=True)

    # --- parts of `monitor_workers` -----------------------------------------------------------------------------

    def _result_of_torch(self, group: WorkerGroup) -> RunResult:
        """Let torch look at the workers.

        A worker that ends while torch writes its exception leaves half a file; torch raises when it reads or prints it.
        """
        found, error = caught(partial(super().monitor_workers, group), Exception)
        if error is not None:
            deaths = self.node.workers.deaths()
            if isinstance(error, SignalException) or not deaths:
                raise error
            return self._failed_result(deaths)
        result = cast("RunResult", found)
        failures = {
            rank: process_failure(failure.local_rank, failure.pid, failure.exitcode, failure.error_file)
            for rank, failure in result.failures.items()
        }
        return replace(result, failures=failures)

    def _failed_result(self, deaths: list[Death]) -> RunResult:
        """Return a result as torch's, about the worker that failed first, and log that failure as torch does.

        Torch's own result and log name the failure that it finds first, which may be a stopped sibling; or none, while
        a child of the dead process keeps its sentinel open.
        """
        files, stopped = self.node.reporter.report.error_files, self.node.workers.stopped
        reported = stopped.first if stopped is not None else frozenset()
        first = next((death for death in deaths if death.local_rank in reported), deaths[0])
        if stopped is None or first.local_rank in reported:
            with guarded_in_main("logging a failure"):
                log_failure(self.process_context, first.local_rank, first.pid, first.exit_code)
        failure = process_failure(first.local_rank, first.pid, first.exit_code, files.get(first.local_rank, ""))
        return RunResult(WorkerState.FAILED, failures={self.node.places.rank_of(first.local_rank) or 0: failure})

    def _restart_with_a_failed_peer(self, group: WorkerGroup) -> None:
        """If another node's failure asks, stop the workers, decide with the other agents, and restart or leave.

        Raises:
            PeerFailedError: the workers are not restarted.
        """
        peers = self.node.peers
        failure = peers.broadcast.asking if peers is not None else None
        if peers is None or failure is None:
            return
        self.node.stop_because_of(failure)
        if not self.node.may_restart():
            raise PeerFailedError(peers.broadcast.failure or failure)
        # as in torch, a node whose own workers had not failed uses up no restart
        self.restart_workers(group)


@contextlib.contextmanager
def environment_set(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
