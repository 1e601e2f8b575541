"""The exit barrier: an agent whose workers have succeeded waits for all other nodes."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from firstfault.errors import StoreError
from firstfault.model import Phase
from firstfault_torch import time_limits
from firstfault_torch.compat.torch_agent import BARRIER_COMPLETE_KEY, BARRIER_MEMBERS_KEY
from firstfault_torch.guard import BackgroundCall, call_with_timeout, logger, try_call
from firstfault_torch.node_context import NodeContext
from firstfault_torch.protocol.exit_barrier import (
    NAMES_KEY,
    AcksAwaited,
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
    Counted,
    CountFirstfaultNodes,
    CountIn,
    ExitBarrier,
    Fail,
    FailWithoutStore,
    FatalFailureRead,
    FirstfaultNodesCounted,
    IgnoreSignals,
    MarkComplete,
    NamesRead,
    OutcomeUnknown,
    PollBarrier,
    Polled,
    ReadOutcome,
    ReadRoster,
    RefuseRestart,
    RendezvousClosed,
    ReportForeignAgents,
    ReportRosterUnread,
    ReportWaiting,
    RosterRead,
    RosterUnanswered,
    RoundFailed,
    StoreLost,
    Succeed,
    build_barrier_limits,
)
from firstfault_torch.protocol.messages import TimePassed
from firstfault_torch.protocol.notices import (
    FATAL_KEY,
    FINISHED,
    OUTCOME_KEY,
    FailureNotice,
    parse_notice,
)
from firstfault_torch.rounds.election import count_joined
from firstfault_torch.rounds.failure_broadcast import FailureBroadcast
from firstfault_torch.rounds.round_store import connect_to_store, set_once

_T = TypeVar("_T")
FINISH_ACKS_KEY, ALL_ACKED_KEY = "firstfault/know", "firstfault/all-know"
"""Counter of the agents that know that all workers have succeeded; key that the last of them sets.
"""
_KEYS = {
    BarrierCounter.ENTERED: (BARRIER_MEMBERS_KEY, BARRIER_COMPLETE_KEY),
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
        """To the agents' store; see `_ask_agents`."""
        self._numbers: deque[int] = deque()
        """Answers of torch's barrier, also late ones."""
        self._passed_on: BarrierEvent | None = None
        """The outcome that the barrier knows."""
        self._mark_finished: Callable[[], None] = lambda: None
        self._wake: Callable[[], None] = lambda: None

    def await_all(
        self, wake: threading.Event, mark_finished: Callable[[], None] = lambda: None
    ) -> FailureNotice | None:
        """Wait until the workers of all nodes have succeeded;
        return the failure if a node has failed.

        Unlike torch's barrier, it reacts to signals and failures and has no timeout: a pod that
        exits early makes Kubeflow count the job as a success. Nodes without firstfault broadcast no
        failures; with them torch's timeout applies, as with a store that doesn't answer.
        `mark_finished` is called once all nodes are known to have succeeded, before the other
        agents know it.

        Raises:
            RendezvousConnectionError: the store's host is gone before all nodes have finished.
        """
        self._mark_finished, self._wake = mark_finished, wake.set
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
        """Return the round's outcome once it is known, a late answer, or that the barrier's
        deadline has come.
        """
        deadline = barrier.deadline or 0.0
        while True:
            wake.clear()
            outcome = self._find_outcome()
            if outcome is not None and outcome != self._passed_on:
                self._passed_on = outcome
                return outcome
            if self._numbers:
                return Counted(self._numbers.popleft())
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
        if outcome.failure is not None:
            return RoundFailed(outcome.failure)
        return StoreLost(outcome.lost)

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
                return NamesRead(self._ask_agents(partial(self._read_names, adds_own), doing))
            case CountFirstfaultNodes():
                doing = "asking which nodes have firstfault"
                return FirstfaultNodesCounted(self._ask_agents(count_joined, doing))
            case ReadOutcome():
                doing = "looking for the round's outcome"
                call_with_timeout(broadcast.poll, seconds, doing)
                if broadcast.outcome is not None:
                    return self._find_outcome()
                found = self._ask_agents(_read_outcome, doing)
                return self._parse_outcome(found) if found else None
            case AnnounceFinished():
                return self._announce_finished()
            case IgnoreSignals():
                self._mark_finished()
            case AwaitAcks(limit):
                self._await_acks(limit)
                return AcksAwaited()
            case ReadRoster():
                doing, limit = "reading the roster", time_limits.EXIT_ROSTER_TIMEOUT_SECONDS
                read = partial(try_call, self._read_roster, StoreError)
                roster, _ = call_with_timeout(read, limit, doing) or (None, None)
                return roster or RosterUnanswered()
            case AskFatalFailure():
                return FatalFailureRead(broadcast.find_fatal_failure())
            case RefuseRestart(notice):
                broadcast.send(replace(notice, fatal=True, asks=False))
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
            case ReportRosterUnread():
                logger.warning(
                    "can't find out whether all nodes have finished: the store is lost, and the "
                    "storage doesn't answer; ending with success, as torch does"
                )
        return None

    # --- torch's store ----------------------------------------------------------------------------

    @property
    def _store(self) -> Any:
        return self._group.store

    def _look(self) -> bool:
        try:
            return bool(self._store.check([BARRIER_COMPLETE_KEY]))
        except (dist.DistNetworkError, dist.DistStoreError):
            return False  # the broadcast reports the lost store

    def _count_in(self, counter: BarrierCounter) -> Counted:
        key = _KEYS[counter][0]
        if counter is BarrierCounter.ENTERED:

            def enter() -> None:
                self._numbers.append(self._store.add(key, 1))
                self._wake()

            call_with_timeout(enter, time_limits.STORE_TIMEOUT_SECONDS, counter.value)
            return Counted(self._numbers.popleft() if self._numbers else None)
        # An error is no surprise here: the host may have got all acknowledgments, and be gone.
        add = partial(try_call, partial(self._store.add, key, 1), dist.DistError)
        found = call_with_timeout(add, time_limits.FINISH_ACKS_TIMEOUT_SECONDS, counter.value)
        return Counted(found[0] if found is not None else None)

    def _await_acks(self, seconds: float) -> None:
        # not a loop of `store.check`: torch prints an error if the host is gone
        wait = partial(self._store.wait, [ALL_ACKED_KEY], dt.timedelta(seconds=seconds))
        call_with_timeout(
            partial(try_call, wait, dist.DistError), seconds, BarrierCounter.FINISHED.value
        )

    # --- the agents' store ------------------------------------------------------------------------

    def _ask_agents(self, ask: Callable[[Any], _T], doing: str) -> _T | None:
        """Return what `ask` returns for a connection that was opened at the exit, or None after a
        while. A firewall may have forgotten those that were idle while the workers ran.
        """

        def ask_once_more() -> _T:
            found, error = try_call(partial(self._ask_connected, ask), dist.DistError)
            if error is None:
                return cast("_T", found)
            self._connection = None
            return self._ask_connected(ask)

        found = call_with_timeout(ask_once_more, time_limits.STORE_TIMEOUT_SECONDS, doing)
        if found is None:
            self._connection = None
        return found

    def _ask_connected(self, ask: Callable[[Any], _T]) -> _T:
        if self._connection is None:
            self._connection = connect_to_store(self._agents_store)
        return ask(self._connection)

    def _read_names(self, adds_own: bool, store: Any) -> bytes:
        if adds_own:
            store.append(NAMES_KEY, f"{self._group.group_rank or 0} ")
        return bytes(store.get(NAMES_KEY))

    def _announce_finished(self) -> BarrierEvent:
        announce = partial(set_once, key=OUTCOME_KEY, value=FINISHED)
        found = self._ask_agents(announce, "informing the peer agents")
        if found is None:
            return self._find_outcome() or OutcomeUnknown()
        return self._parse_outcome(found)

    def _parse_outcome(self, text: bytes) -> BarrierEvent:
        failure = parse_notice(text)
        if failure is None:
            return AllFinished()
        self._broadcast.accept(failure)
        return RoundFailed(failure)

    # --- the roster -------------------------------------------------------------------------------

    def _read_roster(self) -> RosterRead:
        if not self._node_context.identity.is_folder_shared:
            return RosterRead(None)
        from firstfault.attempt_reader import (  # noqa: PLC0415 - slows down the start
            AttemptReader,
        )

        roster = AttemptReader(self._node_context.output_prefix).job().roster
        done = {entry.place.group_rank for entry in roster if entry.phase is Phase.SUCCEEDED}
        done.add(self._group.group_rank or 0)
        has_failure = any(entry.phase is Phase.FAILED for entry in roster)
        return RosterRead(len(done) >= (self._group.group_world_size or 1), has_failure)


def _read_outcome(store: Any) -> bytes:
    # An agent that ends stores a fatal failure first, and may not get to the outcome.
    keys = [key for key in (OUTCOME_KEY, FATAL_KEY) if store.check([key])]
    return bytes(store.get(keys[0])) if keys else b""


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
            logger.warning(
                "this node's workers succeeded, but %s (first report, not the verdict)",
                notice.reason,
            )
            return notice
        case _:
            pass
    return None
