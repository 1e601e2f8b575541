"""One node's part in a round."""

from __future__ import annotations

import signal
import threading
from collections import deque
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException

from firstfault.model import TERMINATED, TERMINATED_BY
from firstfault_torch.agent.deaths import WorkerExit, describe_agent_failure
from firstfault_torch.agent.local_workers import LocalWorkers
from firstfault_torch.agent.place_factory import PlaceFactory
from firstfault_torch.agent.reporter import Reporter
from firstfault_torch.agent.restarts import Restarts
from firstfault_torch.agent.settings import AgentSettings
from firstfault_torch.agent.signals import SignalReceived, suppress_internal_errors_in_main
from firstfault_torch.agent.stop_processes import kill_orphans
from firstfault_torch.agent.timers import resolve_watchdog
from firstfault_torch.failures.failure_records import ErrorClass
from firstfault_torch.guard import logger, suppress_internal_errors
from firstfault_torch.node_context import Moment, NodeContext
from firstfault_torch.protocol.notices import FailureNotice
from firstfault_torch.protocol.stopping import (
    AGENT_FAILED,
    AgentTerminated,
    AnnounceGrace,
    AskPeers,
    BroadcastAgentError,
    BroadcastFailure,
    DocumentExits,
    NoticeReceived,
    PeersAsked,
    StopEvent,
    StopInstruction,
    StopRequested,
    TorchFoundFailure,
    WorkersFailed,
)
from firstfault_torch.rounds.peers import Peers
from firstfault_torch.time_limits import ROSTER_FAILURE_GRACE_SECONDS

if TYPE_CHECKING:
    from firstfault_inprocess.survivors import SurvivingWorkers
    from firstfault_torch.hang.watch import StallWatch

HANG_ENTRY_POINTS = "firstfault.hang"
"""Entry-point group of stall watches: callables like `firstfault_torch.hang.StallWatch`."""


