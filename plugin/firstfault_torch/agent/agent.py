"""LocalElasticAgent that exchanges failure notices with its peers and documents why its workers died.

torch decides when a worker counts as failed, how often workers restart, and how nodes meet. This agent notifies all
nodes of a failure at once, asks workers for their state before it stops them, and stays until the outcome of the round
is known. Its own code is guarded: if it breaks, this is a plain LocalElasticAgent and one warning.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException

from firstfault.model import TERMINATED, TERMINATED_BY, Phase, Place
from firstfault_torch.agent.death_documents import Stop, about_agent
from firstfault_torch.agent.local_workers import LocalWorkers
from firstfault_torch.agent.reporter import NodeReport, Reporter
from firstfault_torch.agent.restarts import Node, RefusedRestart, Restarts
from firstfault_torch.agent.round_end import PeerFailedError
from firstfault_torch.agent.stopping import end_what_workers_left
from firstfault_torch.agent.timers import watchdog_of
from firstfault_torch.agent.worker_logs import ObservedLogs, with_node
from firstfault_torch.compat.torch_agent import (
    HookedAgent,
    flight_recorder_variables,
    format_exceptions_early,
    log_failure,
    process_failure,
)
from firstfault_torch.context import LOCAL_RANK_VARIABLE, Moment, node_place
from firstfault_torch.error_classes import ErrorClass
from firstfault_torch.guard import guarded, logger
from firstfault_torch.node.starting import starting
from firstfault_torch.node.timers import TORCH_ENABLED_VARIABLE
from firstfault_torch.rounds.agreement import await_all, begin_round
from firstfault_torch.rounds.failure_broadcast import FirstFailure
from firstfault_torch.rounds.peers import Peers
from firstfault_torch.rounds.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.elastic.multiprocessing import LogsDest

    from firstfault.model import RestartRecord
    from firstfault_torch.agent.death_watch import Death
    from firstfault_torch.agent.restarts import DecideRestart
    from firstfault_torch.agent.signals import SignalReceived, SignalWatch
    from firstfault_torch.context import Recording
    from firstfault_torch.options import Options, Survivors

_guarded = partial(guarded, through=(SignalException,))
_FAILED = {WorkerState.FAILED, WorkerState.UNHEALTHY}
_NO_PAUSE_S = 1e-6
"""torch's sleep between two looks at the workers: here `monitor_workers` itself waits, and is woken by events."""
_COMING_BACK_S = 60.0
"""How long a failure in the roster may be ignored while the workers can restart."""
_SIBLING_FAILED = "another worker of this node had failed"


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What an agent needs beside torch's own settings."""

    options: Options
    signals: SignalWatch
    """Receives the signals to this process."""
    min_nodes: int = 1
    """Fewest nodes with which the job continues."""
    decide_restart: DecideRestart | None = None
    """Judges a failed round before torch restarts the workers; None: torch's way."""


