"""An agent's part in the election on a stall: the product's election with a simulated store."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Protocol

from firstfault_torch import time_limits
from firstfault_torch.protocol.election import Election
from firstfault_torch.protocol.limits import build_limits
from firstfault_torch.protocol.messages import (
    Adopt,
    Answered,
    AskStore,
    Concluded,
    Event,
    GiveUp,
    Instruction,
    Interrupted,
    KeySet,
    Lead,
    Publish,
    Published,
    SetOnce,
    Started,
    TimePassed,
    Unanswered,
    WaitingConnectionBroke,
    WatchKeys,
)
from firstfault_torch.protocol.stall_messages import StallReport
from firstfault_torch.protocol.stalls import get_stall_topic
from lab.simulated_jobs.events import Events
from lab.simulated_jobs.store import Connection

_NOBODY = b"-"
"""The verdict of an election that was closed without one."""


class Participant(Protocol):
    """What an election needs of the agent that takes part."""

    rank: int
    nodes: int
    events: Events
    draw: random.Random

    def do(self, action: Callable[[], None]) -> None:
        """Do something in the agent's process."""

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something in the agent's process after a time."""

    def connect(self) -> Connection:
        """Return a new connection to the store."""

    def lead(self, frames: Sequence[bytes]) -> StallReport:
        """Return the report for all nodes."""


class StallElection:
    """One agent's part in one election. `end` gets the report that counts, or None."""

    def __init__(
        self,
        agent: Participant,
        number: int,
        connections: tuple[Connection, Connection],
        end: Callable[..., None],
    ) -> None:
        self.connection, self._waiting = connections
        self._agent = agent
        self._end = end
        self._election = Election(
            agent.rank, agent.nodes, build_limits(agent.nodes), get_stall_topic(number)
        )
        self._is_closed = False
        self._deadline_number = 0
        self._leading: Lead | None = None
        self._own_report = b""

    def start(self, report: bytes, seconds: float) -> None:
        """Hand in this node's observations."""
        self._feed(Started(report, seconds))

    def interrupt(self) -> None:
        """The round has ended."""
        self._feed(Interrupted())

    def close(self, answer: Callable[[StallReport | None], None]) -> None:
        """Let no agent wait for a report any more; `answer` gets one that was just published."""
        self._is_closed = True
        key, nobody = self._election.key, b'{"leaders": [], "complete": false}'
        request = AskStore(
            -1, (SetOnce(key("order"), nobody), SetOnce(key("verdict"), _NOBODY)), ""
        )

        def end(event: Event) -> None:
            answer(_parse_report(event.values[-1] if isinstance(event, Answered) else _NOBODY))

        self._ask(request, end)

    def _feed(self, event: Event) -> None:
        if self._is_closed:
            return
        agent, election = self._agent, self._election
        before = election.phase
        instructions = election.handle(event, agent.events.now)
        agent.events.log(
            f"agent {agent.rank} election {before.value} -> {election.phase.value}:"
            f" {type(event).__name__}"
        )
        for instruction in instructions:
            self._carry_out(instruction)
        self._deadline_number += 1
        number, deadline = self._deadline_number, election.deadline
        if deadline is not None:
            agent.events.at(deadline, lambda: agent.do(lambda: self._pass_time(number)))

    def _pass_time(self, number: int) -> None:
        if number == self._deadline_number:
            self._feed(TimePassed())

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case AskStore():
                self._ask(instruction, self._feed)
            case WatchKeys(names):
                self._watch(names)
            case Lead():
                self._leading = instruction
                self._agent.after(0.0, lambda: self._feed(Concluded()))
            case Publish(is_allowed):
                if is_allowed:
                    self._agent.after(self._agent.draw.uniform(0.05, 1), self._publish)
            case Adopt(verdict):
                self._end(_parse_report(verdict), is_mine=verdict == self._own_report)
            case GiveUp():
                self._end(None, is_mine=False)

    def _publish(self) -> None:
        assert self._leading is not None
        report = self._agent.lead(self._leading.reports.splitlines())
        self._own_report = json.dumps(asdict(report)).encode()
        self._feed(Published(self._own_report))

    def _ask(self, request: AskStore, end: Callable[[Event], None]) -> None:
        """Carry out a request within its time, once more on a new connection if one broke."""
        is_over = False

        def finish(event: Answered | Unanswered) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                end(event)

        def begin(*, may_repeat: bool) -> None:
            values: list[bytes] = []
            connection = self.connection

            def step(value: bytes | None) -> None:
                if is_over:
                    return
                if value is not None:
                    values.append(value)
                    ask_next()
                elif may_repeat:
                    self.connection = self._agent.connect()
                    begin(may_repeat=False)
                else:
                    finish(Unanswered(request.request))

            def ask_next() -> None:
                if len(values) == len(request.operations):
                    finish(Answered(request.request, tuple(values)))
                    return
                operation = request.operations[len(values)]
                connection.ask(operation, lambda value: self._agent.do(lambda: step(value)))

            ask_next()

        begin(may_repeat=request.request >= 0)
        seconds = time_limits.ELECTION_STEP_TIMEOUT_SECONDS
        seconds += time_limits.ELECTION_STEP_TIMEOUT_SECONDS_PER_NODE * self._agent.nodes
        self._agent.after(seconds, lambda: finish(Unanswered(request.request)))

    def _watch(self, names: Sequence[str]) -> None:
        if not names:
            return
        name, *rest = names

        def take(value: bytes | None) -> None:
            if value is None:
                self._feed(WaitingConnectionBroke())
                return
            self._feed(KeySet(name, value))
            self._watch(rest)

        key = self._election.key(name)
        self._waiting.wait(key, lambda value: self._agent.do(lambda: take(value)))


def _parse_report(document: bytes) -> StallReport | None:
    """Return the report that counts; None if the election was closed without one."""
    if document == _NOBODY:
        return None
    fields = json.loads(document)
    return StallReport(
        tuple(fields["lines"]),
        tuple(fields["ranks"]),
        position=fields["position"],
        workers_to_kill=tuple(map(tuple, fields["workers_to_kill"])),
        is_shown=fields["is_shown"],
    )
