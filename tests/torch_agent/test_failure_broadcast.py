"""Agents exchange a round's outcome over a real store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import DistNetworkError

from firstfault_torch import time_limits
from firstfault_torch.protocol.notices import FailureNotice
from firstfault_torch.rounds import round_store
from firstfault_torch.rounds.failure_broadcast import FailureBroadcast
from firstfault_torch.rounds.round_store import RoundStore
from tests.torch_agent.stores import hosted
from tests.waiting import wait_until

pytestmark = pytest.mark.forks

SOON_S = 30.0
LONG_S = 60.0
FATAL = FailureNotice("ValueError", "worker-0", group_rank=0, rank=3, document="e1-the-root.pb")
RESTART = replace(FATAL, what="it starts again", fatal=False)


class Node:
    """A node's watch, and whether it was woken."""

    def __init__(self, store: Any, group_rank: int) -> None:
        self.woken = threading.Event()
        self.failures: list[FailureNotice] = []
        self.watch = FailureBroadcast(
            store,
            group_rank,
            self.woken.set,
            self.failures.append,
        )


class Waited:
    """A store that counts the waiting threads, and to which a connection may take long."""

    def __init__(self, store: Any, waits: threading.Semaphore | None = None) -> None:
        self._store = store
        self._waits = waits or threading.Semaphore(0)
        self.connecting_seconds = 0.0

    def clone(self) -> Waited:
        time.sleep(self.connecting_seconds)
        return Waited(self._store.clone(), self._waits)

    def wait(self, *args: Any) -> None:
        self._waits.release()
        self._store.wait(*args)

    def await_waits(self, number: int) -> None:
        for _ in range(number):
            assert self._waits.acquire(timeout=LONG_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "STORE_TIMEOUT_SECONDS", SOON_S)


@pytest.fixture
def node(store: RoundStore) -> Iterator[Callable[..., Node]]:
    """Make nodes; none of their threads outlives the test."""
    made: list[Node] = []

    def begin(group_rank: int, other: Any = store) -> Node:
        made.append(Node(other, group_rank))
        return made[-1]

    yield begin
    for one in made:
        one.watch.end()


@pytest.mark.parametrize("store", [True, False], ids=["libuv", "no libuv"], indirect=True)
@pytest.mark.parametrize("sender", [0, 1])
def test_a_failure_is_sent(sender: int, store: RoundStore, node: Callable[..., Node]) -> None:
    """A fatal failure wakes all nodes, also one that comes late;
    `failure` is None on the node that failed.
    """
    nodes = [node(group_rank) for group_rank in range(3)]
    assert [one.watch.outcome for one in nodes] == [None] * 3
    failure = replace(FATAL, node=f"worker-{sender}", group_rank=sender)
    nodes[sender].watch.send(failure)
    assert all(one.woken.wait(LONG_S) for one in nodes)
    assert [one.watch.failure for one in nodes] == [
        None if one is nodes[sender] else failure for one in nodes
    ]
    assert [one.watch.outcome and one.watch.outcome.failure for one in nodes] == [failure] * 3
    late = node(3)
    assert late.woken.wait(LONG_S)
    assert late.watch.failure == failure
    assert all(one.watch.connections() is not None for one in nodes)
    assert all(one.failures == [failure] for one in nodes), "each calls back once"
    wait_until(lambda: sorted(store.get("firstfault/heard").split()) == [b"0", b"1", b"2", b"3"])


def test_a_slow_connection(store: RoundStore, node: Callable[..., Node]) -> None:
    """Sending a failure opens no new connection, which a slow name service would delay by 5 s."""
    slow = Waited(store)
    sender = node(0, slow)
    listener = node(1, slow)
    slow.await_waits(2)
    slow.connecting_seconds = LONG_S
    sender.watch.send(FATAL)
    assert listener.woken.wait(SOON_S)


def test_a_fatal_failure_after_a_restart(node: Callable[..., Node]) -> None:
    """Each node polls for it, and it is found in the store, too, except by the node that failed."""
    nodes = [node(group_rank) for group_rank in range(3)]
    nodes[0].watch.send(RESTART)
    assert nodes[2].woken.wait(LONG_S)
    assert nodes[2].watch.failure is None
    fatal = replace(FATAL, group_rank=1)
    nodes[1].watch.send(fatal)
    wait_until(lambda: [one.watch.failure for one in nodes] == [fatal, None, fatal])
    assert [one.watch.find_fatal_failure() for one in nodes] == [fatal, None, fatal]
    assert all(one.watch.connections() is not None for one in nodes)