class NodeRound:
    """A node's part in its present round.

        begin             after the rendezvous, before workers start
        listen_to_peers   the workers run; connect to the peers
        watch_progress    the workers run; detect stalls
        handle_failures   at each wake of the main thread; report_failure finishes the node's report
        end               after the uploads; `begin` may follow, or this was the last round

    Neither this object nor one of its parts holds the agent: a reference cycle would let it end in
    a forked worker.
    """

    def __init__(
        self,
        group: WorkerGroup,
        node_context: NodeContext,
        settings: AgentSettings,
    ) -> None:
        options = settings.options
        self.wake = threading.Event()
        """Set to wake the main thread: a worker failed, or the round's outcome is known."""
        self.places = PlaceFactory(group, node_context)
        self.reporter = Reporter(node_context, self.places.of)
        self._terminated_seconds = options.terminated_stop_seconds or options.stop_seconds
        self.workers = LocalWorkers(
            node_context,
            self.reporter,
            options.stop_seconds,
            self.wake.set,
            watchdog=resolve_watchdog(options.watchdog),
            healthy_seconds=self._terminated_seconds,
        )
        self.workers.are_programs = isinstance(group.spec.entrypoint, str)
        self.reporter.find_finished = self.workers.find_finished
        self.survivors: SurvivingWorkers | None = None
        if options.in_process_restart is not None:
            self.survivors = options.in_process_restart.survivors(
                self.workers, self.places.rank_of, self.reporter
            )
        self.restarts = Restarts(settings, self.reporter)
        self.peers: Peers | None = None
        """The agents of all other nodes, or None for a single node or before the round begins."""
        self._stalls: StallWatch | None = None
        self.waits_at_exit = False
        """Whether this node's workers have succeeded, and it waits for other nodes."""
        self.finished = False
        """Whether all nodes have succeeded; a signal isn't a failure then."""
        self._group = group
        self._settings = settings
        self._restarts_left = 0
        self._signal_reported = threading.Event()

    # --- the beginning and the end ----------------------------------------------------------------

    def begin(self, number: int, restarts_left: int, restarts_used: int) -> None:
        """Begin a round, after the rendezvous."""
        self._restarts_left = restarts_left
        self.places.begin_round(number, restarts_used)
        self.reporter.begin(number, self._group.group_world_size or 0)
        self.workers.begin_round()
        if self.survivors is not None:
            self.survivors.begin_round()
        # The last round's peers have ended; the new ones connect after the fork, in
        # `listen_to_peers`.
        self.peers = None

    def listen_to_peers(self, interval: float) -> None:
        """Connect to its peers, after the workers were started; `interval` is torch's, in seconds.

        It does so once per round, and is called again where an error may have prevented it.
        """
        nodes = self.places.nodes
        if nodes < 2 or self.peers is not None:  # noqa: PLR2004 - there are no peers
            return
        self.peers = Peers(
            self._group,
            self.reporter.node_context,
            patience_seconds=interval
            + (ROSTER_FAILURE_GRACE_SECONDS if self._restarts_left else 0),
            can_continue_without_node=self.needs_restart_vote
            and self.restarts.can_continue_without_node(nodes),
            wake=self.wake.set,
            shutdown_requested=self._settings.signals.shutdown_requested,
        )
        # The signal thread stores the signal, then looks for peers; this thread does it the other
        # way round. So at least one of them informs the peers, whenever the signal arrives.
        received = self._settings.signals.received
        if received is not None:
            with suppress_internal_errors("informing the peer agents of a signal"):
                self._announce_leaving()
                self._broadcast_signal(received)
        self.peers.join(self.reporter.report.copies)

    def watch_progress(self) -> None:
        """Look from now on whether the workers make progress,
        unless the option is off or its folder isn't there.
        """
        hang = self._settings.options.hang
        for point in entry_points(group=HANG_ENTRY_POINTS) if hang is not None else ():
            self._stalls = point.load()(hang, self.workers, self.reporter, self.places, self.peers)
            self.reporter.progress = self._stalls.progress

    def end(self, *, is_last: bool) -> None:
        """End all threads of the round, after the uploads: the next round may fork.

        After the last round the agents may still settle on a verdict.
        """
        # What acts on the workers ends first, then what listens to the peers, then the uploads:
        # each may still use the ones after it. A stall's report is an upload, too.
        if self._stalls is not None:
            self._stalls.end()
            self._stalls = None
        self.workers.stop_watching()
        if self.peers is not None and is_last:
            # the thread that waits for the round's outcome stays: `Peers.settle` uses its
            # connections
            self.peers.stop_listening()
        elif self.peers is not None:
            self.peers.end()
        self.reporter.drain()
        with suppress_internal_errors_in_main("removing torch's files"):
            self.reporter.remove_traceback_files()
        if not is_last:
            kill_orphans(self.reporter.node_context, self.stop_seconds)
        # After the uploads, which read the end of stderr, and after the orphans: a FIFO with a
        # writer left would need another process to read it.
        self.workers.close_stderr()
        if is_last:
            self.workers.close()

    @property
    def finished_results(self) -> dict[int, Any]:
        """What functions of this node returned before a failure was known, by global rank."""
        results: dict[int, Any] = {}
        with suppress_internal_errors("reading the results of finished workers"):
            has_succeeded = self._group.state is WorkerState.SUCCEEDED  # it waited for other nodes
            finished = range(self.workers.count) if has_succeeded else self.workers.finished
            taken = self.workers.take_results(finished)
            results.update(
                {self.places.rank_of(local) or 0: value for local, value in taken.items()}
            )
        return results

    # --- a failure of this node's workers ---------------------------------------------------------

    def handle_failures(self) -> list[WorkerExit]:
        """Return the deaths of this round; on the first one inform the peers
        and stop the siblings.
        """
        if not self.workers.is_watched:
            return []
        reported = self.workers.reported()
        worker_exits = self.workers.get_exits()
        if not reported and not worker_exits:
            return []
        times = {rank: int(report.get("monotonic_ns", 0)) for rank, report in reported.items()}
        self._decide(WorkersFailed(times, _list_ranks(worker_exits)))
        # Looked up again: the stop has ended the siblings, and a worker that had only reported has
        # exited by now.
        return self.workers.get_exits()

    def report_failure(self, result: RunResult, looked_ns: int) -> None:
        """Finish the report after torch has found a failure."""
        # A worker may have died between `handle_failures` and torch's look: torch saw the failure
        # first and has stopped the remaining workers. `looked_ns` is from before that look, so
        # their deaths count as stopped. `failed` is empty if torch names no worker: since torch
        # 2.13 it may report UNHEALTHY for one in uninterruptible sleep.
        failed = frozenset(failure.local_rank for failure in result.failures.values())
        exited = [
            worker_exit
            for worker_exit in self.workers.get_exits()
            if worker_exit.local_rank in failed
        ]
        self._decide(TorchFoundFailure(failed, _list_ranks(exited), looked_ns))
        self.finish_report()

    def stop_workers(
        self,
        reason: str,
        sent: signal.Signals = signal.SIGTERM,
        agent_error: BaseException | None = None,
    ) -> None:
        """Stop workers that haven't failed, or end their stop, unless they have succeeded.

        Several paths of torch end here for one failure: its `_stop_workers` and `_shutdown`, and
        `report_agent`. Only the first gives its reason.
        """
        if not self.workers.is_watched or self._group.state is WorkerState.SUCCEEDED:
            return
        error = _describe_agent_error(agent_error) if agent_error is not None else ""
        self._decide(StopRequested(reason, error, sent.name))

    @property
    def stop_seconds(self) -> float:
        """How long the workers may take to end: as long as in torch,
        unless one of them has failed.
        """
        return self.workers.stopper.stop_seconds

    def _decide(self, event: StopEvent) -> None:
        """Carry out what an event leads to, until nothing more follows from it."""
        instructions = deque(self.workers.stopper.handle(event))
        while instructions:
            instructions += self._carry_out(instructions.popleft())

    def _carry_out(self, instruction: StopInstruction) -> list[StopInstruction]:
        match instruction:
            case BroadcastFailure(local_rank):
                self._broadcast_failure(local_rank)
            case BroadcastAgentError(what):
                self._broadcast_agent_failure(what)
            case AnnounceGrace(seconds):
                if self.peers is not None:
                    self.peers.broadcast.announce_grace(seconds)
            case DocumentExits(local_ranks):
                for worker_exit in self.workers.get_exits():
                    if worker_exit.local_rank in local_ranks:
                        self.workers.document(worker_exit)
            case AskPeers():
                has_signal = self.peers is not None and self.peers.broadcast.has_grace()
                return self.workers.stopper.handle(PeersAsked(has_signal))
            case _:
                return self.workers.stopper.carry_out(instruction)
        return []

    def finish_report(self) -> None:
        """Document the deaths of this node's workers, and announce that the node has failed."""
        # Before the documents: a recovered death must get none.
        self._forget_recovered()
        self.workers.document_exits()
        first = self.peers.broadcast.first_failure if self.peers is not None else None
        self.reporter.finish(self.places.ranks, first)

    def _forget_recovered(self) -> None:
        """Leave out workers that the remaining ranks had continued without."""
        if self.survivors is not None:
            with suppress_internal_errors_in_main(
                "leaving out faults from which the ranks had recovered"
            ):
                self.survivors.forget_recovered(self._group)

    def _broadcast_failure(self, local_rank: int | None) -> None:
        """Send its peers the failure of a worker, or that the workers are unhealthy."""
        if self.peers is None:
            return
        place = self.places.of()
        rank = self.places.rank_of(local_rank) if local_rank is not None else None
        report = self.workers.reported().get(local_rank, {}) if local_rank is not None else {}
        self.peers.notify(
            FailureNotice(
                self._describe_failure(local_rank, report),
                place.node,
                place.group_rank,
                rank=rank,
                document=str(report.get("document", "")),
                fatal=self._restarts_left == 0,
                asks=self.needs_restart_vote,
            )
        )

    def _describe_failure(self, local_rank: int | None, report: dict[str, Any]) -> str:
        if report:
            return str(report.get("what", ""))
        for worker_exit in self.workers.get_exits():
            if worker_exit.local_rank == local_rank:
                expiry = self.workers.stopper.expired.get(local_rank)
                if expiry is not None:
                    return expiry.deadline.text
                return worker_exit.signal or f"exit code {worker_exit.exit_code}"
        return "its workers are unhealthy"

    # --- a failure of the agent itself ------------------------------------------------------------

    def report_signal(self, received: SignalReceived) -> None:
        """Report at once that this node is terminated. Runs in the signal thread."""
        try:
            if self.finished:
                return
            # First: workers of this or another node may be about to be killed because of a failure.
            self.workers.stopper.handle(AgentTerminated())
            self._announce_leaving()
            # At the same time the main thread raises SignalException and stops the workers, but it
            # may be blocked in C++ for minutes; so this thread writes the document. Deadlines
            # first: they apply to this very upload.
            self.reporter.shorten_deadlines()
            error = SignalException("terminated", sigval=received.number)
            with suppress_internal_errors("documenting a signal"):
                place = self.places.of()
                self.reporter.write(
                    describe_agent_failure(error, ErrorClass.PREEMPTION, place, received.moment)
                )
            self._broadcast_signal(received)
        finally:
            # in any case: the main thread waits for it in `report_agent`
            self._signal_reported.set()

    def _announce_leaving(self) -> None:
        """Let the peers know that this process has to end, so that they decide; and let their
        healthy workers have as much time to end as this node's.
        """
        if self.peers is not None:
            self.peers.broadcast.mark_leaving()
            self.peers.broadcast.announce_grace(self._terminated_seconds)

    def _broadcast_signal(self, received: SignalReceived) -> None:
        """Send its peers that this node is terminated, if they can't continue without it."""
        if self.waits_at_exit or not self.restarts.can_continue_without_node(self.places.nodes):
            what, seconds = f"{TERMINATED_BY} {received.number.name}", self._terminated_seconds
            self._broadcast_agent_failure(what, seconds)

    def report_agent(self, error: BaseException, error_class: ErrorClass) -> None:
        """Write a document about a failure of the agent itself, and finish the node's report."""
        preempted = error_class is ErrorClass.PREEMPTION
        with suppress_internal_errors("stopping the workers"):
            self.stop_workers(TERMINATED if preempted else AGENT_FAILED)
        if preempted and self._settings.signals.is_listening:
            # The signal thread writes this document. `finish_report` reads the receipts, so the
            # document must be there before.
            self._signal_reported.wait(self.reporter.node_context.upload_deadline_seconds)
        else:
            self.reporter.write(
                describe_agent_failure(error, error_class, self.places.of(), Moment.now())
            )
        if not preempted:
            self._broadcast_agent_failure(_describe_agent_error(error))
        self.finish_report()
        # Last, with all documents: peers that vote on a restart wait for this node's report or for
        # its departure.
        if self.peers is not None and preempted:
            self.peers.leave(self.reporter.report.copies)

    def _broadcast_agent_failure(self, what: str, stop_seconds: float = 0.0) -> None:
        """Send its peers that this agent fails; after a signal with the time that
        all workers have to end.
        """
        if self.peers is not None:
            place = self.places.of()
            self.peers.broadcast.send(
                FailureNotice(what, place.node, place.group_rank, stop_seconds=stop_seconds)
            )

    # --- a failure of another node ----------------------------------------------------------------

    def stop_after_peer_failure(self, failure: FailureNotice) -> None:
        """Stop the workers because another node has failed, and report."""
        logger.warning(
            "stopping this node's workers, because %s (first report, not the verdict)",
            failure.reason,
        )
        if self.survivors is not None:
            self.survivors.await_all_exits()
        self._forget_recovered()
        with suppress_internal_errors_in_main("stopping the workers"):
            exited = frozenset(_list_ranks(self.workers.get_exits()))
            self._decide(
                NoticeReceived(failure.reason, failure.cause, failure.stop_seconds, exited)
            )
            self.finish_report()

    # --- restarts ---------------------------------------------------------------------------------

    @property
    def needs_restart_vote(self) -> bool:
        """Whether the agents decide if torch may restart the workers."""
        return self.restarts.ask and self._restarts_left > 0

    def may_restart(self) -> bool:
        """Decide with its peers whether the workers are restarted."""
        broadcast = self.peers.broadcast if self.peers is not None else None
        allowed = True
        with suppress_internal_errors_in_main("deciding on a restart"):
            place = self.places.of()
            first = broadcast.first_failure if broadcast is not None else None
            first = first or FailureNotice("its workers", place.node, place.group_rank)
            record = self.restarts.decide_restart(place, self._restarts_left, self.peers, first)
            allowed = record is None or record.restart
        return allowed and (self.peers is None or self.peers.may_restart())


def _describe_agent_error(error: BaseException) -> str:
    return f"{type(error).__name__} in its agent"


def _list_ranks(worker_exits: list[WorkerExit]) -> tuple[int, ...]:
    return tuple(worker_exit.local_rank for worker_exit in worker_exits)