class ReportingAgent(HookedAgent):
    """The elastic agent of one node.

    Args:
        recording: where and how to report; its round is filled in here.
        settings: beside torch's.
        spec: torch's; it is not changed.
        kwargs: as LocalElasticAgent takes them.
    """

    def __init__(self, recording: Recording, settings: AgentSettings, *, spec: WorkerSpec, **kwargs: Any) -> None:
        options, signals = settings.options, settings.signals
        handler: Any = Rendezvous(spec.rdzv_handler)
        kwargs["logs_specs"] = ObservedLogs(kwargs["logs_specs"], weakly(self._prepare_workers))
        super().__init__(spec=replace(spec, monitor_interval=_NO_PAUSE_S, rdzv_handler=handler), **kwargs)
        self._interval = spec.monitor_interval
        self._stop_seconds = options.stop_seconds
        self._min_nodes = settings.min_nodes
        self._signals = signals
        self._reporter = Reporter(recording, weakly(self.place))
        self._wake = threading.Event()
        self._workers = LocalWorkers(
            recording, self._reporter, options.stop_seconds, self._wake.set, watchdog_of(options.watchdog)
        )
        self._survivors: Survivors | None = None
        if options.in_process_restart is not None:
            self._survivors = options.in_process_restart.survivors(self._workers, weakly(self._rank_of), self._reporter)
        self._restarts = Restarts(settings.decide_restart, self._reporter, settings.min_nodes, options.settle_seconds)
        self.refused: RefusedRestart | None = None
        """The decision against a restart, which ended the attempt."""
        self._peers: Peers | None = None
        """None: there is no other node, or the round has not begun."""
        self._signal_reported = threading.Event()
        self._rounds = 0
        self._finished = False
        self._waits_at_exit = False
        signals.when_received(self._report_signal)
        format_exceptions_early()

    @property
    def peers(self) -> Peers | None:
        """The other agents of the round; None if there are none, or the round has not begun."""
        return self._peers

    @property
    def recording(self) -> Recording:
        """Where and how this node reports, with its present round."""
        return self._reporter.recording

    @property
    def report(self) -> NodeReport:
        """What this node has written about its present round."""
        return self._reporter.report

    # --- torch's hooks ------------------------------------------------------------------------------------------

    def join_rendezvous(self, group: WorkerGroup) -> None:
        """Join the rendezvous, and number the round alike on all nodes."""
        with _guarded("ending a round"):
            self._end_round()
        super().join_rendezvous(group)
        # if the nodes cannot agree on a number, it at least differs from the last round's
        number = self.recording.round + 1 if self._rounds else 0
        self._rounds += 1
        with _guarded("numbering the round"):
            # first: the other nodes wait for it
            number = begin_round(group.store, group.group_rank, number)
        with _guarded("beginning a round"):
            self._reporter.begin(number, group.group_world_size or 0)
            self._workers.begin_round()
            if self._survivors is not None:
                self._survivors.begin_round()
            self._peers = None

    def start_workers(self, group: WorkerGroup) -> dict[int, Any]:
        """Start the workers, then watch them and listen to the other nodes."""
        with _guarded("preparing the workers' deadlines"):
            self.watch_timers(self._workers.open_timers())
        with _guarded("filling in the prefix of log lines"):
            place = self.place()
            self.fill_log_prefix(partial(with_node, values={"group_rank": place.group_rank, "node": place.node}))
        # spawned and forked workers both inherit this process's environment; torch's own watchdog would kill the agent
        variables = {**flight_recorder_variables(os.environ), **self.recording.environment()}
        if TORCH_ENABLED_VARIABLE in os.environ:
            variables[TORCH_ENABLED_VARIABLE] = "0"
        with starting(self._start_method) as gate, environment_set({**variables, **gate}):
            ids = super().start_workers(group)
        with _guarded("watching the workers"):
            self._signals.install()
            self._workers.started(self.process_context, self._ranks())
        with _guarded("connecting the agents"):
            self._listen_to_peers()
        with _guarded("keeping a record of the restart"):
            self._restarts.began_again(self.place(0).world_size)
        return ids

    def _prepare_workers(self, environments: dict[int, dict[str, str]], logs: LogsDest) -> None:
        """Prepare for workers whose environment and log files torch has just chosen."""
        with _guarded("listening to the workers' stderr"):
            self._workers.open_stderr(logs.stderrs)
        for local_rank, environment in environments.items():
            environment.update(self._workers.timer_variables())
            environment[LOCAL_RANK_VARIABLE] = str(local_rank)

    def monitor_workers(self, group: WorkerGroup) -> RunResult:
        """Wait for an event or the interval, and report a failure.

        Raises:
            PeerFailedError: another node has failed.
        """
        self._wake.wait(self._interval)
        self._wake.clear()
        self._leave_with_a_failed_peer()
        if self._survivors is not None:
            going_on = self._survivors.look(group, self.process_context)
            if going_on is not None:
                if going_on.state is WorkerState.HEALTHY:
                    self._restart_with_a_failed_peer(group)
                return going_on
        failed: list[Death] = []
        with _guarded("looking at the workers"):
            failed = self._look()
        looked_ns = time.monotonic_ns()
        result = self._failed_result(failed) if failed else self._result_of_torch(group)
        if result.state in _FAILED:
            with _guarded("reporting a failure"):
                self._report_failure(result, looked_ns)
            if self._asks and not self._may_restart():
                self.refuse_restarts()
        elif result.state is WorkerState.HEALTHY:
            self._restart_with_a_failed_peer(group)
        return result

    def stop_workers(self, group: WorkerGroup, **more: Any) -> None:
        """Ask and stop the workers before torch does so, after a failure or when nodes join."""
        with _guarded("stopping the workers"):
            self._stop_workers_because("a new rendezvous begins")
        super().stop_workers(group, **more)

    def shut_down(self, death_signal: signal.Signals, timeout: int, **more: Any) -> None:
        """Ask and stop the workers before torch does so."""
        if self._signals.gave_up.is_set():
            self._signals.notice()
        with _guarded("stopping the workers"):
            if not self._signals.gave_up.is_set():
                self._stop_workers_because("its agent had failed")
            else:
                self._stop_workers_because(TERMINATED, death_signal)
        super().shut_down(death_signal, max(1, min(timeout, round(self._stop_seconds))), **more)

    def exit_barrier(self) -> None:
        """Wait for the other nodes, without torch's limit of 300 s.

        Raises:
            PeerFailedError: another node has failed.
        """
        with _guarded("reporting success"):
            self._reporter.announce(Phase.SUCCEEDED, self._ranks())
        if self._peers is None:
            super().exit_barrier()
        else:
            self._await_peers(self._peers)
        self._finished = True
        # the job has succeeded: a signal must not keep its outputs from being written
        self._signals.begin_shutdown()

    # --- rounds -------------------------------------------------------------------------------------------------

    def _end_round(self) -> None:
        """End all threads of the round: the next one may fork."""
        self._workers.stop_watching()
        if self._peers is not None:
            self._peers.end()
        self._reporter.drain()
        with _guarded("removing torch's files"):
            self._reporter.remove_traceback_files()
        if self._rounds:
            end_what_workers_left(self.recording, self._stop_seconds)
        self._workers.close_stderr()

    def close(self) -> None:
        """End all threads, after the uploads, each bounded by the deadline."""
        self._signals.when_received(None)
        self._workers.stop_watching()
        if self._peers is not None:
            self._peers.stop_listening()
        self._reporter.drain()
        with _guarded("removing torch's files"):
            self._reporter.remove_traceback_files()
        self._workers.close_stderr()
        self._workers.close()

    def place(self, local_rank: int | None = None) -> Place:
        """Return the place of the agent, or of one of its workers."""
        group = self.group
        workers = {worker.local_rank: worker for worker in group.workers}
        worker = workers.get(local_rank) if local_rank is not None else None
        base = node_place(self.recording)
        return replace(
            base,
            round=self.recording.round,
            incarnation=self.recording.incarnation,
            restart_count=self.restarts_used,
            rank=worker.global_rank if worker else None,
            local_rank=local_rank,
            group_rank=group.group_rank,
            world_size=worker.world_size if worker else next((item.world_size for item in group.workers), 0),
            group_world_size=group.group_world_size or 0,
            role=group.spec.role,
            pid=worker.id if worker is not None and isinstance(worker.id, int) else base.pid,
        )

    def _ranks(self) -> tuple[int, ...]:
        # -1 in torch: the rendezvous has not given a rank
        return tuple(worker.global_rank for worker in self.group.workers if worker.global_rank >= 0)

    def _rank_of(self, local_rank: int) -> int | None:
        return self.place(local_rank).rank

    def _forget_recovered(self) -> None:
        """Leave out workers without which the others had gone on."""
        if self._survivors is not None:
            with _guarded("leaving out faults from which the ranks had recovered"):
                self._survivors.forget_recovered(self.group)

    # --- this node's workers ------------------------------------------------------------------------------------

    def _look(self) -> list[Death]:
        """Return the deaths of this round; on the first one tell the others and stop the siblings."""
        if not self._workers.is_watched:
            return []
        reported, deaths = self._workers.reported(), self._workers.deaths()
        if not reported and not deaths:
            return []
        if self._workers.stopped is None:
            first = frozenset(reported) | {death.local_rank for death in deaths}
            self._notify_peers(self._first_failure(reported, deaths))
            for death in deaths:
                # before the siblings are asked: the document about the first death is to be durable first
                self._workers.document(death)
            self._workers.stop(_SIBLING_FAILED, first)
        return self._workers.deaths()

    def _first_failure(self, reported: dict[int, dict[str, Any]], deaths: list[Death]) -> FirstFailure:
        """Return the notice for the other agents: the worker that reported first, else the first that died."""
        place = self.place()
        if reported:
            local, report = min(reported.items(), key=lambda item: (item[1].get("monotonic_ns", 0), item[0]))
            what, document = str(report.get("what", "")), str(report.get("document", ""))
            return FirstFailure(what, place.node, place.group_rank, self._rank_of(local), document)
        if not deaths:
            return FirstFailure("its workers are unhealthy", place.node, place.group_rank)
        first = deaths[0]
        expiry = self._workers.expired.get(first.local_rank)
        what = expiry.deadline.text if expiry is not None else first.signal or f"exit code {first.exit_code}"
        return FirstFailure(what, place.node, place.group_rank, self._rank_of(first.local_rank))

    def _result_of_torch(self, group: WorkerGroup) -> RunResult:
        """Let torch look at the workers.

        A worker that ends while torch writes its exception leaves half a file; torch raises when it reads or prints it.
        """
        try:
            result = super().monitor_workers(group)
        except SignalException:
            raise
        except Exception:
            deaths = self._workers.deaths()
            if not deaths:
                raise
            return self._failed_result(deaths)
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
        files, stopped = self.report.error_files, self._workers.stopped
        reported = stopped.first if stopped is not None else frozenset()
        first = next((death for death in deaths if death.local_rank in reported), deaths[0])
        if stopped is None or first.local_rank in reported:
            with _guarded("logging a failure"):
                log_failure(self.process_context, first.local_rank, first.pid, first.exit_code)
        failure = process_failure(first.local_rank, first.pid, first.exit_code, files.get(first.local_rank, ""))
        return RunResult(WorkerState.FAILED, failures={self._rank_of(first.local_rank) or 0: failure})

    def _report_failure(self, result: RunResult, looked_ns: int) -> None:
        """Finish the report after torch has found a failure."""
        if self._workers.stopped is None:
            # torch saw the failure first and has stopped the other workers
            first = frozenset(failure.local_rank for failure in result.failures.values())
            deaths = [death for death in self._workers.deaths() if death.local_rank in first]
            self._notify_peers(self._first_failure({}, deaths))
            self._workers.stopped = Stop(_SIBLING_FAILED, looked_ns, first=first)
        self.finish_report()

    def _stop_workers_because(self, reason: str, sent: signal.Signals = signal.SIGTERM) -> None:
        workers = self._workers
        if workers.stopped is None and workers.is_watched and self.group.state is not WorkerState.SUCCEEDED:
            workers.stop(reason, sent=sent)

    # --- the other nodes ----------------------------------------------------------------------------------------

    def _listen_to_peers(self) -> None:
        if (self.group.group_world_size or 1) > 1:
            self._peers = Peers(
                self.group,
                self.recording,
                patience_seconds=self._interval + (_COMING_BACK_S if self.restarts_left else 0),
                others_suffice=self._asks and self._restarts.others_suffice(self.group.group_world_size or 1),
                wake=self._wake.set,
                gave_up=self._signals.gave_up,
            )
            self._peers.join(self.report.copies)

    def _notify_peers(self, failure: FirstFailure) -> None:
        """Tell the other agents of this node's failure."""
        if self._peers is not None:
            self._peers.notify(replace(failure, fatal=self.restarts_left == 0, asks=self._asks))

    def _leave_with_a_failed_peer(self) -> None:
        """Stop the workers and leave if another node has failed.

        Raises:
            PeerFailedError: it has.
        """
        failure = self._peers.broadcast.failure if self._peers is not None else None
        if failure is None:
            return
        self._stop_because_of(failure)
        raise PeerFailedError(failure)

    def _stop_because_of(self, failure: FirstFailure) -> None:
        """Stop the workers because another node has failed, and report."""
        logger.warning("stopping this node's workers: %s", failure.reason)
        if self._survivors is not None:
            self._survivors.await_end()
        self._forget_recovered()
        with _guarded("stopping the workers"):
            deaths = frozenset(death.local_rank for death in self._workers.deaths())
            self._workers.stop(failure.reason, deaths, caused_by=failure.cause)
            self.finish_report()

    # --- restarts -----------------------------------------------------------------------------------------------

    @property
    def _asks(self) -> bool:
        """Whether the agents decide if torch may restart the workers."""
        return self._restarts.ask and self.restarts_left > 0

    def _may_restart(self) -> bool:
        """Decide with the other agents whether the workers are restarted."""
        record: RestartRecord | None = None
        broadcast = self._peers.broadcast if self._peers is not None else None
        with _guarded("deciding on a restart"):
            place = self.place()
            first = broadcast.first_failure if broadcast is not None else None
            node = Node(
                group_rank=place.group_rank or 0,
                nodes=place.group_world_size or 1,
                restarts_left=self.restarts_left,
                copies=self.report.copies,
                peers=self._peers,
                first=first or FirstFailure("its workers", place.node, place.group_rank),
            )
            record = self._restarts.decided(node)
            is_refused = record is not None and not record.restart
            self.refused = RefusedRestart(record, self.group.spec.max_restarts) if record and is_refused else None
        is_fatal = broadcast is not None and broadcast.is_fatal
        return not is_fatal and (record is None or record.restart)

    def _restart_with_a_failed_peer(self, group: WorkerGroup) -> None:
        """If another node's failure asks, stop the workers, decide with the other agents, and restart or leave.

        Raises:
            PeerFailedError: the workers are not restarted.
        """
        peers = self._peers
        failure = peers.broadcast.asking if peers is not None else None
        if peers is None or failure is None:
            return
        self._stop_because_of(failure)
        if not self._may_restart():
            raise PeerFailedError(peers.broadcast.failure or failure)
        # as in torch, a node whose own workers had not failed uses up no restart
        self.restart_workers(group)

    def peer_failure(self) -> PeerFailedError | None:
        """Return the failure of another node that closed the rendezvous; None if there is none."""
        failure = self._peers.broadcast.fatal_failure() if self._peers is not None else None
        return PeerFailedError(failure) if failure is not None else None

    def _await_peers(self, peers: Peers) -> None:
        """Wait until the workers of all nodes have succeeded.

        Unlike torch's own barrier it reacts to signals and failures, and has no limit: a pod that exits while others
        train makes the whole job succeed.

        Raises:
            PeerFailedError: one of the others has failed.
        """
        self._waits_at_exit = True
        try:
            nodes = self.group.group_world_size or 1
            finished = await_all(self.group.store, nodes, peers.broadcast, self._wake, self.recording)
        finally:
            self._waits_at_exit = False
        if finished:
            return
        failure = peers.broadcast.failure or peers.broadcast.fatal_failure() or self._cannot_come_back(peers)
        logger.warning("this node's workers had succeeded, but %s", failure.reason)
        raise PeerFailedError(failure)

    @staticmethod
    def _cannot_come_back(peers: Peers) -> FirstFailure:
        """Return the failure after which another node restarts; it cannot, because this node has finished."""
        restart = peers.outcome.failure if peers.outcome is not None else None
        if restart is not None and restart.asks:
            # it ends the decision that the other agents wait for
            peers.broadcast.send(replace(restart, fatal=True, asks=False))
        peers.close_rendezvous()
        return restart or FirstFailure("the round ended without a reason", "")

    # --- the agent's own failures -------------------------------------------------------------------------------

    def _report_signal(self, received: SignalReceived) -> None:
        """Report at once that this node is terminated; called from the thread that receives signals."""
        try:
            if self._finished:
                return
            self._reporter.hurry()
            error = SignalException("terminated", sigval=received.number)
            self._reporter.write(about_agent(error, ErrorClass.PREEMPTION, self.place(), received.moment))
            others_suffice = (self.group.group_world_size or 1) - 1 >= self._min_nodes
            if self._peers is not None and (self._waits_at_exit or not others_suffice):
                what = f"{TERMINATED_BY} {received.number.name}"
                self._peers.broadcast.send(FirstFailure(what, self.place().node, self.group.group_rank))
        finally:
            self._signal_reported.set()

    def record_own_failure(self, error: BaseException, error_class: ErrorClass) -> None:
        """Write a document about a failure of the agent itself, and finish the report."""
        preempted = error_class is ErrorClass.PREEMPTION
        with guarded("stopping the workers"):
            self._stop_workers_because(TERMINATED if preempted else "its agent had failed")
        if preempted and self._signals.is_listening:
            self._signal_reported.wait(self.recording.upload_deadline_seconds)
        else:
            self._reporter.write(about_agent(error, error_class, self.place(), Moment.now()))
        if self._peers is not None and not preempted:
            what = f"{type(error).__name__} in its agent"
            self._peers.broadcast.send(FirstFailure(what, self.place().node, self.group.group_rank))
        self.finish_report()
        if self._peers is not None and preempted:
            self._peers.leave(self.report.copies)

    def finish_report(self) -> None:
        """Document the deaths of this node's workers, and announce that the node has failed."""
        self._forget_recovered()
        self._workers.document_deaths()
        first = self._peers.broadcast.first_failure if self._peers is not None else None
        self._reporter.finish(self._ranks(), first)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a bound method that does not keep its object alive.

    An agent that is part of a reference cycle ends when the garbage collector runs. If that is in a worker that this
    process forked later, the end of the agent's store aborts that worker: it waits for a thread that no fork copies.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **more: Any) -> Any:
        bound = reference()
        if bound is None:
            raise ReferenceError("the agent has ended")
        return bound(*args, **more)

    return call


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
