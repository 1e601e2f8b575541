"""Notifies the agents of a round that a node failed, or that all nodes have finished."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist

from firstfault_torch import time_limits
from firstfault_torch.guard import (
    call_with_timeout,
    logger,
    start_in_thread,
    start_late,
    suppress_internal_errors,
    try_call,
)
from firstfault_torch.protocol.messages import Answered, AskStore, TimePassed, Unanswered
from firstfault_torch.protocol.notices import (
    FATAL_KEY,
    GRACE_KEY,
    OUTCOME_KEY,
    AskAgain,
    AwaitOutcome,
    CheckHost,
    Connect,
    Connected,
    ConnectionBroke,
    FailureNotice,
    FatalFailurePolled,
    GraceBegan,
    HostChecked,
    LeavingBegan,
    ListeningBegan,
    ListeningEnded,
    NodeFailed,
    NoticeEvent,
    NoticeFound,
    NoticeInstruction,
    NoticePhase,
    OutcomeOverdue,
    OutcomeSet,
    PassOn,
    PeerLost,
    PollFatalFailure,
    RestartRefused,
    RoundLeft,
    RoundNotices,
    RoundOutcome,
    build_notice_limits,
)
from firstfault_torch.rounds.round_store import carry_out, connect_to_store, is_host_listening

MAX_ROUND_DURATION = dt.timedelta(days=30)
"""Longer than any round: every round ends by setting the outcome, and a lost store ends the wait.
"""


class FailureBroadcast:
    """Carries out what `RoundNotices` decides: sends a round's outcome, and waits for it.

    A thread listens, with its own connection to the store, so that its wait doesn't block the
    agent. Other threads send: of the agent, of a signal, and of the connections between agents.
    `on_failure` and `wake` are called when a failure becomes known, or a fatal one after another.
    """

    def __init__(
        self,
        store: Any,
        group_rank: int,
        wake: Callable[[], None],
        on_failure: Callable[[FailureNotice], None] = lambda _failure: None,
    ) -> None:
        self._store = store
        self._on_failure = on_failure
        self._wake = wake
        self._notices = RoundNotices(group_rank, build_notice_limits())
        self._lock = threading.Lock()
        self._is_known = threading.Event()
        self._is_open = threading.Event()
        """Set once both connections are open."""
        self._ended = threading.Event()
        """Set once nothing is listened for any more."""
        self._connection: Any = None
        """Opened in advance: a slow name service must not delay a failure notice."""
        self._waiting: Any = None
        """The listening thread's connection."""
        self.thread = threading.Thread(target=self._listen, name="firstfault-outcome", daemon=True)
        start_late(self.thread)

    # --- what is known ----------------------------------------------------------------------------

    @property
    def outcome(self) -> RoundOutcome | None:
        """How the round ended, or None if not yet known."""
        return self._notices.outcome

    @property
    def failure(self) -> FailureNotice | None:
        """Another node's fatal failure, if any."""
        return self._notices.failure

    @property
    def restart_request(self) -> FailureNotice | None:
        """Another node's failure that the agents must vote on, if any."""
        return self._notices.restart_request

    @property
    def is_fatal(self) -> bool:
        """Whether a node, perhaps this one, failed and can't restart."""
        return self._notices.is_fatal

    @property
    def first_failure(self) -> FailureNotice | None:
        """The failure that ended the round, on this or another node, or None if unknown."""
        return self._notices.first_failure

    @property
    def grace_left(self) -> float:
        """Seconds for which workers of other nodes may still be saving their state after a
        signal to one of them.
        """
        return self._notices.get_grace_left(time.monotonic())

    def has_grace(self) -> bool:
        """Whether a node has announced time for healthy workers, as far as the store answers."""
        doing = "asking whether a node got a signal"
        return bool(self._ask_within_limit(lambda store: store.check([GRACE_KEY]), doing))

    def find_fatal_failure(self) -> FailureNotice | None:
        """Read another node's fatal failure from the store, after the round has ended."""
        doing, needs_store = "asking which node failed", self._notices.needs_fatal_failure
        found = self._ask_within_limit(_read_fatal_failure, doing) if needs_store else None
        return self._notices.find_fatal_failure(found or b"")

    def connections(self, *, to_agree: bool = False) -> tuple[Any, Any] | None:
        """Return two connections to the store after a failure, one to use and one to wait with, or
        None if the store is lost.

        `to_agree`: for a vote on a restart; then None also after a fatal failure.
        """
        deadline = time.monotonic() + time_limits.STORE_TIMEOUT_SECONDS
        if to_agree:
            self._is_known.wait(time_limits.STORE_TIMEOUT_SECONDS)
        else:
            self.thread.join(time_limits.STORE_TIMEOUT_SECONDS)
        if not self._notices.may_elect(on_restart=to_agree):
            return None
        # The answer to this node's notice may have been faster than the listening thread.
        if not self._is_open.wait(max(deadline - time.monotonic(), 0.0)):
            return None
        return self._connection, self._waiting

    # --- what happens -----------------------------------------------------------------------------

    def send(self, failure: FailureNotice) -> None:
        """Broadcast a failure. Only the first counts,
        except that a fatal one replaces a restart.
        """
        self._ask_all(self._handle(NodeFailed(failure)))

    def mark_lost(self, group_rank: int) -> None:
        """Record that the connection to an agent broke; don't wait."""
        self._post(self._handle(PeerLost(group_rank)))

    def mark_leaving(self) -> None:
        """Record that this process has to end; don't wait."""
        self._post(self._handle(LeavingBegan()))

    def announce_grace(self, seconds: float) -> None:
        """Let the peers' healthy workers have `seconds` to end,
        whatever notice they get or have got; don't wait.
        """
        self._post(self._handle(GraceBegan(seconds)))

    def poll(self) -> None:
        """Read the round's outcome here, too: the waiting thread's connection may be silent,
        and never learn of it.
        """
        if self._connection is None:
            return
        for instruction in self._handle(OutcomeOverdue()):
            if isinstance(instruction, AskStore):
                self._post(self._handle(self._carry_out(instruction, self._connection)))

    def accept(self, failure: FailureNotice) -> None:
        """Accept another node's failure from the roster or a vote,
        unless the outcome is already known.
        """
        self._post(self._handle(NoticeFound(failure)))

    def mark_fatal(self, failure: FailureNotice) -> None:
        """Treat a failure as fatal because the agents have voted against a restart."""
        instructions = self._handle(RestartRefused(failure))
        self.thread.join(time_limits.STORE_TIMEOUT_SECONDS)
        self._ask_all(instructions)

    def end(self) -> None:
        """End the listening thread by setting the round's outcome."""
        if not self.thread.is_alive():
            return
        with suppress_internal_errors("ending the wait for the round's outcome"):
            self._ask_all(self._handle(RoundLeft()))
            self.thread.join(time_limits.STORE_TIMEOUT_SECONDS)

    def end_waiting(self) -> None:
        """Let the listening thread end when its connection breaks, instead of connecting again."""
        self._handle(ListeningEnded())

    # --- events and instructions ------------------------------------------------------------------

    def _handle(self, event: NoticeEvent) -> list[NoticeInstruction]:
        with self._lock:
            instructions = self._notices.handle(event, time.monotonic())
        if self._notices.phase is NoticePhase.ENDED:
            self._ended.set()
        return instructions

    def _ask_all(self, instructions: Iterable[NoticeInstruction]) -> None:
        """Carry out instructions, and wait for the store's answers."""
        for instruction in instructions:
            if isinstance(instruction, AskStore):
                self._ask(instruction)
            else:
                self._post([instruction])

    def _post(self, instructions: Iterable[NoticeInstruction]) -> None:
        """Carry out instructions, and don't wait for the store: the workers must not wait."""
        for instruction in instructions:
            if isinstance(instruction, AskStore | AskAgain):
                start_in_thread(partial(self._ask, instruction), instruction.purpose)
            elif isinstance(instruction, PassOn):
                self._pass_on(instruction.outcome)

    def _pass_on(self, outcome: RoundOutcome) -> None:
        self._is_known.set()
        if outcome.failure is not None:
            self._on_failure(outcome.failure)
        self._wake()

    def _ask(self, request: AskStore | AskAgain) -> None:
        """Carry out a request within its limit, and what follows from its answer."""

        def ask() -> Answered | Unanswered:
            is_new = isinstance(request, AskAgain) or self._connection is None
            store = connect_to_store(self._store) if is_new else self._connection
            answer = self._carry_out(request, store)
            if isinstance(request, AskAgain) and isinstance(answer, Answered):
                self._connection = store
            return answer

        call = partial(try_call, ask, dist.DistError)
        seconds = time_limits.STORE_TIMEOUT_SECONDS
        answer, _ = call_with_timeout(call, seconds, request.purpose) or (None, None)
        self._post(self._handle(answer or Unanswered(request.request)))

    def _carry_out(self, request: AskStore | AskAgain, store: Any) -> Answered | Unanswered:
        # errors are ignored here: the listening thread notices a lost store
        values, _ = try_call(partial(carry_out, store, request.operations), dist.DistError)
        return Unanswered(request.request) if values is None else Answered(request.request, values)

    def _ask_within_limit(self, ask: Callable[[Any], Any], doing: str) -> Any:
        """Return what `ask` returns for a connection to the store, or None."""

        def ask_connected() -> Any:
            return ask(self._connection or connect_to_store(self._store))

        call = partial(try_call, ask_connected, dist.DistError)
        seconds = time_limits.STORE_TIMEOUT_SECONDS
        found, _ = call_with_timeout(call, seconds, doing) or (None, None)
        return found

    # --- the listening thread ---------------------------------------------------------------------

    def _listen(self) -> None:
        with suppress_internal_errors("waiting for the round's outcome"):
            events: deque[NoticeEvent] = deque([ListeningBegan()])
            while events:
                for instruction in self._handle(events.popleft()):
                    answer = self._carry_out_listening(instruction)
                    events.extend(() if answer is None else (answer,))
                if not events and self._await_deadline():
                    events.append(TimePassed())

    def _await_deadline(self) -> bool:
        """Wait for the deadline; return whether it has come, rather than the end."""
        deadline = self._notices.deadline
        return deadline is not None and not self._ended.wait(max(deadline - time.monotonic(), 0.0))

    def _carry_out_listening(self, instruction: NoticeInstruction) -> NoticeEvent | None:
        match instruction:
            case Connect():
                return self._try_to_listen(self._connect)
            case AwaitOutcome():
                return self._try_to_listen(self._await_outcome)
            case CheckHost():
                return HostChecked(is_host_listening(self._store))
            case PollFatalFailure():
                return self._try_to_listen(self._poll_fatal_failure)
            case _:
                self._ask_all([instruction])
                return None

    def _try_to_listen(self, call: Callable[[], NoticeEvent]) -> NoticeEvent:
        try:
            return call()
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            logger.info("lost a connection to the store that the agents share: %s", why)
            return ConnectionBroke(why)

    def _connect(self) -> Connected:
        self._connection = connect_to_store(self._store)
        self._waiting = connect_to_store(self._store)
        self._is_open.set()
        return Connected()

    def _poll_fatal_failure(self) -> FatalFailurePolled:
        return FatalFailurePolled(_read_fatal_failure(self._connection))

    def _await_outcome(self) -> OutcomeSet:
        self._waiting.wait([OUTCOME_KEY], MAX_ROUND_DURATION)
        return OutcomeSet(bytes(self._waiting.get(OUTCOME_KEY)))


def _read_fatal_failure(store: Any) -> bytes:
    return bytes(store.get(FATAL_KEY)) if store.check([FATAL_KEY]) else b""