class _Silent:
    """A connection on which no answer comes, as after a firewall has forgotten it."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.ended.wait(LONG_S)


class _Broken:
    """A connection that the other side has reset."""

    ended = threading.Event()

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object) -> None:
            raise DistNetworkError("Connection reset by peer")

        return fail


@pytest.mark.parametrize("kind", [_Silent, _Broken])
def test_a_failure_is_sent_again_on_a_new_connection(
    kind: Callable[[], Any], node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was idle for the whole round; the peers must hear of the failure anyway."""
    monkeypatch.setattr(time_limits, "STORE_TIMEOUT_SECONDS", 0.2)
    sender, listener = node(0), node(1)
    wait_until(lambda: sender.watch._connection is not None)
    connection = kind()
    monkeypatch.setattr(sender.watch, "_connection", connection)
    sender.watch.send(FATAL)
    assert listener.woken.wait(LONG_S)
    assert listener.watch.outcome.failure == FATAL
    connection.ended.set()


@pytest.mark.parametrize("told", [False, True])
def test_a_lost_store(told: bool, node: Callable[..., Node]) -> None:
    """When the node that hosts the store dies,
    the others are woken and know that the store is lost.
    """
    with hosted() as (process, client):
        store = Waited(client)
        nodes = [node(0, store), node(1, store)]
        store.await_waits(2)
        if told:
            nodes[0].watch.send(FATAL)
            assert all(one.woken.wait(LONG_S) for one in nodes)
        process.kill()
        assert all(one.woken.wait(LONG_S) for one in nodes)
        outcome = nodes[1].watch.outcome
        assert (outcome.failure, bool(outcome.lost), outcome.finished) == (
            FATAL if told else None,
            not told,
            False,
        )
        assert nodes[1].watch.failure == (FATAL if told else None)
        process.join()
        assert (nodes[1].watch.connections() is None) is not told
        assert nodes[0].watch.find_fatal_failure() is None


def test_a_host_that_lives(node: Callable[..., Node]) -> None:
    """Connections break although the host lives: the node connects again, and hears of a failure;
    in a vote it looks again for a fatal one.
    """
    with hosted() as (_, client):
        store = Waited(client)
        one, other = node(0, store), node(1, store)
        store.await_waits(2)
        round_store.interrupt_connections(client)
        store.await_waits(2)
        other.watch.send(replace(RESTART, group_rank=1))
        assert one.woken.wait(LONG_S)
        round_store.interrupt_connections(client)
        fatal = replace(FATAL, group_rank=1)
        other.watch.send(fatal)
        wait_until(lambda: one.watch.failure == fatal)


@pytest.mark.parametrize("on_failure", [False, True])
def test_the_end_leaves_no_thread(on_failure: bool, node: Callable[..., Node]) -> None:
    """The end of a round leaves no thread, and no node takes it for a failure."""
    nodes = [node(0), node(1)]
    threads = [one.watch.thread for one in nodes]
    if on_failure:
        nodes[0].watch.send(FATAL)
    for one in nodes:
        one.watch.end()
    assert not any(thread.is_alive() for thread in threads)
    assert [one.watch.failure for one in nodes] == [None, FATAL if on_failure else None]
    assert nodes[1].watch.find_fatal_failure() == (FATAL if on_failure else None)


def test_a_silent_waiting_connection(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's answer to the node's own notice names the failure that counts, so the node can
    take part in the election.
    """
    monkeypatch.setattr(time_limits, "STORE_TIMEOUT_SECONDS", 5.0)
    other = node(1)
    other.watch.send(replace(FATAL, group_rank=1))
    assert other.woken.wait(LONG_S)
    silent = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(RoundStore, "wait", lambda *_: silent.wait(LONG_S))
        deaf = node(0).watch
        deaf.send(FATAL)
        assert deaf.failure == replace(FATAL, group_rank=1)
        assert deaf.connections() is not None
        silent.set()


def test_a_failure_from_the_roster(node: Callable[..., Node]) -> None:
    """It leaves workers of other nodes the time that it announces, and opens no election, because
    the store hasn't said so.
    """
    one = node(1)
    failure = replace(FATAL, stop_seconds=LONG_S)
    one.watch.accept(failure)
    assert one.woken.is_set()
    assert LONG_S / 2 < one.watch.grace_left <= LONG_S
    assert one.watch.failure == failure
    assert one.watch.connections(to_agree=True) is None
