"""The failure broadcast of a simulated agent, as `rounds/failure_broadcast` carries it out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from firstfault_torch import time_limits
from firstfault_torch.protocol.messages import Read, SetOnce
from lab.simulated_jobs.process import Process

OUTCOME_KEY = "firstfault/outcome"
FATAL_KEY = "firstfault/fatal"
FINISHED = b'{"finished": true}'


@dataclass(frozen=True)
class SimulatedNotice:
    """A node's failure, as its peers receive it."""

    group_rank: int
    what: str
    fatal: bool = True
    asks: bool = False

    def pack(self) -> bytes:
        """Return it as it is stored."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class Outcome:
    """The end of a round, as an agent learned it."""

    failure: SimulatedNotice | None = None
    finished: bool = False
    lost: bool = False


def parse_outcome(value: bytes) -> Outcome:
    """Return the outcome that the store has."""
    if value == FINISHED:
        return Outcome(finished=True)
    return Outcome(SimulatedNotice(**json.loads(value)))


class Broadcast:
    """Sends an agent's failure, and waits for the round's outcome on two connections."""

    def __init__(self, process: Process, on_change: Callable[[], None]) -> None:
        self.outcome: Outcome | None = None
        self._process = process
        self._on_change = on_change
        self._sent: SimulatedNotice | None = None
        self.using = process.connect()
        self.waiting = process.connect()
        self.resends = False
        """Whether a notice without an answer is sent again on a new connection."""
        self._is_ended = False

    @property
    def is_fatal(self) -> bool:
        """Whether a node, perhaps this one, has failed and can't restart."""
        failure = self.outcome.failure if self.outcome is not None else None
        return failure is not None and failure.fatal

    def start(self) -> None:
        """Wait for the outcome."""
        process = self._process

        def take(value: bytes | None) -> None:
            if self._is_ended or self.outcome is not None:
                return
            if value is not None:
                self.learn(parse_outcome(value))
            elif process.machines.server.is_dead:
                self.learn(Outcome(lost=True))
            else:
                self.using, self.waiting = process.connect(), process.connect()
                process.after(time_limits.LOST_STORE_GRACE_SECONDS, self.start)

        self.waiting.wait(OUTCOME_KEY, lambda value: process.do(lambda: take(value)))

    def learn(self, outcome: Outcome) -> None:
        """Accept an outcome, and poll for a fatal failure after one that may lead to a restart."""
        self.outcome = outcome
        self._process.note(f"learns {outcome}")
        if outcome.failure is not None and not outcome.failure.fatal:
            self._poll_fatal()
        self._on_change()

    def poll(self, done: Callable[[], None]) -> None:
        """Read the outcome, as far as the store answers."""

        def take(values: tuple[bytes, ...] | None) -> None:
            if values is not None and values[0] and self.outcome is None:
                self.learn(parse_outcome(values[0]))
            done()

        limit = float(time_limits.STORE_TIMEOUT_SECONDS)
        self._process.ask(self.using, [Read(OUTCOME_KEY)], limit, take)

    def send(self, notice: SimulatedNotice, then: Callable[[], None] = lambda: None) -> None:
        """Broadcast a failure. Only the first counts, but a fatal one replaces a restart."""
        if self._sent is not None and (self._sent.fatal or not notice.fatal):
            then()
            return
        self._sent = notice
        fatal = [SetOnce(FATAL_KEY, notice.pack())] if notice.fatal else []
        operations = [*fatal, SetOnce(OUTCOME_KEY, notice.pack())]
        limit = float(time_limits.STORE_TIMEOUT_SECONDS)
        process = self._process

        def take(values: tuple[bytes, ...] | None) -> None:
            if values is None and self.resends:
                process.ask(process.connect(), operations, limit, lambda _: then())
            else:
                then()

        process.ask(self.using, operations, limit, take)

    def find_fatal_failure(self, answer: Callable[[SimulatedNotice | None], None]) -> None:
        """Look for another node's fatal failure in the store."""
        failure = self.outcome.failure if self.outcome is not None else None
        own = self._process.rank

        def take(values: tuple[bytes, ...] | None) -> None:
            found = parse_outcome(values[0]).failure if values and values[0] else None
            answer(found if found is not None and found.group_rank != own else None)

        if failure is not None and failure.fatal and failure.group_rank != own:
            answer(failure)
        elif self.outcome is not None and self.outcome.lost:
            answer(None)
        else:
            limit = float(time_limits.STORE_TIMEOUT_SECONDS)
            self._process.ask(self.using, [Read(FATAL_KEY)], limit, take)

    def end(self) -> None:
        """Stop listening: the next round begins."""
        self._is_ended = True

    def _poll_fatal(self) -> None:
        def take(value: bytes | None) -> None:
            if self._is_ended or self.is_fatal:
                return
            if value is None:
                self.outcome = Outcome(lost=True)
                self._on_change()
            elif value:
                self.learn(parse_outcome(value))
            else:
                self._process.after(time_limits.FATAL_FAILURE_POLL_SECONDS, self._poll_fatal)

        if not self._is_ended:
            ask = self.using
            ask.ask(Read(FATAL_KEY), lambda value: self._process.do(lambda: take(value)))
