"""A simulated TCPStore: a dictionary in the host's process, with connections that can fail.

A connection carries one operation after the other, as torch's client does. The host may be dead
(connections are reset), gone with its machine (silence), or frozen (answers come late). A reset
connection fails what is under way; whether the operation was carried out is left to chance.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from firstfault_torch.protocol.messages import Append, Operation, Read, SetOnce, Swap
from lab.simulated_jobs.events import Events


@dataclass(frozen=True, slots=True)
class Increment:
    """Add 1 to a key; the answer is the sum."""

    key: str


Answer = Callable[[bytes | None], None]
"""Takes a value; None: the connection broke."""

_LATENCY_S = 0.002


@dataclass
class Link:
    """The way from one agent to the store's host."""

    is_local: bool
    slow_until: float = 0.0
    slow_by: float = 0.0


@dataclass
class Server:
    """The store in its host's process."""

    events: Events
    random: random.Random
    values: dict[str, bytes] = field(default_factory=dict)
    waiting: dict[str, list[Callable[[bytes], None]]] = field(default_factory=dict)
    is_dead: bool = False
    is_silent: bool = False
    frozen_until: float = 0.0

    def serve(self, operation: Operation | Increment, reply: Callable[[bytes], None]) -> None:
        """Carry out an operation when it arrives; a dead host never does."""
        if self.is_dead or self.is_silent:
            return
        if self.frozen_until > self.events.now:
            self.events.at(self.frozen_until, lambda: self.serve(operation, reply))
            return
        value = self._apply(operation)
        self.events.log(f"    store {operation} -> {value[:60]!r}")
        reply(value)
        key = operation.key
        for wake in self.waiting.pop(key, []) if self.values.get(key) else []:
            wake(self.values[key])

    def _apply(self, operation: Operation | Increment) -> bytes:
        values, key = self.values, operation.key
        match operation:
            case Read():
                return values.get(key, b"")
            case Increment():
                values[key] = b"%d" % (int(values.get(key, b"0")) + 1)
                return values[key]
            case Append(_, value):
                values[key] = values.get(key, b"") + value
                return b""
            case SetOnce(_, value):
                return values.setdefault(key, value)
            case Swap(_, before, value):
                if values.get(key, b"") == before:
                    values[key] = value
                return values.get(key, before)

    def wait(self, key: str, wake: Callable[[bytes], None]) -> None:
        """Call `wake` with the key's value once it is set."""
        if self.values.get(key) and not (self.is_dead or self.is_silent):
            wake(self.values[key])
        else:
            self.waiting.setdefault(key, []).append(wake)


class Connection:
    """One connection of an agent to the store."""

    def __init__(self, events: Events, server: Server, link: Link, draw: random.Random) -> None:
        self._events = events
        self._server = server
        self._link = link
        self._draw = draw
        self.is_broken = server.is_dead
        self.is_silent = False
        self._pending: list[Answer] = []

    def ask(self, operation: Operation | Increment, answer: Answer) -> None:
        """Send an operation; `answer` gets its value, None if the connection breaks, or nothing."""
        if self.is_broken:
            self._events.after(0.0, lambda: answer(None))
            return
        self._pending.append(answer)
        self._send(lambda: self._server.serve(operation, lambda value: self._reply(value, answer)))

    def wait(self, key: str, answer: Answer) -> None:
        """Wait for a key."""
        if self.is_broken:
            self._events.after(0.0, lambda: answer(None))
            return
        self._pending.append(answer)
        self._send(lambda: self._server.wait(key, lambda value: self._reply(value, answer)))

    def reset(self) -> None:
        """Break: everything under way fails."""
        self.is_broken = True
        pending, self._pending = self._pending, []
        for answer in pending:
            self._events.after(0.001, lambda answer=answer: answer(None))  # type: ignore[misc]

    def _send(self, arrive: Callable[[], None]) -> None:
        if not self.is_silent:
            self._events.after(self._latency(), arrive)

    def _reply(self, value: bytes, answer: Answer) -> None:
        def arrive() -> None:
            if answer in self._pending and not self.is_silent:
                self._pending.remove(answer)
                answer(value)

        self._events.after(self._latency(), arrive)

    def _latency(self) -> float:
        link = self._link
        if link.is_local:
            return 0.0
        slow = link.slow_by * self._draw.random() if self._events.now < link.slow_until else 0.0
        return 0.0005 + self._draw.expovariate(1 / _LATENCY_S) + slow
