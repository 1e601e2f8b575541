"""The agents of all other nodes in a round: failure notices, elections, and the exit barrier."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from firstfault.model import DIED_SILENTLY, Phase
from firstfault.recorder.client import RecorderClient
from firstfault_torch import time_limits
from firstfault_torch.compat.torch_agent import BARRIER_LAST, BARRIER_MEMBERS, master_address
from firstfault_torch.guard import (
    BackgroundCall,
    call_with_timeout,
    logger,
    suppress_internal_errors,
    try_call,
)
from firstfault_torch.node_context import NodeContext
from firstfault_torch.rounds.election import CollectedReports, VerdictElection, count_joined
from firstfault_torch.rounds.failure_broadcast import FailureBroadcast, FailureNotice, RoundOutcome
from firstfault_torch.rounds.peer_connections import PeerConnections
from firstfault_torch.rounds.report_packing import ElectedVerdict
from firstfault_torch.rounds.roster_poller import RosterPoller
from firstfault_torch.rounds.round_store import (
    connect_to_store,
    interrupt_connections,
    is_hosted_here,
    open_agents_store,
)

FINISH_ACKS_KEY, ALL_ACKED_KEY = "firstfault/know", "firstfault/all-know"
"""Counter of the agents that know that all workers have succeeded; key that the last of them sets.
"""


class Peers:
    """This node's view of its peers in one round, with the threads that listen to them.

        Peers(...)          after the workers are forked: connecting takes locks that a child would
                            inherit
        join, connect       the node takes part in the round's elections; its connections are open
        notify              this node failed: broadcast it; or a peer's failure arrives, and a
                            thread calls `wake`
        agree | settle      the agents vote on a restart, or elect the leader that concludes
        leave, end          this node exits earlier, or the round is over: close connections, join
                            threads

    A failure that is only in the roster may be ignored for `patience_seconds`: a restart may be
    under way. With `can_continue_without_node` the agents also vote on a restart after one of them
    has died. `shutdown_requested`, set by a signal to this process, ends waits.
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
        self._shutdown_requested = shutdown_requested
        own, nodes = self._own, self._nodes = group.group_rank or 0, group.group_world_size or 1
        self._can_continue_without_node = can_continue_without_node
        self.settlement = VerdictElection(own, nodes)
        """Who concludes on the attempt."""
        self.agreement = VerdictElection(own, nodes, "restart")
        """Who decides on a restart."""
        host = master_address(group)[0]
        self._store = open_agents_store(group, node_context.round, host)
        self.liveness = PeerConnections(
            self._store,
            own,
            node_context.identity.node,
            host,
            self._report_dead_agent,
        )
        self._listeners: list[PeerConnections | RosterPoller] = [self.liveness]
        self.broadcast = FailureBroadcast(self._store, own, wake, self._acknowledge)
        self.roster: RosterPoller | None = None
        """None if the nodes have no shared folder."""
        if node_context.files is not None and node_context.identity.is_folder_shared:
            recorder = RecorderClient(node_context.files)
            self.roster = RosterPoller(
                recorder,
                node_context,
                own,
                patience_seconds,
                self._take_from_roster,
            )
            self._listeners.append(self.roster)

    def join(self, copies: Mapping[str, bytes]) -> None:
        """Announce this node to its peers, with its roster entry."""
        with suppress_internal_errors("informing the peer agents that this node has joined"):
            self.settlement.join(self._store, copies)

    def connect(self) -> Any:
        """Return a new connection to the round's store.

        Raises:
            torch.distributed.DistNetworkError: no server listens there.
        """
        return connect_to_store(self._store)

    def notify(self, failure: FailureNotice) -> None:
        """Broadcast this node's failure; a fatal one also closes the rendezvous."""
        self.broadcast.send(failure)
        if failure.fatal:
            # A closed rendezvous rejects nodes on their way into another round. In the background,
            # because stopping this node's workers must not wait for it.
            close = partial(
                try_call, self._group.spec.rdzv_handler.set_closed, RendezvousConnectionError
            )
            call_with_timeout(close, 0, "closing the rendezvous")

    def mark_fatal(self, failure: FailureNotice, *, broadcast: bool) -> None:
        """Treat a failure as fatal because the agents have voted against a restart.

        With `broadcast`, also notify agents that missed the vote: they may be on their way into a
        new round.
        """
        if broadcast:
            self.notify(replace(failure, fatal=True, asks=False))
        self.broadcast.mark_fatal(failure)

    def agree(
        self, copies: Mapping[str, bytes], seconds: float
    ) -> Iterator[CollectedReports | ElectedVerdict]:
        """Vote on a restart: yield the values of `VerdictElection.settle`.

        They end without a decision if the store is lost, a node fails permanently, or no leader
        concludes in time.
        """
        connections = self.broadcast.connections(to_agree=True)
        if connections is None:
            return
        for step in self.agreement.settle(connections, copies, seconds, self._shutdown_requested):
            if isinstance(step, CollectedReports) or step.document:
                yield step
        # also ends the waiting thread: the next round may fork, and its connection is needed for
        # the verdict
        elected = self.agreement.cancel(connections[0])
        if elected is not None and elected.document:
            yield elected
            return
        # an agent that knew of a fatal failure has ended the vote for all agents
        failure = self.broadcast.find_fatal_failure()
        if failure is not None:
            self.broadcast.accept(failure)

    def await_all(self, wake: threading.Event) -> FailureNotice | None:
        """Wait until the workers of all nodes have succeeded;
        return the failure if a node has failed.

        Unlike torch's barrier, it reacts to signals and failures and has no timeout: a pod that
        exits early makes Kubeflow count the job as a success. Nodes without firstfault broadcast no
        failures; with them torch's timeout applies. The calling thread waits in Python, so signals
        and `wake` reach it.

        Raises:
            RendezvousConnectionError: the store's host is gone before all nodes have finished.
        """
        outcome = self._outcome_at_exit(wake)
        if outcome.lost:
            self._check_roster(outcome.lost)
            return None
        if outcome.finished:
            self._wait_for_finish_acks()
            return None
        failure = self.broadcast.failure or self.broadcast.find_fatal_failure()
        # another node wants to restart, which is impossible: this node has finished
        if failure is None:
            restart = outcome.failure
            if restart is not None and restart.asks:
                # ends the vote, for which other agents are waiting
                self.broadcast.send(replace(restart, fatal=True, asks=False))
            close = self._group.spec.rdzv_handler.set_closed
            call_with_timeout(
                close, time_limits.RENDEZVOUS_CLOSE_TIMEOUT_SECONDS, "closing the rendezvous"
            )
            failure = restart or FailureNotice("the round ended without a reason", "")
        logger.warning(
            "this node's workers succeeded, but %s (first report, not the verdict)", failure.reason
        )
        return failure

    def _outcome_at_exit(self, wake: threading.Event) -> RoundOutcome:
        """Wait for the round's outcome; broadcast it if this node is the first to see
        that all have arrived.
        """
        store: Any = self._group.store

        def look() -> bool:
            try:
                return bool(store.check([BARRIER_LAST]))
            except (dist.DistNetworkError, dist.DistStoreError):
                return False  # the broadcast reports the lost store

        enter = partial(self._increment_counter, BARRIER_MEMBERS, BARRIER_LAST)
        call_with_timeout(enter, time_limits.STORE_TIMEOUT_SECONDS, "entering the exit barrier")
        is_complete = BackgroundCall(look, default=False)
        waited, own_turn = 0.0, time_limits.EXIT_BARRIER_TIMEOUT_SECONDS + self._own
        while (outcome := self.broadcast.outcome) is None:
            # one node per second reads which nodes have firstfault: the answer is large
            if is_complete() or (waited == own_turn and self._lacks_agents()):
                self.broadcast.send_finished()
                return RoundOutcome(finished=True)
            wake.wait(time_limits.EXIT_BARRIER_POLL_SECONDS)
            wake.clear()
            waited += time_limits.EXIT_BARRIER_POLL_SECONDS
            if (
                waited % time_limits.EXIT_BARRIER_LOG_INTERVAL_SECONDS
                < time_limits.EXIT_BARRIER_POLL_SECONDS
            ):
                logger.info("this node's workers have finished; waiting for the remaining nodes")
                doing = "looking for the round's outcome"
                call_with_timeout(self.broadcast.poll, time_limits.STORE_TIMEOUT_SECONDS, doing)
        return outcome

    def _lacks_agents(self) -> bool:
        """Whether some nodes run without firstfault."""
        count = partial(count_joined, self._store)
        seconds = time_limits.STORE_TIMEOUT_SECONDS
        joined = call_with_timeout(count, seconds, "asking which nodes have firstfault")
        if joined is None or joined >= self._nodes:
            return False
        logger.warning(
            "some nodes run without firstfault and may have failed; not waiting for them"
        )
        return True

    def _wait_for_finish_acks(self) -> None:
        """Wait until all agents know that all nodes have finished."""
        # the store ends with its host's process: an agent that doesn't know the outcome yet would
        # call it a failure

        def wait() -> None:
            self._increment_counter(FINISH_ACKS_KEY, ALL_ACKED_KEY)
            # not a loop of `store.check`: torch prints an error if the host is gone
            store.wait([ALL_ACKED_KEY], dt.timedelta(seconds=seconds))

        store: Any = self._group.store
        seconds = time_limits.FINISH_ACKS_TIMEOUT_SECONDS
        call_with_timeout(
            lambda: try_call(wait, dist.DistError), seconds, "letting all agents know"
        )

    def _increment_counter(self, members: str, last: str) -> None:
        store: Any = self._group.store
        if store.add(members, 1) == self._nodes:
            store.set(last, "<val_ignored>")

    def _check_roster(self, why: str) -> None:
        """Check that all nodes had finished before the store was lost;
        assume so without a shared folder, as torch.
        """
        if not self._node_context.identity.is_folder_shared:
            logger.info(
                "lost the store, so it's unknown whether the remaining nodes finished: %s", why
            )
            return
        from firstfault.attempt_reader import (  # noqa: PLC0415 - slows down the start
            AttemptReader,
        )

        roster = AttemptReader(self._node_context.output_prefix).job().roster
        done = {entry.place.group_rank for entry in roster if entry.phase is Phase.SUCCEEDED}
        if len(done) < self._nodes:
            why = f"the node that hosts the store is gone, and not all nodes have finished: {why}"
            raise RendezvousConnectionError(why)

    def leave(self, copies: Mapping[str, bytes]) -> None:
        """Announce in a vote on a restart, if there is one, that this node's process exits."""
        outcome = self.broadcast.outcome
        if outcome is None or outcome.failure is None or not outcome.failure.asks:
            return
        connections = self.broadcast.connections(to_agree=True)
        if connections is not None:
            self.agreement.leave(connections[0], copies)

    def leave_to_others(self, copies: Mapping[str, bytes]) -> bool:
        """Hand in this node's report, as a process that has to end at once;
        return whether other nodes decide.
        """

        def leave() -> bool:
            store = self.connect()
            self.settlement.leave(store, copies)
            return self.settlement.can_others_decide(store)

        seconds = time_limits.EXIT_STEP_TIMEOUT_SECONDS
        return bool(call_with_timeout(leave, seconds, "leaving the verdict to the other nodes"))

    def settle(
        self,
        copies: Mapping[str, bytes],
        seconds: float,
        grace_seconds: float,
        *,
        may_leave: bool,
    ) -> Iterator[CollectedReports | ElectedVerdict]:
        """Elect the leader that concludes; see `VerdictElection.settle`.

        `seconds` count from the end of the time that all nodes' workers have after a signal to one
        node, which is `grace_seconds`. If this node `may_leave` the decision to others, it does so
        once its process has to end.
        """
        connections = self.broadcast.connections()
        if connections is not None:
            seconds += self.broadcast.grace_left
            yield from self.settlement.settle(
                connections,
                copies,
                seconds,
                self._shutdown_requested,
                grace_seconds=grace_seconds,
                may_leave=may_leave,
            )

    def confirm_verdict(self) -> None:
        """Notify the agent that hosts the store that this node has the verdict."""
        self.settlement.confirm()

    def await_confirmations(self) -> None:
        """As the agent that hosts the store, wait until the peers have the verdict."""
        if is_hosted_here(self._store):
            self.settlement.await_confirmations()

    def stop_listening(self) -> None:
        """Close the connections to peers, and stop polling the roster."""
        while self._listeners:
            listener = self._listeners.pop(0)
            seconds, doing = (
                time_limits.RENDEZVOUS_CLOSE_TIMEOUT_SECONDS,
                "ending the connections to the peer agents",
            )
            call_with_timeout(listener.end, seconds, doing, self._shutdown_requested)

    def end(self) -> None:
        """End the round and its threads: the next round may fork."""
        self.stop_listening()
        self.broadcast.end()

    def close(self) -> None:
        """End all threads, when nothing of the round is needed any more and the process may end."""
        # See `guard.await_late_calls`: no thread may be inside torch's store when the interpreter
        # ends.
        self.stop_listening()
        self.broadcast.end_waiting()
        started = (
            self.broadcast.thread,
            self.settlement.thread,
            self.agreement.thread,
            self.liveness.thread,
        )
        threads = [thread for thread in started if thread is not None]
        _join(threads)  # usually the verdict or the outcome has woken them
        if any(thread.is_alive() for thread in threads):
            interrupt_connections(self._store)
            _join(threads)

    def _acknowledge(self, store: Any, failure: FailureNotice) -> None:
        """Record that this agent has received a failure notice and is alive."""
        if failure.fatal:
            self.agreement.interrupt()
        (self.agreement if failure.asks else self.settlement).acknowledge(store)

    def _report_dead_agent(self, group_rank: int, node: str) -> None:
        """Broadcast that another agent died."""
        self.broadcast.mark_lost(group_rank)
        asks = self._can_continue_without_node
        self.broadcast.send(
            FailureNotice(DIED_SILENTLY, node, group_rank, fatal=not asks, asks=asks)
        )

    def _take_from_roster(self, group_rank: int) -> None:
        """Accept a failure that is in the roster but wasn't broadcast:
        the store's host may be frozen or gone.
        """
        what = "from its roster entry; it sent no failure notice"
        self.broadcast.accept(FailureNotice(what, f"node {group_rank}", group_rank))


def _join(threads: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + time_limits.STORE_THREADS_JOIN_TIMEOUT_SECONDS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
