"""A torch elastic agent that tells and hears: its node's failures to the others, theirs to its workers.

When a worker counts as failed, how often workers are restarted, how nodes come together: that stays torch's. Ours is
that a failure is known everywhere at once, that workers are asked before they are stopped, and that nobody leaves
before the outcome is known. Our own code is guarded; if it breaks, this is a plain LocalElasticAgent and a warning.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from firstfault.model import DIED_UNHEARD, TOLD_TO_GO, TOLD_TO_GO_BY, CausedBy, Phase, Place
from firstfault_torch.agent.agent_failures import Stop, about_agent
from firstfault_torch.agent.exits import Death, DeathWatch
from firstfault_torch.agent.failure_broadcast import FirstFailure, OutcomeWatch
from firstfault_torch.agent.liveness import Lifelines
from firstfault_torch.agent.reporter import NodeReport, Reporter
from firstfault_torch.agent.roster_poll import RosterLook
from firstfault_torch.agent.rounds import await_all, begin_round
from firstfault_torch.agent.stopping import observe, stop_processes, unfinished
from firstfault_torch.compat import format_exceptions_early
from firstfault_torch.context import node_place
from firstfault_torch.error_classes import Sort
from firstfault_torch.guard import bounded, guarded, logger
from firstfault_torch.node.channel import AgentLine
from firstfault_torch.node.stderr_relay import LogTails
from firstfault_torch.worker.in_flight import Moment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from firstfault_torch.agent.signals import SignalWatch, Told
    from firstfault_torch.context import Recording

__all__ = ["PeerFailedError", "ReportingAgent"]

_guarded = partial(guarded, through=(SignalException,))
_FAILED = {WorkerState.FAILED, WorkerState.UNHEALTHY}
_COMING_BACK_S = 60.0
"""How long another node's failure may stand in the roster while workers can be started again."""
_CLOSING_S = 2.0
"""Longest wait for the rendezvous to be closed."""


