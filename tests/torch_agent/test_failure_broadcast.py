"""Agents exchange a round's outcome over a real store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from torch.distributed import DistNetworkError

from firstfault_torch import time_limits
from firstfault_torch.rounds import failure_broadcast as outcome_module
from firstfault_torch.rounds import round_store
from firstfault_torch.rounds.failure_broadcast import (
    OUTCOME_KEY,
    FailureBroadcast,
    FailureNotice,
    RoundOutcome,
)
from firstfault_torch.rounds.round_store import RoundStore, set_once
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
        self.watch = FailureBroadcast(
            store,
            group_rank,
            self.woken.set,
            lambda connection, _: connection.append("on_failure", f"{group_rank} "),
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
    assert {b"0", b"1", b"2"} <= set(store.get("on_failure").split()), (
        "each calls back, on a connection of its own"
    )


def test_a_slow_connection(store: RoundStore, node: Callable[..., Node]) -> None:
    """Sending a failure opens no new connection, which a slow name service would delay by 5 s."""
    slow = Waited(store)
    sender = node(0, slow)
    listener = node(1, slow)
    slow.await_waits(2)
    slow.connecting_seconds = LONG_S
    sender.watch.send(FATAL)
    assert listener.woken.wait(SOON_S)


@pytest.mark.parametrize(
    ("told", "first", "fatal"),
    [
        ([(0, FATAL), (1, replace(FATAL, group_rank=1))], FATAL, FATAL),
        ([(0, RESTART), (1, replace(FATAL, group_rank=1))], RESTART, replace(FATAL, group_rank=1)),
        ([(0, RESTART), (0, FATAL)], RESTART, FATAL),
        ([(0, FATAL), (0, RESTART)], FATAL, FATAL),
        ([(0, RESTART), (1, replace(RESTART, group_rank=1))], RESTART, None),
        ([(0, FATAL), (0, replace(FATAL, what="said twice"))], FATAL, FATAL),
    ],
    ids=[
        "both fatal",
        "fatal after a restart",
        "restart, then fatal",
        "fatal, then restart",
        "restarts",
        "twice",
    ],
)
def test_the_first_counts(
    told: list[tuple[int, FailureNotice]],
    first: FailureNotice,
    fatal: FailureNotice | None,
    node: Callable[..., Node],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first failure counts; `find_fatal_failure` also finds one that
    was sent after a restart.
    """
    # after it, the listener takes the fatal one
    monkeypatch.setattr(time_limits, "FATAL_FAILURE_POLL_SECONDS", LONG_S)
    nodes = [node(group_rank) for group_rank in range(3)]
    for sender, failure in told:
        nodes[sender].watch.send(failure)
    listener = nodes[2]
    assert listener.woken.wait(LONG_S)
    assert listener.watch.outcome.failure == first
    assert listener.watch.failure == (first if first.fatal else None)
    assert listener.watch.find_fatal_failure() == fatal
    if fatal is not None:
        assert nodes[fatal.group_rank or 0].watch.find_fatal_failure() is None, "its own"


def test_all_have_finished(store: RoundStore, node: Callable[..., Node]) -> None:
    """When all have finished, every node knows it, none reports a failure,
    and a later one is ignored.
    """
    nodes = [node(0), node(1)]
    set_once(store, OUTCOME_KEY, '{"finished": true}')
    assert all(one.woken.wait(LONG_S) for one in nodes)
    assert not store.check(["on_failure"])
    nodes[0].watch.send(RESTART)
    for one in nodes:
        assert (one.watch.outcome.finished, one.watch.outcome.failure, one.watch.failure) == (
            True,
            None,
            None,
        )
        assert one.watch.find_fatal_failure() is None


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


def test_a_store_whose_host_is_dying(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that still listens for a moment is lost too:
    a new connection to it would be tried for minutes.
    """
    connected: list[float] = []

    class Dying:
        def clone(self) -> Dying:
            connected.append(time.monotonic())
            return self

        def wait(self, *_: object) -> None:
            raise DistNetworkError("the connection is closed")

    for module in (outcome_module, round_store):
        monkeypatch.setattr(module, "is_host_listening", lambda _: not connected[1:] or looks.pop())
    looks = [False, True]
    one = node(0, Dying())
    assert one.woken.wait(LONG_S)
    assert one.watch.outcome.lost == "the connection is closed"
    assert len(connected) == 2


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


@pytest.mark.parametrize("how", ["poll", "accept"])
def test_a_failure_that_the_waiting_thread_does_not_see(
    how: str,
    store: RoundStore,
    node: Callable[..., Node],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A notice learned by a look, or from the roster,
    leaves workers of other nodes the time that it announces.
    """
    silent = threading.Event()
    monkeypatch.setattr(
        FailureBroadcast,
        "_receive_outcome",
        lambda _: silent.wait() and RoundOutcome(finished=True),
    )
    watch = node(1).watch
    watch._known_at -= 2 * LONG_S  # the round began long ago
    failure = replace(FATAL, stop_seconds=LONG_S)
    if how == "poll":
        watch._connection = store.clone()
        FailureBroadcast._store_outcome(watch, json.dumps(asdict(failure)), fatal=True)
        watch.poll()
    else:
        watch.accept(failure)
    assert LONG_S / 2 < watch.grace_left <= LONG_S
    assert watch._is_known.is_set()
    silent.set()
    watch.thread.join(LONG_S)
    assert watch.failure == failure
