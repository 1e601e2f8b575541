"""A simulated agent's process: it may die, freeze or end, and with it what it hosts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from firstfault_torch.protocol.messages import Operation
from lab.simulated_jobs.events import Events
from lab.simulated_jobs.store import Connection, Increment, Link, Server

Values = tuple[bytes, ...]


@dataclass
class Machines:
    """What the processes of a job share."""

    events: Events
    server: Server
    nodes: int
    host: int
    """Group rank of the agent that hosts the store; -1: none."""
    processes: list[Process] = field(default_factory=list)
    is_rendezvous_closed: bool = False


class Process:
    """One agent's process, with its connections to the store."""

    def __init__(self, rank: int, machines: Machines, seed: str) -> None:
        self.rank = rank
        self.machines = machines
        self.is_dead = False
        self.is_terminated = False
        self.frozen_until = 0.0
        self.ended_at: float | None = None
        self.events = machines.events
        self.draw = random.Random(f"{seed}/process/{rank}")
        self.link = Link(is_local=rank == machines.host)
        self.connections: list[Connection] = []

    @property
    def is_live(self) -> bool:
        """Whether it runs."""
        return not self.is_dead and self.ended_at is None

    def do(self, action: Callable[[], None]) -> None:
        """Do something in this process: not if it is dead, later if it is frozen."""
        if not self.is_live:
            return
        if self.frozen_until > self.events.now:
            self.events.at(self.frozen_until, lambda: self.do(action))
            return
        action()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something in this process after a time."""
        self.events.after(seconds, lambda: self.do(action))

    def note(self, text: str) -> None:
        """Trace what the process does."""
        self.events.log(f"agent {self.rank} {text}")

    # --- the store ----------------------------------------------------------------------------

    def connect(self) -> Connection:
        """Return a new connection to the store."""
        machines = self.machines
        connection = Connection(self.events, machines.server, self.link, self.draw)
        self.connections.append(connection)
        return connection

    def ask(
        self,
        connection: Connection,
        operations: Sequence[Operation | Increment],
        seconds: float,
        answer: Callable[[Values | None], None],
    ) -> None:
        """Carry out operations in their order; None if the connection breaks or time is over."""
        values: list[bytes] = []
        is_over = False

        def end(result: Values | None) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                answer(result)

        def step(value: bytes | None) -> None:
            if is_over:
                return
            if value is None:
                end(None)
                return
            values.append(value)
            ask_next()

        def ask_next() -> None:
            if len(values) == len(operations):
                end(tuple(values))
                return
            operation = operations[len(values)]
            connection.ask(operation, lambda value: self.do(lambda: step(value)))

        ask_next()
        self.after(seconds, lambda: end(None))

    # --- the end ------------------------------------------------------------------------------

    def end(self) -> None:
        """End normally; a store that it hosts ends with it."""
        self.ended_at = self.events.now
        self.note("has ended")
        if self.rank == self.machines.host:
            self._close_store()

    def kill(self, *, with_machine: bool) -> None:
        """Die at once. If its machine is gone, too, its peers see only silence."""
        self.is_dead = True
        if self.rank != self.machines.host:
            return
        if with_machine:
            self.machines.server.is_silent = True
        else:
            self._close_store()

    def freeze(self, seconds: float) -> None:
        """Do nothing for a time."""
        self.frozen_until = max(self.frozen_until, self.events.now + seconds)
        if self.rank == self.machines.host:
            self.machines.server.frozen_until = self.frozen_until

    def slow_down(self, seconds: float) -> None:
        """Have a slow link for a time."""
        self.link.slow_until = self.events.now + seconds
        self.link.slow_by = 1 + seconds / 3

    def _close_store(self) -> None:
        self.machines.server.is_dead = True
        for process in self.machines.processes:
            for connection in process.connections:
                connection.reset()
