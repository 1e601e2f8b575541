"""The agents of all other nodes in a round: failure notices, elections, and the exit barrier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from firstfault.model import DIED_SILENTLY
from firstfault.recorder.client import RecorderClient
from firstfault_torch import time_limits
from firstfault_torch.compat.torch_agent import master_address
from firstfault_torch.guard import call_with_timeout, suppress_internal_errors, try_call
from firstfault_torch.node_context import NodeContext
from firstfault_torch.protocol.notices import FailureNotice
from firstfault_torch.protocol.restart_vote import EndRound, FollowDecision, RestartUnagreed
from firstfault_torch.protocol.shutdown import ExitStep, Hurry, get_limit
from firstfault_torch.rounds.election import CollectedReports, LeftElection, VerdictElection
from firstfault_torch.rounds.exit_barrier import PeersAtExit
from firstfault_torch.rounds.failure_broadcast import FailureBroadcast
from firstfault_torch.rounds.peer_connections import PeerConnections
from firstfault_torch.rounds.report_packing import ElectedVerdict
from firstfault_torch.rounds.restart_vote import PeersVote
from firstfault_torch.rounds.roster_poller import RosterPoller
from firstfault_torch.rounds.round_store import (
    connect_to_store,
    interrupt_connections,
    is_hosted_here,
    open_agents_store,
)


class Peers:
    """This node's view of its peers in one round, with the threads that listen to them.

        Peers(...)          after the workers are forked: connecting takes locks that a child would
                            inherit
        join, connect       the node takes part in the round's elections; its connections are open
        notify              this node failed: broadcast it; or a peer's failure arrives, and a
                            thread calls `wake`
        vote_on_restart     the agents decide whether torch restarts the workers
        exit_barrier        this node's workers have succeeded; wait for those of the peers
        settle              the agents elect the leader that concludes
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
        self.restart_vote = PeersVote(own, nodes, shutdown_requested)
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
        self.broadcast = FailureBroadcast(self._store, own, wake, self._take_failure)
        self.exit_barrier = PeersAtExit(group, node_context, self._store, self.broadcast)
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

    def vote_on_restart(
        self,
        copies: Mapping[str, bytes],
        seconds: float,
        judge: Callable[[CollectedReports], bytes],
    ) -> FollowDecision | RestartUnagreed | EndRound:
        """Decide on a restart with the peers; see `PeersVote.hold`."""
        return self.restart_vote.hold(self.broadcast, copies, seconds, judge)

    def may_restart(self) -> bool:
        """Whether no node has failed for good after the vote on a restart."""
        return self.restart_vote.may_restart(self.broadcast)

    def leave(self, copies: Mapping[str, bytes]) -> None:
        """Announce in a vote on a restart, if there is one, that this node's process exits."""
        self.restart_vote.leave(self.broadcast, copies)

    def leave_election(self, copies: Mapping[str, bytes]) -> LeftElection | None:
        """Hand in this node's report, as a process that has to end at once, from any thread.
        Return None if the store doesn't answer.
        """

        def leave() -> LeftElection | None:
            return self.settlement.leave(self.connect(), copies)

        seconds = get_limit(ExitStep.TELL_PEERS, Hurry.LEAVING_NOW)
        return call_with_timeout(leave, seconds, "leaving the verdict to nodes that stay")

    def hand_over(self, verdict: ElectedVerdict, *, leaving_now: bool) -> ElectedVerdict | None:
        """See `VerdictElection.hand_over`. If this process is `leaving_now`, the main thread's
        connection may be blocked: then a new one is used.
        """
        return self.settlement.hand_over(verdict, self.connect if leaving_now else None)

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
            # What is left of the grace counts once, also if a node of the election is leaving.
            left = self.broadcast.grace_left
            yield from self.settlement.settle(
                connections,
                copies,
                seconds + left,
                self._shutdown_requested,
                grace_seconds=max(grace_seconds - left, 0.0),
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
            self.restart_vote.election.thread,
            self.liveness.thread,
        )
        threads = [thread for thread in started if thread is not None]
        _join(threads)  # usually the verdict or the outcome has woken them
        if any(thread.is_alive() for thread in threads):
            interrupt_connections(self._store)
            _join(threads)

    def _take_failure(self, failure: FailureNotice) -> None:
        """A failure of any node has become known: a fatal one makes a vote pointless."""
        if failure.fatal:
            self.restart_vote.interrupt()

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
