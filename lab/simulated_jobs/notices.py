"""The notices of a simulated agent: the product's machine, and around it a driver."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from firstfault_torch import time_limits
from firstfault_torch.protocol.messages import Answered, AskStore, Read, TimePassed, Unanswered
from firstfault_torch.protocol.notices import (
    FATAL_KEY,
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
    NodeFailed,
    NoticeEvent,
    NoticeFound,
    NoticeInstruction,
    OutcomeOverdue,
    OutcomeSet,
    PassOn,
    PeerLost,
    PollFatalFailure,
    RestartRefused,
    RoundLeft,
    RoundNotices,
    RoundOutcome,
)
from lab.simulated_jobs.process import Process, Values
from lab.simulated_jobs.store import Connection

_STORE_S = float(time_limits.STORE_TIMEOUT_SECONDS)
_LOCAL_S = 0.001
"""For a host that answers at once, or refuses."""


def build_notice(group_rank: int, what: str, *, asks: bool = False) -> FailureNotice:
    """Return a node's failure, which is fatal unless the agents vote on a restart."""
    return FailureNotice(what, f"worker-{group_rank}", group_rank, fatal=not asks, asks=asks)


class Broadcast:
    """Carries out what the machine decides, on two connections, as `rounds/failure_broadcast`."""

    def __init__(
        self, process: Process, machine: RoundNotices, on_change: Callable[[], None]
    ) -> None:
        self.machine = machine
        self.using: Connection = process.connect()
        self.waiting: Connection = process.connect()
        self._process = process
        self._on_change = on_change
        self._waiters: list[Callable[[], None]] = []
        """Who waits until the outcome is known."""
        self._deadline_number = 0

    @property
    def outcome(self) -> RoundOutcome | None:
        """How the round ended, or None if not yet known."""
        return self.machine.outcome

    @property
    def is_fatal(self) -> bool:
        """Whether a node, perhaps this one, has failed and can't restart."""
        return self.machine.is_fatal

    # --- what happens -------------------------------------------------------------------------

    def start(self) -> None:
        """Wait for the outcome."""
        self._listen(ListeningBegan())

    def send(self, notice: FailureNotice, then: Callable[[], None] = lambda: None) -> None:
        """Broadcast a failure; go on once the store has answered, or its time is over."""
        instructions = self._handle(NodeFailed(notice))
        if not instructions:
            then()
        for instruction in instructions:
            self._carry_out(instruction, then)

    def mark_lost(self, group_rank: int) -> None:
        """Record that the connection to an agent broke."""
        self._feed(PeerLost(group_rank))

    def mark_leaving(self) -> None:
        """Record that this process has to end."""
        self._feed(LeavingBegan())

    def announce_grace(self, seconds: float) -> None:
        """Let the workers of all nodes have this time to end."""
        self._feed(GraceBegan(seconds))

    def accept(self, notice: FailureNotice) -> None:
        """Accept another node's failure from the roster or a vote."""
        self._feed(NoticeFound(notice))

    def refuse_restart(self, notice: FailureNotice) -> None:
        """The agents have voted against a restart."""
        self._feed(RestartRefused(notice))

    def poll(self) -> None:
        """Read the outcome, as far as the store answers."""
        self._feed(OutcomeOverdue())

    def end(self) -> None:
        """Stop listening: the next round begins."""
        self._feed(RoundLeft())

    def find_fatal_failure(self, answer: Callable[[FailureNotice | None], None]) -> None:
        """Look for another node's fatal failure in the store."""
        machine = self.machine

        def take(values: Values | None) -> None:
            answer(machine.find_fatal_failure(values[0] if values else b""))

        if machine.needs_fatal_failure:
            self._process.ask(self.using, [Read(FATAL_KEY)], _STORE_S, take)
        else:
            take(None)

    def await_outcome(self, then: Callable[[], None]) -> None:
        """Go on once the outcome is known, or the time of the store is over."""
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                then()

        if self.outcome is not None:
            end()
        else:
            self._waiters.append(end)
            self._process.after(_STORE_S, end)

    # --- events and instructions --------------------------------------------------------------

    def _handle(self, event: NoticeEvent) -> list[NoticeInstruction]:
        now, before = self._process.events.now, self.machine.phase
        instructions = self.machine.handle(event, now)
        after = self.machine.phase
        if before is not after:
            name = type(event).__name__
            self._process.note(f"    notices: {before.value} -> {after.value}: {name}")
        self._deadline_number += 1
        number, deadline = self._deadline_number, self.machine.deadline
        if deadline is not None:
            self._at(deadline, lambda: self._pass_time(number))
        return instructions

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._process.events.at(when, lambda: self._process.do(action))

    def _pass_time(self, number: int) -> None:
        if number == self._deadline_number:
            self._listen(TimePassed())

    def _feed(self, event: NoticeEvent) -> None:
        for instruction in self._handle(event):
            self._carry_out(instruction)

    def _carry_out(
        self, instruction: NoticeInstruction, then: Callable[[], None] = lambda: None
    ) -> None:
        process = self._process
        match instruction:
            case AskStore(number, operations):
                connection = self.using
            case AskAgain(number, operations):
                connection = process.connect()
            case PassOn(outcome):
                process.note(f"learns {outcome}")
                waiters, self._waiters = self._waiters, []
                self._on_change()
                for end in waiters:
                    end()
                return
            case _:
                return

        def take(values: Values | None) -> None:
            if isinstance(instruction, AskAgain) and values is not None:
                self.using = connection
            then()
            self._feed(Unanswered(number) if values is None else Answered(number, values))

        process.ask(connection, operations, _STORE_S, take)

    # --- the listener -------------------------------------------------------------------------

    def _listen(self, event: NoticeEvent) -> None:
        for instruction in self._handle(event):
            self._carry_out_listening(instruction)

    def _carry_out_listening(self, instruction: NoticeInstruction) -> None:
        process = self._process
        server = process.machines.server
        seconds = _STORE_S if server.is_silent else _LOCAL_S
        match instruction:
            case Connect() if server.is_dead or server.is_silent:
                process.after(seconds, lambda: self._listen(ConnectionBroke("no server listens")))
            case Connect():
                self.using, self.waiting = process.connect(), process.connect()
                self._listen(Connected())
            case AwaitOutcome():
                answer = partial(self._take, OutcomeSet)
                self.waiting.wait(OUTCOME_KEY, lambda value: process.do(lambda: answer(value)))
            case CheckHost():
                is_listening = not (server.is_dead or server.is_silent)
                process.after(seconds, lambda: self._listen(HostChecked(is_listening)))
            case PollFatalFailure():
                answer = partial(self._take, FatalFailurePolled)
                self.using.ask(Read(FATAL_KEY), lambda value: process.do(lambda: answer(value)))
            case _:
                self._carry_out(instruction)

    def _take(self, event: Callable[[bytes], NoticeEvent], value: bytes | None) -> None:
        broke = ConnectionBroke("the connection was reset")
        self._listen(broke if value is None else event(value))
