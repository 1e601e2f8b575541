"""The exit barrier: an agent whose workers have succeeded waits for all other nodes."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from firstfault.model import Phase
from firstfault_torch import time_limits
from firstfault_torch.compat.torch_agent import BARRIER_LAST, BARRIER_MEMBERS
from firstfault_torch.guard import BackgroundCall, call_with_timeout, logger, try_call
from firstfault_torch.node_context import NodeContext
from firstfault_torch.protocol.exit_barrier import (
    NAMES_KEY,
    AcksAwaited,
    AgentsCounted,
    AllFinished,
    AnnounceFinished,
    Arrived,
    AskFatalFailure,
    AwaitAcks,
    BarrierCounter,
    BarrierEvent,
    BarrierInstruction,
    BarrierPhase,
    CheckNames,
    CloseRendezvous,
    CountAgents,
    Counted,
    CountIn,
    ExitBarrier,
    Fail,
    FailWithoutStore,
    FatalFailureRead,
    MarkComplete,
    MarkFinished,
    NamesRead,
    OutcomeUnknown,
    PollBarrier,
    Polled,
    ReadOutcome,
    ReadRoster,
    RefuseRestart,
    RendezvousClosed,
    ReportForeignAgents,
    ReportWaiting,
    RosterRead,
    RoundFailed,
    StoreLost,
    Succeed,
    build_barrier_limits,
)
from firstfault_torch.protocol.messages import TimePassed
from firstfault_torch.rounds.election import count_joined
from firstfault_torch.rounds.failure_broadcast import FailureBroadcast, FailureNotice
from firstfault_torch.rounds.round_store import connect_to_store

FINISH_ACKS_KEY, ALL_ACKED_KEY = "firstfault/know", "firstfault/all-know"
"""Counter of the agents that know that all workers have succeeded; key that the last of them sets.
"""
_KEYS = {
    BarrierCounter.ENTERED: (BARRIER_MEMBERS, BARRIER_LAST),
    BarrierCounter.FINISHED: (FINISH_ACKS_KEY, ALL_ACKED_KEY),
}


class PeersAtExit:
    """Carries out what `ExitBarrier` decides, with torch's store, the agents' store and the roster.

    The calling thread waits in Python, so signals and `wake` reach it.
    """

    def __init__(
        self,
        group: WorkerGroup,
        node_context: NodeContext,
        store: Any,
        broadcast: FailureBroadcast,
    ) -> None:
        self._group = group
        self._node_context = node_context
        self._agents_store = store
        self._broadcast = broadcast
        self._is_complete = BackgroundCall(self._look, default=False)
        self._connection: Any = None
        """To the agents' store; see `_connect`."""
        self._mark_finished: Callable[[], None] = lambda: None

    def await_all(
        self, wake: threading.Event, mark_finished: Callable[[], None] = lambda: None
    ) -> FailureNotice | None:
        """Wait until the workers of all nodes have succeeded;
        return the failure if a node has failed.

        Unlike torch's barrier, it reacts to signals and failures and has no timeout: a pod that
        exits early makes Kubeflow count the job as a success. Nodes without firstfault broadcast no
        failures; with them torch's timeout applies. `mark_finished` is called once all nodes are
        known to have succeeded, before the other agents know it.

        Raises:
            RendezvousConnectionError: the store's host is gone before all nodes have finished.
        """
        self._mark_finished = mark_finished
        own, nodes = self._group.group_rank or 0, self._group.group_world_size or 1
        barrier = ExitBarrier(own, nodes, build_barrier_limits())
        events: deque[BarrierEvent] = deque([Arrived()])
        last: BarrierInstruction | None = None
        while barrier.phase is not BarrierPhase.ENDED:
            event = events.popleft() if events else self._await_event(barrier, wake)
            for last in barrier.handle(event, time.monotonic()):
                answer = self._carry_out(last)
                events.extend(() if answer is None else (answer,))
        return _conclude(last)

    def _await_event(self, barrier: ExitBarrier, wake: threading.Event) -> BarrierEvent:
        """Return the round's outcome once it is known, or that the barrier's deadline has come."""
        deadline = barrier.deadline or 0.0
        while True:
            wake.clear()
            outcome = self._find_outcome()
            if outcome is not None:
                return outcome
            left = deadline - time.monotonic()
            if left <= 0:
                return TimePassed()
            wake.wait(left)

    def _find_outcome(self) -> BarrierEvent | None:
        outcome = self._broadcast.outcome
        if outcome is None:
            return None
        if outcome.finished:
            return AllFinished()
        if outcome.lost:
            return StoreLost(outcome.lost)
        failure = self._broadcast.failure or outcome.failure
        return RoundFailed(failure or FailureNotice("the round ended without a reason", ""))

    def _carry_out(  # noqa: C901, PLR0912 - one case for each instruction
        self, instruction: BarrierInstruction
    ) -> BarrierEvent | None:
        broadcast, seconds = self._broadcast, time_limits.STORE_TIMEOUT_SECONDS
        match instruction:
            case CountIn(counter):
                return self._count_in(counter)
            case MarkComplete(counter):
                mark = partial(self._store.set, _KEYS[counter][1], "<val_ignored>")
                call_with_timeout(partial(try_call, mark, dist.DistError), seconds, counter.value)
            case PollBarrier():
                return Polled(self._is_complete())
            case CheckNames(adds_own):
                doing = "looking which nodes wait at the exit barrier"
                names = call_with_timeout(partial(self._read_names, adds_own), seconds, doing)
                return NamesRead(names)
            case CountAgents():
                doing = "asking which nodes have firstfault"
                return AgentsCounted(call_with_timeout(self._count_agents, seconds, doing))
            case ReadOutcome():
                call_with_timeout(broadcast.poll, seconds, "looking for the round's outcome")
                return self._find_outcome()
            case AnnounceFinished():
                broadcast.send_finished()
                call_with_timeout(broadcast.poll, seconds, "looking for the round's outcome")
                return self._find_outcome() or OutcomeUnknown()
            case MarkFinished():
                self._mark_finished()
            case AwaitAcks(limit):
                self._await_acks(limit)
                return AcksAwaited()
            case ReadRoster():
                return RosterRead(self._have_all_succeeded())
            case AskFatalFailure():
                return FatalFailureRead(broadcast.find_fatal_failure())
            case RefuseRestart(notice):
                broadcast.send(replace(cast("FailureNotice", notice), fatal=True, asks=False))
            case CloseRendezvous():
                close = self._group.spec.rdzv_handler.set_closed
                most = time_limits.RENDEZVOUS_CLOSE_TIMEOUT_SECONDS
                call_with_timeout(close, most, "closing the rendezvous")
                return RendezvousClosed()
            case ReportWaiting():
                logger.info("this node's workers have finished; waiting for the remaining nodes")
            case ReportForeignAgents():
                logger.warning(
                    "some nodes run without firstfault and may have failed; not waiting for them"
                )
        return None

    # --- torch's store ----------------------------------------------------------------------------

    @property
    def _store(self) -> Any:
        return self._group.store

    def _look(self) -> bool:
        try:
            return bool(self._store.check([BARRIER_LAST]))
        except (dist.DistNetworkError, dist.DistStoreError):
            return False  # the broadcast reports the lost store

    def _count_in(self, counter: BarrierCounter) -> Counted:
        add = partial(self._store.add, _KEYS[counter][0], 1)
        if counter is BarrierCounter.ENTERED:
            return Counted(call_with_timeout(add, time_limits.STORE_TIMEOUT_SECONDS, counter.value))
        # An error is no surprise here: the host may have got all acknowledgments, and be gone.
        seconds = time_limits.FINISH_ACKS_TIMEOUT_SECONDS
        found = call_with_timeout(partial(try_call, add, dist.DistError), seconds, counter.value)
        return Counted(found[0] if found is not None else None)

    def _await_acks(self, seconds: float) -> None:
        # not a loop of `store.check`: torch prints an error if the host is gone
        wait = partial(self._store.wait, [ALL_ACKED_KEY], dt.timedelta(seconds=seconds))
        call_with_timeout(
            partial(try_call, wait, dist.DistError), seconds, BarrierCounter.FINISHED.value
        )

    # --- the agents' store ------------------------------------------------------------------------

    def _connect(self) -> Any:
        """Return a connection that was opened at the exit: an idle one may have been forgotten by a
        firewall while the workers ran.
        """
        if self._connection is None:
            self._connection = connect_to_store(self._agents_store)
        return self._connection

    def _ask_agents_store(self, ask: Callable[[Any], Any]) -> Any:
        found, error = try_call(partial(ask, self._connect()), dist.DistError)
        if error is None:
            return found
        self._connection = None
        return ask(self._connect())

    def _read_names(self, adds_own: bool) -> bytes:
        def read(store: Any) -> bytes:
            if adds_own:
                store.append(NAMES_KEY, f"{self._group.group_rank or 0} ")
            return bytes(store.get(NAMES_KEY))

        return cast("bytes", self._ask_agents_store(read))

    def _count_agents(self) -> int:
        return cast("int", self._ask_agents_store(count_joined))

    # --- the roster -------------------------------------------------------------------------------

    def _have_all_succeeded(self) -> bool | None:
        """Whether all nodes had finished; None if they share no folder."""
        if not self._node_context.identity.is_folder_shared:
            return None
        from firstfault.attempt_reader import (  # noqa: PLC0415 - slows down the start
            AttemptReader,
        )

        roster = AttemptReader(self._node_context.output_prefix).job().roster
        done = {entry.place.group_rank for entry in roster if entry.phase is Phase.SUCCEEDED}
        return len(done) >= (self._group.group_world_size or 1)


def _conclude(last: BarrierInstruction | None) -> FailureNotice | None:
    match last:
        case FailWithoutStore(why):
            raise RendezvousConnectionError(
                f"the node that hosts the store is gone, and not all nodes have finished: {why}"
            )
        case Succeed(unknown) if unknown:
            logger.info(
                "lost the store, so it's unknown whether the remaining nodes finished: %s", unknown
            )
        case Fail(notice):
            failure = cast("FailureNotice", notice)
            logger.warning(
                "this node's workers succeeded, but %s (first report, not the verdict)",
                failure.reason,
            )
            return failure
        case _:
            pass
    return None
