"""The agent's main loop goes on while the rendezvous does not answer."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from firstfault_torch.rounds.rendezvous import Rendezvous

AT_ONCE_S = 0.25


class Handler:
    """A rendezvous that answers when it may."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.answered = threading.Semaphore(0)
        self.asked = 0
        self.waiting = 0
        self.error: Exception | None = None

    def num_nodes_waiting(self) -> int:
        """Answer, or raise."""
        self.asked += 1
        number = self.asked, self.waiting
        assert self.may_answer.wait(30)
        self.answered.release()
        if self.error is not None:
            raise self.error
        return number[1]

    def get_run_id(self) -> str:
        """Return another attribute."""
        return "a run"


def test_a_healthy_rendezvous_is_asked_each_time() -> None:
    """Every call has its own answer, and all other attributes are the handler's."""
    handler = Handler()
    rendezvous = Rendezvous(handler)
    for number in range(3):
        handler.waiting = number
        assert rendezvous.num_nodes_waiting() == number
    assert handler.asked == 3
    assert rendezvous.get_run_id() == "a run"


def test_a_frozen_host_blocks_nothing() -> None:
    """Without an answer nobody waits; there is one question at a time, and its late answer counts."""
    handler = Handler()
    handler.may_answer.clear()
    handler.waiting = 2
    rendezvous = Rendezvous(handler)
    assert rendezvous.num_nodes_waiting() == 0
    began = time.monotonic()
    assert [rendezvous.num_nodes_waiting() for _ in range(100)] == [0] * 100
    assert time.monotonic() - began < AT_ONCE_S
    assert handler.asked == 1
    handler.may_answer.set()
    assert handler.answered.acquire(timeout=30)
    deadline = time.monotonic() + 30
    while rendezvous.num_nodes_waiting() != 2:
        assert time.monotonic() < deadline


def test_an_error_reaches_the_agent() -> None:
    """A lost rendezvous fails the agent as torch means it, also if the question ended later."""
    handler = Handler()
    handler.error = RendezvousConnectionError("the connection is lost")
    rendezvous = Rendezvous(handler)
    with pytest.raises(RendezvousConnectionError):
        rendezvous.num_nodes_waiting()
    handler.may_answer.clear()
    assert rendezvous.num_nodes_waiting() == 0
    handler.may_answer.set()
    assert handler.answered.acquire(timeout=30)
    with pytest.raises(RendezvousConnectionError):
        [rendezvous.num_nodes_waiting() for _ in iter(lambda: time.sleep(0.01), 1)]
