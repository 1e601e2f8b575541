"""The simulated store gives the same answers as torch's."""

from __future__ import annotations

import random

import pytest

from firstfault_torch.protocol.messages import Append, Operation, Read, SetOnce, Swap
from firstfault_torch.rounds.round_store import RoundStore, carry_out
from lab.simulated_jobs.events import Events
from lab.simulated_jobs.store import Connection, Link, Server

pytestmark = pytest.mark.slow

KEYS = ("order", "leader", "reports")


def _draw_operations(draw: random.Random) -> list[Operation]:
    operations: list[Operation] = []
    for _ in range(draw.randrange(1, 25)):
        key = draw.choice(KEYS)
        value, before = (draw.choice([b"0", b"1", b"0!", b"7 "]) for _ in range(2))
        kinds: list[Operation] = [
            Read(key),
            Append(key, value),
            SetOnce(key, value),
            Swap(key, draw.choice([b"", before]), value),
        ]
        operations.append(draw.choice(kinds))
    return operations


@pytest.mark.parametrize("store", [True, False], ids=["libuv", "no libuv"], indirect=True)
def test_the_same_operations_have_the_same_answers(store: RoundStore) -> None:
    draw = random.Random(58)
    for number in range(200):
        operations = _draw_operations(draw)
        real = RoundStore(store, 1000 + number)
        assert carry_out(real, operations) == _simulate(operations), operations


def _simulate(operations: list[Operation]) -> tuple[bytes, ...]:
    events = Events()
    connection = Connection(
        events, Server(events, random.Random(0)), Link(is_local=True), random.Random(0)
    )
    values: list[bytes] = []

    def take(value: bytes | None) -> None:
        assert value is not None
        values.append(value)
        if len(values) < len(operations):
            connection.ask(operations[len(values)], take)

    connection.ask(operations[0], take)
    events.play(10.0)
    return tuple(values)
