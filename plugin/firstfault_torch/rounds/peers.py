"""What an agent exchanges with the other agents of a round: failures, decisions, a verdict, and the end."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from firstfault.model import DIED_SILENTLY, Phase
from firstfault.recorder.folder import Recorder
from firstfault_torch import time_limits
from firstfault_torch.compat.torch_agent import BARRIER_LAST, BARRIER_MEMBERS, master_address
from firstfault_torch.guard import BackgroundCall, call_with_timeout, logger, suppress_internal_errors, try_call
from firstfault_torch.node_context import NodeContext
from firstfault_torch.rounds.election import CollectedReports, VerdictElection, have_joined
from firstfault_torch.rounds.failure_broadcast import FailureBroadcast, FailureNotice, RoundOutcome
from firstfault_torch.rounds.peer_connections import PeerConnections
from firstfault_torch.rounds.report_packing import ElectedVerdict
from firstfault_torch.rounds.roster_poller import RosterPoller
from firstfault_torch.rounds.round_store import connected, store_of_agents

_KNOW, _ALL_KNOW = "firstfault/know", "firstfault/all-know"
"""Counter of the agents that know that all workers have succeeded; key that the last of them sets."""


class Peers:
    """This node's view of the other agents in one round, with the threads that listen to them.

        Peers(...)          after the workers are forked: connecting takes locks that a child would inherit
        join, connect       the node takes part in the round's elections; its connections are open
        notify              this node failed: broadcast it; or a peer's failure arrives, and a thread calls `wake`
        agree | settle      the agents vote on a restart, or elect the leader that concludes
        leave, end          this node exits earlier, or the round is over: close connections, join threads

    A failure that is only in the roster may be ignored for `patience_seconds`: a restart may be under way. With
    `can_continue_without_node` the agents also vote on a restart after one of them has died. `shutdown_requested`, set
    by a signal to this process, ends waits.
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        group: WorkerGroup,
        node_context: NodeContext,
        *,
        patience_seconds: float,
        can_continue_without_node: bool = False,
        wake: Callable[[], None],
        shutdown_requested: threading.Event,
    ) -> None:
        self._group = group
        self._node_context = node_context
        self._gave_up = shutdown_requested
        own, nodes = self._own, self._nodes = group.group_rank or 0, group.group_world_size or 1
        self._others_suffice = can_continue_without_node
        self.settlement = VerdictElection(own, nodes)
        """On the verdict on the attempt."""
        self.agreement = VerdictElection(own, nodes, "restart")
        """On a restart."""
        host = master_address(group)[0]
        self._store = store_of_agents(group, node_context.round, host)
        self.liveness = PeerConnections(self._store, own, node_context.identity.node, host, self._report_dead_agent)
        self._listeners: list[PeerConnections | RosterPoller] = [self.liveness]
        self.broadcast = FailureBroadcast(self._store, own, wake, self._acknowledge)
        self.roster: RosterPoller | None = None
        """None: the nodes share no folder."""
        if node_context.files is not None and node_context.identity.is_folder_shared:
            recorder = Recorder(node_context.files)
            self.roster = RosterPoller(recorder, node_context, own, patience_seconds, self._take_from_roster)
            self._listeners.append(self.roster)

    def join(self, copies: Mapping[str, bytes]) -> None:
        """Tell the other agents that this node has joined, and hand in its roster entry."""
        with suppress_internal_errors("telling the other agents that this node has joined"):
            self.settlement.join(self._store, copies)

    def connect(self) -> Any:
        """Return a connection to the round's store of its own.

        Raises:
            torch.distributed.DistNetworkError: no server listens there.
        """
        return connected(self._store)

    def notify(self, failure: FailureNotice) -> None:
        """Tell the other agents of this node's failure; a fatal one also closes the rendezvous."""
        self.broadcast.send(failure)
        if failure.fatal:
            # in the background: this node's workers are stopped meanwhile
            close = partial(try_call, self._group.spec.rdzv_handler.set_closed, RendezvousConnectionError)
            call_with_timeout(close, 0, "closing the rendezvous")

    def mark_fatal(self, failure: FailureNotice, *, tell: bool) -> None:
        """Take a failure for fatal, because the agents have decided against a restart.

        With `tell`, also tell agents that were not there then: they may be on their way to a new round.
        """
        if tell:
            self.notify(replace(failure, fatal=True, asks=False))
        self.broadcast.mark_fatal(failure)

    def agree(self, copies: Mapping[str, bytes], seconds: float) -> Iterator[CollectedReports | ElectedVerdict]:
        """Yield what `VerdictElection.settle` yields, for a decision on a restart.

        The values end without a decision if the store is lost, a node failed for good meanwhile, or no agent concluded
        in time.
        """
        connections = self.broadcast.connections(to_agree=True)
        if connections is None:
            return
        for step in self.agreement.settle(connections, copies, seconds, self._gave_up):
            if isinstance(step, CollectedReports) or step.document:
                yield step
        # this also ends the waiting thread: the next round may fork, and the connection is needed again
        settled = self.agreement.abandon(connections[0])
        if settled is not None and settled.document:
            yield settled
            return
        # an agent that already knows of a fatal failure ends the decision for all
        failure = self.broadcast.fatal_failure()
        if failure is not None:
            self.broadcast.accept(failure)

    def await_all(self, wake: threading.Event) -> FailureNotice | None:
        """Wait until the workers of all nodes have succeeded; return the failure if one has not.

        Unlike torch's own barrier it reacts to signals and failures, and has no limit: a pod that exits while others
        train makes the whole job succeed. Nodes without firstfault tell of no failure: beside them torch's limit holds.
        The calling thread waits in Python, so that signals and `wake` reach it.

        Raises:
            RendezvousConnectionError: the node that hosts the store is gone before all nodes have finished.
        """
        outcome = self._outcome_at_exit(wake)
        if outcome.lost:
            self._check_roster(outcome.lost)
            return None
        if outcome.finished:
            self._let_all_know()
            return None
        failure = self.broadcast.failure or self.broadcast.fatal_failure()
        if failure is None:  # another node wants to restart; it cannot, because this node has finished
            restart = outcome.failure
            if restart is not None and restart.asks:
                # it ends the decision that the other agents wait for
                self.broadcast.send(replace(restart, fatal=True, asks=False))
            call_with_timeout(
                self._group.spec.rdzv_handler.set_closed,
                time_limits.RENDEZVOUS_CLOSE_TIMEOUT_SECONDS,
                "closing the rendezvous",
            )
            failure = restart or FailureNotice("the round ended without a reason", "")
        logger.warning("this node's workers had succeeded. The first report, not the verdict: %s", failure.reason)
        return failure

    def _outcome_at_exit(self, wake: threading.Event) -> RoundOutcome:
        """Wait until the round's outcome is known; tell the others if this node sees first that all have arrived."""
        store: Any = self._group.store

        def look() -> bool:
            try:
                return bool(store.check([BARRIER_LAST]))
            except (dist.DistNetworkError, dist.DistStoreError):
                return False  # the broadcast reports the lost store

        enter = partial(self._count_in, BARRIER_MEMBERS, BARRIER_LAST)
        call_with_timeout(enter, time_limits.STORE_TIMEOUT_SECONDS, "entering the exit barrier")
        is_complete = BackgroundCall(look, default=False)
        waited = 0.0
        while (outcome := self.broadcast.outcome) is None:
            # the nodes ask one after the other who has firstfault: the answer is large
            if is_complete() or (
                waited == time_limits.EXIT_BARRIER_TIMEOUT_SECONDS + self._own and self._lacks_agents()
            ):
                self.broadcast.send_finished()
                return RoundOutcome(finished=True)
            wake.wait(time_limits.EXIT_BARRIER_POLL_SECONDS)
            wake.clear()
            waited += time_limits.EXIT_BARRIER_POLL_SECONDS
            if waited % time_limits.EXIT_BARRIER_LOG_INTERVAL_SECONDS < time_limits.EXIT_BARRIER_POLL_SECONDS:
                logger.info("this node's workers have finished; waiting for the other nodes'")
        return outcome

    def _lacks_agents(self) -> bool:
        """Whether some nodes run without firstfault."""
        joined = call_with_timeout(
            partial(have_joined, self._store), time_limits.STORE_TIMEOUT_SECONDS, "asking which nodes have firstfault"
        )
        if joined is None or joined >= self._nodes:
            return False
        logger.warning("some nodes run without firstfault, and may have failed; this one does not wait for them")
        return True

    def _let_all_know(self) -> None:
        """Wait until all agents know that all have finished: the exit of the one that hosts the store ends it."""

        def wait() -> None:
            self._count_in(_KNOW, _ALL_KNOW)
            # not `store.check`, again and again: torch prints its error if the host is gone
            store.wait([_ALL_KNOW], dt.timedelta(seconds=time_limits.FINISH_ACKS_TIMEOUT_SECONDS))

        store: Any = self._group.store
        call_with_timeout(
            lambda: try_call(wait, dist.DistError), time_limits.FINISH_ACKS_TIMEOUT_SECONDS, "letting all agents know"
        )

    def _count_in(self, members: str, last: str) -> None:
        store: Any = self._group.store
        if store.add(members, 1) == self._nodes:
            store.set(last, "<val_ignored>")

    def _check_roster(self, why: str) -> None:
        """Check that all nodes had finished before the store was lost; without a shared folder assume it, as torch."""
        if not self._node_context.identity.is_folder_shared:
            logger.info("the store is gone, and no folder tells whether the other nodes have finished: %s", why)
            return
        from firstfault.output_reader import MultiErrorFileOutputReader  # noqa: PLC0415 - a start would wait for it

        roster = MultiErrorFileOutputReader(self._node_context.output_prefix).job().roster
        done = {entry.place.group_rank for entry in roster if entry.phase is Phase.SUCCEEDED}
        if len(done) < self._nodes:
            why = f"the node that hosts the store is gone, and not all nodes have finished: {why}"
            raise RendezvousConnectionError(why)

    def leave(self, copies: Mapping[str, bytes]) -> None:
        """Announce in a decision on a restart, if the agents take one, that this node leaves."""
        outcome = self.broadcast.outcome
        if outcome is None or outcome.failure is None or not outcome.failure.asks:
            return
        connections = self.broadcast.connections(to_agree=True)
        if connections is not None:
            self.agreement.leave(connections[0], copies)

    def settle(self, copies: Mapping[str, bytes], seconds: float) -> Iterator[CollectedReports | ElectedVerdict]:
        """Settle on one verdict with the other agents; see `VerdictElection.settle`."""
        connections = self.broadcast.connections()
        if connections is not None:
            yield from self.settlement.settle(connections, copies, seconds, self._gave_up)

    def stop_listening(self) -> None:
        """Close the connections to the other agents, and stop polling the roster."""
        while self._listeners:
            listener = self._listeners.pop(0)
            call_with_timeout(
                listener.end,
                time_limits.RENDEZVOUS_CLOSE_TIMEOUT_SECONDS,
                "ending the connections to the other agents",
                self._gave_up,
            )

    def end(self) -> None:
        """End the round and its threads: the next round may fork."""
        self.stop_listening()
        self.broadcast.end()

    def _acknowledge(self, store: Any, failure: FailureNotice) -> None:
        """Tell the other agents that this one knows of a failure, and so lives."""
        if failure.fatal:
            self.agreement.interrupt(failure.reason)
        (self.agreement if failure.asks else self.settlement).heard(store)

    def _report_dead_agent(self, group_rank: int, node: str) -> None:
        """Tell the other agents that one of them died."""
        asks = self._others_suffice
        self.broadcast.send(FailureNotice(DIED_SILENTLY, node, group_rank, fatal=not asks, asks=asks))

    def _take_from_roster(self, group_rank: int) -> None:
        """Accept a failure that another node wrote into the roster but did not broadcast."""
        what = "its roster entry says so; it sent no failure notice"
        self.broadcast.accept(FailureNotice(what, f"node {group_rank}", group_rank))