class PeerFailedError(Exception):
    """Another node failed; this one's workers were stopped because of it.

    Args:
        failure: what the other node said.
    """

    def __init__(self, failure: FirstFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class ReportingAgent(LocalElasticAgent):
    """torch's LocalElasticAgent, with a voice and ears.

    Args:
        recording: where and how to report; its round is filled in here.
        stop_seconds: how long workers that are stopped may take before they are killed.
        min_nodes: fewest nodes with which the job goes on.
        signals: hears the signals to this process.
        kwargs: as LocalElasticAgent takes them.
    """

    def __init__(
        self, *, recording: Recording, stop_seconds: float, min_nodes: int, signals: SignalWatch, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        spec = self._worker_group.spec
        # torch sleeps between two looks; here the look itself waits, and is woken when there is something to see
        self._interval, spec.monitor_interval = spec.monitor_interval, 0.0
        self._stop_seconds = stop_seconds
        self._signals = signals
        self._reporter = Reporter(recording, self.place)
        self._wake = threading.Event()
        self._watch: DeathWatch | None = None
        self._outcome: OutcomeWatch | None = None
        self._lifelines: Lifelines | None = None
        self._roster_look: RosterLook | None = None
        self._line = self._open_line()
        self._log_tails: LogTails | None = None
        self._stop: Stop | None = None
        self._told_written = threading.Event()
        self._min_nodes = min_nodes
        self._rounds = 0
        self._finished = False
        signals.when_told(self._told_to_go)
        format_exceptions_early()

    @property
    def recording(self) -> Recording:
        """Where and how this node reports, with its present round."""
        return self._reporter.recording

    @property
    def report(self) -> NodeReport:
        """What this node has written about its present round."""
        return self._reporter.report

    # --- torch's hooks ------------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with _guarded("ending a round"):
            self._end_round()
        super()._rendezvous(worker_group)
        # if the nodes cannot agree on it, a number that is at least not the last round's
        number = self.recording.round + 1 if self._rounds else 0
        self._rounds += 1
        with _guarded("numbering the round"):
            # first of all: the other nodes wait for it
            number = begin_round(worker_group.store, worker_group.group_rank, number)
        with _guarded("beginning a round"):
            self._begin_round(number)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with _guarded("listening to the workers' stderr"):
            self._open_log_tails()
        # spawned and forked workers alike inherit this process's environment
        with _environment(self.recording.environment()):
            ids: dict[int, Any] = super()._start_workers(worker_group)
        with _guarded("watching the workers"):
            self._signals.install()
            context: Any = self._pcontext
            self._watch = DeathWatch(_processes(context), self._wake.set)
            if self._log_tails is not None:
                self._log_tails.start()
            files = _traceback_files(context)
            self._reporter.started(dict(context.error_files), files, self._ranks(), self._log_tails)
        with _guarded("connecting the agents"):
            self._listen_to_the_others()
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._wake.wait(self._interval)
        self._wake.clear()
        self._leave_with_a_failed_peer()
        failed: list[Death] = []
        with _guarded("looking at the workers"):
            failed = self._look()
        looked_ns = time.monotonic_ns()
        try:
            result: RunResult = super()._monitor_workers(worker_group)
        except (OSError, EOFError, pickle.UnpicklingError):
            # a worker that is stopped while torch writes its exception leaves half a file, on which torch stumbles
            if not failed:
                raise
        if failed:
            result = self._failed_result(failed)
        if result.state in _FAILED:
            with _guarded("reporting a failure"):
                self._report_failure(result, looked_ns)
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # torch stops them after a failure, which has stopped them already, and when nodes have come
        with _guarded("stopping the workers"):
            self._stop_workers_because("the nodes come together anew")
        super()._stop_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._signals.gave_up.is_set():
            self._signals.notice()
        with _guarded("stopping the workers"):
            if not self._signals.gave_up.is_set():
                self._stop_workers_because("its agent had failed")
            else:
                self._stop_workers_because(TOLD_TO_GO, death_sig)
        super()._shutdown(death_sig, max(1, min(timeout, round(self._stop_seconds))))

    def _exit_barrier(self) -> None:
        with _guarded("reporting success"):
            self._reporter.announce(Phase.SUCCEEDED, self._ranks())
        if self._outcome is None:
            super()._exit_barrier()  # type: ignore[no-untyped-call]
        else:
            self._await_the_others(self._outcome)
        self._finished = True
        # the job is done: a signal can only keep its outputs from being written
        self._signals.settle()

    # --- rounds -------------------------------------------------------------------------------------------------

    def _begin_round(self, number: int) -> None:
        group = self._worker_group
        nodes = group.group_world_size or 0
        self._reporter.begin(number, nodes)
        self._stop = None
        self._outcome = None

    def _end_round(self) -> None:
        """Leave no thread of ours behind: the next round may fork."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self._close_lifelines()
        if self._outcome is not None:
            self._outcome.end()
        self._reporter.drain()
        self._close_log_tails()

    def close(self) -> None:
        """Leave nothing running: wait for the uploads, each bounded by the deadline."""
        self._signals.when_told(None)
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self._close_lifelines()
        self._reporter.drain()
        self._close_log_tails()
        if self._line is not None:
            self._line.close()

    def _open_log_tails(self) -> None:
        if self.recording.node_folder:
            ranks = range(self._worker_group.spec.local_world_size)
            self._log_tails = LogTails(Path(self.recording.node_folder), self.recording.round, ranks)

    def _close_log_tails(self) -> None:
        if self._log_tails is not None:
            self._log_tails.close()
            self._log_tails = None

    def place(self, local_rank: int | None = None) -> Place:
        """Return the place of the agent, or of one of its workers."""
        group = self._worker_group
        workers = {worker.local_rank: worker for worker in group.workers}
        worker = workers.get(local_rank) if local_rank is not None else None
        base = node_place(self.recording)
        return replace(
            base,
            round=self.recording.round,
            incarnation=self.recording.incarnation,
            restart_count=group.spec.max_restarts - self._remaining_restarts,
            rank=worker.global_rank if worker else None,
            local_rank=local_rank,
            group_rank=group.group_rank,
            world_size=worker.world_size if worker else next((item.world_size for item in group.workers), 0),
            group_world_size=group.group_world_size or 0,
            role=group.spec.role,
            pid=worker.id if worker is not None and isinstance(worker.id, int) else base.pid,
        )

    def _ranks(self) -> tuple[int, ...]:
        # torch's -1: the rendezvous has not given a rank
        return tuple(worker.global_rank for worker in self._worker_group.workers if worker.global_rank >= 0)

    def _rank_of(self, local_rank: int) -> int | None:
        return self.place(local_rank).rank

    # --- this node's workers ------------------------------------------------------------------------------------

    def _look(self) -> list[Death]:
        """Return the deaths of this round; if a worker has failed, tell the others and stop its siblings first."""
        if self._watch is None:
            return []
        said = self._line.failed(self.recording.round) if self._line is not None else {}
        deaths = self._deaths()
        if not said and not deaths:
            return []
        if self._stop is None:
            first = frozenset(said) | {death.local_rank for death in deaths}
            self._tell(_first_failure(said, deaths, self._rank_of, self.place()))
            for death in deaths:
                # before its siblings are asked: what is known of the first death is to be durable first
                self._reporter.document(death, None)
            self._stop_because("another worker of this node had failed", first)
        return self._deaths()

    def _deaths(self) -> list[Death]:
        """Return the workers that have ended and have not succeeded, in the order of their ends.

        One that has exited with 0 and has not handed over a result never will: torch would wait for it for ever.
        """
        if self._watch is None:
            return []
        missing = unfinished(self._pcontext)
        return [death for death in self._watch.ended() if death.exit_code != 0 or death.local_rank in missing]

    def _failed_result(self, deaths: list[Death]) -> RunResult:
        """Return torch's result, about the worker that failed first.

        Torch's own names whichever it finds first, which may be a sibling that was stopped; or none, if a child of the
        dead process keeps its sentinel silent.
        """
        files = self.report.error_files
        spoken = self._stop.first if self._stop is not None else frozenset()
        first = next((death for death in deaths if death.local_rank in spoken), deaths[0])
        failure = ProcessFailure(first.local_rank, first.pid, first.exit_code, files.get(first.local_rank, ""))
        return RunResult(WorkerState.FAILED, failures={self._rank_of(first.local_rank) or 0: failure})

    def _report_failure(self, result: RunResult, looked_ns: int) -> None:
        """Write what is left to say after torch has noticed a failure, and that this is all."""
        if self._stop is None:
            # torch saw it first, and has stopped the others because of these
            first = frozenset(failure.local_rank for failure in result.failures.values())
            deaths = [death for death in self._deaths() if death.local_rank in first]
            self._tell(_first_failure({}, deaths, self._rank_of, self.place()))
            self._stop = Stop("another worker of this node had failed", looked_ns, first=first)
        self._document_deaths()
        self._finish_reporter()

    def _stop_workers_because(self, reason: str, sent: signal.Signals = signal.SIGTERM) -> None:
        if self._stop is None and self._watch is not None and self._worker_group.state is not WorkerState.SUCCEEDED:
            self._stop_because(reason, sent=sent)

    def _stop_because(
        self,
        reason: str,
        first: frozenset[int] = frozenset(),
        *,
        caused_by: CausedBy | None = None,
        sent: signal.Signals = signal.SIGTERM,
    ) -> None:
        """Ask this node's workers what only they know, then stop them; those that fail by themselves may end first."""
        processes = _processes(self._pcontext)
        began = time.monotonic_ns()
        self._stop = Stop(reason, began, sent.name, first, caused_by, killed_ns=began + int(self._stop_seconds * 1e9))
        alive = {rank: process.pid for rank, process in enumerate(processes) if process.exitcode is None}
        asked = {rank: pid for rank, pid in alive.items() if rank not in first}
        self._stop = replace(self._stop, observations=observe(self._line, self.recording, asked))
        stop_processes(processes, sent, spare=first, seconds=self._stop_seconds)

    def _document_deaths(self) -> None:
        for death in self._deaths():
            self._reporter.document(death, self._stop)

    # --- the other nodes ----------------------------------------------------------------------------------------

    def _listen_to_the_others(self) -> None:
        """Only after the workers have been forked: a thread that connects holds locks which a child would inherit."""
        group = self._worker_group
        if (group.group_world_size or 1) > 1:
            own = group.group_rank or 0
            self._outcome = OutcomeWatch(group.store, own, self._wake.set)
            self._lifelines = Lifelines(group.store, own, self.place().node, group.master_addr or "", self._agent_died)
            if self.recording.node_folder:
                patience = self._interval + (_COMING_BACK_S if self._remaining_restarts else 0)
                nodes = group.group_world_size or 1
                self._roster_look = RosterLook(self.recording, own, nodes, patience, self._failed_untold)

    def _close_lifelines(self) -> None:
        for listening in (self._lifelines, self._roster_look):
            if listening is not None:
                bounded(listening.end, _CLOSING_S, "ceasing to listen to the others", self._signals.gave_up)
        self._lifelines = self._roster_look = None

    def _failed_untold(self, group_rank: int) -> None:
        """Hear of a failure that another node could only write down."""
        if self._outcome is not None:
            what = "its node has written down that it failed, and could not tell"
            self._outcome.hear(FirstFailure(what, f"node {group_rank}", group_rank))

    def _agent_died(self, group_rank: int, node: str) -> None:
        """Tell for an agent that cannot any more."""
        if self._outcome is not None:
            self._outcome.tell(FirstFailure(DIED_UNHEARD, node, group_rank))

    def _tell(self, failure: FirstFailure) -> None:
        """Tell the other agents of this node's failure, and let no node wait for it in a rendezvous."""
        failure = replace(failure, fatal=self._remaining_restarts == 0)
        if self._outcome is None:
            return
        self._outcome.tell(failure)
        if failure.fatal:
            handler = self._worker_group.spec.rdzv_handler
            # in the background: the siblings need not wait for it
            bounded(handler.set_closed, 0, "closing the rendezvous")

    def _leave_with_a_failed_peer(self) -> None:
        """Stop the workers and leave if another node has failed.

        Raises:
            PeerFailedError: it has.
        """
        failure = self._outcome.failure if self._outcome is not None else None
        if failure is None:
            return
        logger.warning("stopping this node's workers: %s", failure.reason)
        with _guarded("stopping the workers"):
            deaths = frozenset(death.local_rank for death in self._deaths())
            self._stop_because(failure.reason, deaths, caused_by=failure.cause)
            self._document_deaths()
            self._finish_reporter()
        raise PeerFailedError(failure)

    def peer_failure(self) -> PeerFailedError | None:
        """Return another node's failure because of which the rendezvous was closed, None if there is none."""
        failure = self._outcome.fatal_failure() if self._outcome is not None else None
        return PeerFailedError(failure) if failure is not None else None

    def _await_the_others(self, outcome: OutcomeWatch) -> None:
        """Wait until the workers of all nodes have succeeded.

        Unlike torch's own barrier it listens to signals and to failures, and does not end by itself: a pod that leaves
        while others train makes the whole job succeed.

        Raises:
            PeerFailedError: one of the others has failed.
        """
        self._in_exit_barrier = True
        try:
            nodes = self._worker_group.group_world_size or 1
            finished = await_all(self._store, nodes, outcome, self._wake, self.recording)
        finally:
            self._in_exit_barrier = False
        if finished:
            return
        failure = outcome.failure or outcome.fatal_failure() or self._cannot_come_back(outcome)
        logger.warning("this node's workers had succeeded, but %s", failure.reason)
        raise PeerFailedError(failure)

    def _cannot_come_back(self, outcome: OutcomeWatch) -> FirstFailure:
        """Another node starts its workers again, which takes all nodes: with this one finished it waits in vain."""
        heard = outcome.outcome.failure if outcome.outcome is not None else None
        bounded(self._worker_group.spec.rdzv_handler.set_closed, _CLOSING_S, "closing the rendezvous")
        return heard or FirstFailure("the round ended without a reason", "")

    # --- the agent's own failures -------------------------------------------------------------------------------

    def _told_to_go(self, told: Told) -> None:
        """Say at once that this node was told to go; called from the thread that hears signals."""
        try:
            if self._finished:
                return
            error = SignalException("told to go", sigval=told.number)
            self._reporter.write(about_agent(error, Sort.PREEMPTION, self.place(), told.moment))
            group = self._worker_group
            others_suffice = (group.group_world_size or 1) - 1 >= self._min_nodes
            if self._outcome is not None and (self._in_exit_barrier or not others_suffice):
                what = f"{TOLD_TO_GO_BY} {told.number.name}"
                self._outcome.tell(FirstFailure(what, self.place().node, group.group_rank))
        finally:
            self._told_written.set()

    def record_own_failure(self, error: BaseException, sort: Sort) -> None:
        """Write a document about a failure of the agent itself, and that the node is done."""
        preempted = sort is Sort.PREEMPTION
        with guarded("stopping the workers"):
            self._stop_workers_because(TOLD_TO_GO if preempted else "its agent had failed")
        if preempted and self._signals.is_listening:
            self._told_written.wait(self.recording.upload_deadline_seconds)
        else:
            self._reporter.write(about_agent(error, sort, self.place(), Moment.now()))
        if self._outcome is not None and not preempted:
            what = f"{type(error).__name__} in its agent"
            self._outcome.tell(FirstFailure(what, self.place().node, self._worker_group.group_rank))
        self.finish_report()

    def finish_report(self) -> None:
        """Write what is left to say about this node's workers, and that this is all."""
        self._document_deaths()
        self._finish_reporter()

    def _finish_reporter(self) -> None:
        self._reporter.finish(self._ranks(), self._outcome.first_failure if self._outcome is not None else None)

    def heard_by(self) -> set[int] | None:
        """Return the group ranks of the agents that know of the failure; None: nobody can say."""
        if self._outcome is None:
            return None
        return self._outcome.heard_by(self._worker_group.group_world_size or 0, self._signals.gave_up)

    def _open_line(self) -> AgentLine | None:
        if not self.recording.node_folder:
            return None
        with guarded("opening the line to the workers"):
            return AgentLine(Path(self.recording.node_folder), self._wake.set)
        return None


def _first_failure(said: dict[int, dict[str, Any]], deaths: list[Death], rank_of: Any, place: Place) -> FirstFailure:
    """What to tell the others: the worker that spoke first, else the first that died."""
    if said:
        local, words = min(said.items(), key=lambda item: (item[1].get("monotonic_ns", 0), item[0]))
        what, document = str(words.get("what", "")), str(words.get("document", ""))
        return FirstFailure(what, place.node, place.group_rank, rank_of(local), document)
    if not deaths:
        return FirstFailure("its workers are unhealthy", place.node, place.group_rank)
    first = deaths[0]
    what = first.signal or f"exit code {first.exit_code}"
    return FirstFailure(what, place.node, place.group_rank, rank_of(first.local_rank))


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
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


def _processes(context: Any) -> list[Any]:
    """The worker processes in order of local rank; torch keeps them in its own process context."""
    return list(context._pc.processes)  # noqa: SLF001 - no public name for the processes of a function's workers


def _traceback_files(context: Any) -> dict[int, str]:
    """Local rank to the file in which torch.multiprocessing keeps a traceback; older versions keep queues instead."""
    files = getattr(context._pc, "error_files", None)  # noqa: SLF001 - see _processes
    return {rank: str(file) for rank, file in enumerate(files or ())}
