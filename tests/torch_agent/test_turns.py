"""Nodes without a store conclude in turn."""

from __future__ import annotations

import threading
import time
from typing import Any

from firstfault.errors import AccessDeniedError
from firstfault_torch.verdict.seal import await_turn, turn_of

SOON_S = 30.0


def test_the_first_nodes_have_turns_of_their_own() -> None:
    """Node 0 may have hosted the store, so node 1 does not wait for it; the next ones follow at some distance."""
    assert [turn_of(rank) for rank in range(5)] == [0.0, 0.0, 5.0, 7.0, 9.0]


def test_the_others_come_in_growing_groups() -> None:
    """Few nodes read at a time; the last of 1,024 has its turn within half a minute, the last of 10,000 soon after."""
    turns = sorted(turn_of(rank) for rank in range(1024))
    assert [sum(turn < limit for turn in turns) for limit in (10, 11, 14, 17)] == [5, 5, 9, 17]
    assert 30 < turns[-1] < 36
    assert turn_of(9_999) < 48
    assert len({turn_of(700) for _ in range(5)}) == 5


def _find(*answers: Any) -> Any:
    left = list(answers)

    def find() -> Any:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return find


def test_the_verdict_of_another_node_ends_the_wait() -> None:
    """A storage that does not answer once is asked again."""
    verdict = object()
    began = time.monotonic()
    found = await_turn(_find(None, AccessDeniedError("no"), verdict), 60.0, threading.Event())
    assert found is verdict
    assert time.monotonic() - began < SOON_S


def test_the_turn_comes() -> None:
    """Without a verdict the wait ends when the turn comes; a node whose turn it is looks once."""
    began = time.monotonic()
    assert await_turn(_find(None), 0.4, threading.Event()) is None
    assert time.monotonic() - began >= 0.4
    assert await_turn(_find("published"), 0.0, threading.Event()) == "published"


def test_a_process_that_is_told_to_go() -> None:
    """It waits no longer."""
    give_up = threading.Event()
    threading.Timer(0.2, give_up.set).start()
    began = time.monotonic()
    assert await_turn(_find(None), 60.0, give_up) is None
    assert time.monotonic() - began < SOON_S
