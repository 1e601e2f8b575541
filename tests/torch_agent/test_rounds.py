"""A round's rendezvous, and what its nodes agree on: its number,
and that all have finished. Over a real store.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.utils.store import barrier

from firstfault.layout import ROSTER, roster_key_for
from firstfault.model import Phase
from firstfault.testing import make_presence
from firstfault.wire.documents import encode_presence
from firstfault_torch import time_limits
from firstfault_torch.node.document_writer import put_file
from firstfault_torch.protocol.notices import FailureNotice, RoundOutcome
from firstfault_torch.rounds.peers import Peers
from firstfault_torch.rounds.rendezvous_fixes import PatchedRendezvous
from firstfault_torch.rounds.round_store import begin_round
from tests.nodes import WAIT_IN_STORE
from tests.prefix import Prefix
from tests.torch_agent.stores import group_on
from tests.waiting import wait_until

SOON_S = 30.0
LONG_S = 60.0
NODES = 3
TORCHS_KEY = "torchelastic/agent/terminal_state"


@pytest.fixture
def shared() -> TCPStore:
    """Return the store that all rounds share."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Return threads that stand for nodes."""
    with ThreadPoolExecutor(NODES) as threads:
        yield threads


def test_a_healthy_rendezvous_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call has its own answer, and all other attributes are the handler's."""
    monkeypatch.setattr("firstfault_torch.guard.BACKGROUND_RESULT_TIMEOUT_SECONDS", LONG_S)
    handler = SimpleNamespace(
        num_nodes_waiting=iter([0, 1, 2]).__next__, get_run_id=lambda: "a run"
    )
    rendezvous = PatchedRendezvous(handler)
    assert [rendezvous.num_nodes_waiting() for _ in range(3)] == [0, 1, 2]
    assert rendezvous.get_run_id() == "a run"


def test_a_frozen_host_blocks_nothing() -> None:
    """If there is no answer, no caller waits. Only one question is asked at a time,
    and a late answer counts.
    """
    may_answer = threading.Event()
    asked = []

    def answer() -> int:
        asked.append(1)
        assert may_answer.wait(LONG_S)
        return 2

    rendezvous = PatchedRendezvous(SimpleNamespace(num_nodes_waiting=answer))
    assert rendezvous.num_nodes_waiting() == 0
    began = time.monotonic()
    assert [rendezvous.num_nodes_waiting() for _ in range(200)] == [0] * 200
    assert time.monotonic() - began < SOON_S, "each would wait for half a second"
    assert len(asked) == 1
    may_answer.set()
    wait_until(lambda: rendezvous.num_nodes_waiting() == 2)


def test_an_error_reaches_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost rendezvous fails the agent as torch means it, also if the question ended later."""
    may_answer = threading.Event()

    def fail() -> int:
        may_answer.wait(LONG_S)
        raise RendezvousConnectionError("the connection is lost")

    rendezvous = PatchedRendezvous(SimpleNamespace(num_nodes_waiting=fail))
    monkeypatch.setattr("firstfault_torch.guard.BACKGROUND_RESULT_TIMEOUT_SECONDS", 0.1)
    assert rendezvous.num_nodes_waiting() == 0
    may_answer.set()
    monkeypatch.setattr("firstfault_torch.guard.BACKGROUND_RESULT_TIMEOUT_SECONDS", LONG_S)
    for _ in range(2):  # the late one, then one in time
        with pytest.raises(RendezvousConnectionError):
            wait_until(lambda: rendezvous.num_nodes_waiting() != 0)


@pytest.mark.parametrize("first_is_late", [False, True])
def test_the_number_is_the_same_on_all_nodes(
    first_is_late: bool, shared: TCPStore, pool: ThreadPoolExecutor
) -> None:
    """All nodes of a round get the same number in any order,
    and it counts the rounds of the shared store.
    """
    for number in range(3):
        store = PrefixStore(f"/rdzv/{number}", shared)
        order = [1, 2, 0] if first_is_late else [0, 1, 2]
        said = [pool.submit(begin_round, store.clone(), group_rank, 99) for group_rank in order]
        assert [one.result(LONG_S) for one in said] == [number] * NODES


def test_without_the_first_node(
    shared: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the first node sets no number, the others take their own after a while, with a warning."""
    monkeypatch.setattr(time_limits, "ROUND_NUMBER_TIMEOUT_SECONDS", 0.2)
    assert begin_round(PrefixStore("round", shared), 1, 7) == 7
    assert "the first node doesn't number the rounds" in caplog.text


class Node:
    """A node at the end of its training: it waits for the others in a thread."""

    def __init__(self, shared: TCPStore, group_rank: int, prefix: Prefix) -> None:
        self.wake = threading.Event()
        group = group_on(PrefixStore("round", shared).clone(), group_rank, NODES)
        self.peers = Peers(
            group,
            prefix.node_context(),
            patience_seconds=LONG_S,
            wake=self.wake.set,
            shutdown_requested=threading.Event(),
        )
        self.outcome = self.peers.broadcast

    def await_all(self) -> FailureNotice | None:
        return self.peers.exit_barrier.await_all(self.wake)


@pytest.fixture
def node(
    shared: TCPStore, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], Node]]:
    """Make nodes that wait little for an agent of torch's own;
    none of their threads outlives the test.
    """
    monkeypatch.setattr(time_limits, "EXIT_BARRIER_POLL_SECONDS", 0.05)
    monkeypatch.setattr(time_limits, "FINISH_ACKS_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(time_limits, "EXIT_ROSTER_TIMEOUT_SECONDS", 0.2)
    made: list[Node] = []

    def begin(group_rank: int) -> Node:
        made.append(Node(shared, group_rank, prefix))
        return made[-1]

    yield begin
    for one in made:
        one.peers.end()


@pytest.mark.parametrize("arrives", ["last", "with us"])
def test_all_have_arrived(
    arrives: str,
    shared: TCPStore,
    node: Callable[[int], Node],
    pool: ThreadPoolExecutor,
) -> None:
    """All nodes wait until the last one has arrived, and then know that all have finished.

    A node whose agent is torch's own counts, and its barrier ends with ours.
    """
    store = PrefixStore("round", shared).clone()

    def third() -> Future[Any]:
        if arrives == "with us":
            return pool.submit(node(2).await_all)
        return pool.submit(barrier, store, NODES, key_prefix=TORCHS_KEY, barrier_timeout=LONG_S)

    ours = [node(0), node(1)]
    waiting = [pool.submit(one.await_all) for one in ours]
    _until_counted(store, 2)
    assert not any(one.done() for one in waiting)
    other = third()
    assert [one.result(SOON_S) for one in waiting] == [None, None]
    other.result(SOON_S)
    wait_until(lambda: all(one.outcome.outcome == RoundOutcome(finished=True) for one in ours))


@pytest.mark.parametrize(("fatal", "before"), [(True, False), (False, True)])
def test_another_node_fails(
    fatal: bool,
    before: bool,
    shared: TCPStore,
    node: Callable[[int], Node],
    pool: ThreadPoolExecutor,
) -> None:
    """The wait ends at once when another node fails, or starts its workers again,
    also if it did before.
    """
    first = node(0)
    other = node(1)
    failure = FailureNotice("ValueError", "worker-1", 1, 3, fatal=fatal)
    if before:
        other.outcome.send(failure)
        assert first.wake.wait(LONG_S)
    waiting = pool.submit(first.await_all)
    if not before:
        _until_counted(PrefixStore("round", shared), 1)
        other.outcome.send(failure)
    assert waiting.result(SOON_S) == failure


@pytest.mark.parametrize(
    ("succeeded", "result"),
    [((0, 1, 2), True), ((0, 1), False)],
    ids=["all", "two"],
)
def test_the_store_is_gone(
    succeeded: tuple[int, ...],
    result: bool,
    shared: TCPStore,
    prefix: Prefix,
    node: Callable[[int], Node],
) -> None:
    """If the store is lost with its host, the roster tells whether all nodes had finished."""
    for group_rank in succeeded:
        _upload_success(prefix, group_rank)
    one = node(0)
    _lose_store(one)
    with (
        contextlib.nullcontext()
        if result
        else pytest.raises(RendezvousConnectionError, match="Connection reset")
    ):
        assert one.await_all() is None


def test_a_late_roster_entry(
    prefix: Prefix, node: Callable[[int], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's host has ended because all nodes have finished; the entries of two come later."""
    monkeypatch.setattr(time_limits, "EXIT_ROSTER_TIMEOUT_SECONDS", LONG_S)
    one = node(0)
    _lose_store(one)
    reads: list[int] = []
    read = one.peers.exit_barrier._read_roster

    def read_then_upload() -> Any:
        found = read()
        reads.append(len(reads))
        for group_rank in (1, 2) if len(reads) == 1 else ():
            _upload_success(prefix, group_rank)
        return found

    monkeypatch.setattr(one.peers.exit_barrier, "_read_roster", read_then_upload)
    assert one.await_all() is None
    assert reads == [0, 1]


def test_a_storage_that_does_not_answer(
    prefix: Prefix, node: Callable[[int], Node], caplog: pytest.LogCaptureFixture
) -> None:
    """Without the store and the storage nothing proves a failure: the node ends as with torch."""
    one = node(0)
    _lose_store(one)
    roster = prefix.folder / ROSTER
    roster.parent.mkdir(parents=True)
    roster.symlink_to(roster)
    assert one.await_all() is None
    assert "can't find out whether all nodes have finished" in caplog.text


def test_a_silent_connection_at_the_exit(
    node: Callable[[int], Node], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that has finished learns of a failure also if its waiting
    connection never gets an answer.
    """
    monkeypatch.setattr(time_limits, "EXIT_BARRIER_LOG_INTERVAL_SECONDS", 0.1)
    silent = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(PrefixStore, "wait", lambda *_: silent.wait(LONG_S))
        waiting = pool.submit(node(0).await_all)
        failure = FailureNotice("ValueError", "worker-1", 1, 3)
        node(1).outcome.send(failure)
        assert waiting.result(SOON_S) == failure
        silent.set()


def test_a_broken_connection_at_the_exit(
    node: Callable[[int], Node], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection to torch's store broke while the workers ran, so no agent is the last one to
    be counted: the agents leave their names on new connections.
    """
    monkeypatch.setattr(time_limits, "EXIT_BARRIER_LOG_INTERVAL_SECONDS", 0.2)
    ours = [node(group_rank) for group_rank in range(NODES)]
    barrier = ours[0].peers.exit_barrier
    broken = SimpleNamespace(add=_raise, check=_raise, set=_raise, wait=_raise)
    barrier._group = SimpleNamespace(**{**vars(barrier._group), "store": broken})
    waiting = [pool.submit(one.await_all) for one in ours]
    assert [one.result(SOON_S) for one in waiting] == [None] * NODES


def test_silent_connections_at_the_exit(
    node: Callable[[int], Node], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall has forgotten all connections of a node. It learns on a new one that the others
    have finished, or that one of them has failed.
    """
    monkeypatch.setattr(time_limits, "EXIT_BARRIER_LOG_INTERVAL_SECONDS", 0.1)
    silent = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(PrefixStore, "wait", lambda *_: silent.wait(LONG_S))
        first = node(0)
        wait_until(lambda: first.outcome._connection is not None)
        monkeypatch.setattr(first.outcome, "poll", lambda: None)
        waiting = pool.submit(first.await_all)
        failure = FailureNotice("ValueError", "worker-1", 1, 3)
        node(1).outcome.send(failure)
        assert waiting.result(SOON_S) == failure
        silent.set()


def test_a_failure_that_was_faster_than_the_end(node: Callable[[int], Node]) -> None:
    """An agent sees that all have arrived, but one of them has got a signal: its notice is in the
    store already, so all nodes fail alike.
    """
    only = node(0)
    failure = FailureNotice("SIGTERM", "worker-1", 1)
    only.peers.exit_barrier._group.store.set(f"{TORCHS_KEY}/last_member", "")
    only.peers.exit_barrier._broadcast = deaf = SimpleNamespace(
        outcome=None, failure=None, accept=lambda _: None
    )
    node(1).outcome.send(failure)
    assert only.await_all() == failure
    assert deaf.outcome is None, "the answer of the store counts"


def test_a_signal_after_the_end(node: Callable[[int], Node], pool: ThreadPoolExecutor) -> None:
    """A node is marked as finished before it waits for acknowledgments."""
    ours = [node(group_rank) for group_rank in range(NODES)]
    marked = threading.Event()
    waiting = [pool.submit(one.await_all) for one in ours[1:]]
    first = pool.submit(ours[0].peers.exit_barrier.await_all, ours[0].wake, marked.set)
    assert marked.wait(SOON_S)
    assert [one.result(SOON_S) for one in [first, *waiting]] == [None] * NODES


def test_the_end_of_the_process(node: Callable[[int], Node]) -> None:
    """No thread of a node is inside the store any more,
    though neither an outcome nor a verdict has come.
    """
    peers = node(1).peers
    connections = peers.connect(), peers.connect()
    next(peers.settlement.settle(connections, {}, 0.0, threading.Event()))
    names = {*WAIT_IN_STORE, "firstfault-liveness"}
    threads = [thread for thread in threading.enumerate() if thread.name in names]
    assert {thread.name for thread in threads} == names
    peers.close()
    assert not [thread.name for thread in threads if thread.is_alive()]


def _lose_store(one: Node) -> None:
    one.outcome.end()
    one.outcome._notices.outcome = RoundOutcome(lost="Connection reset by peer")


def _upload_success(prefix: Prefix, group_rank: int) -> None:
    entry = make_presence(
        Phase.SUCCEEDED,
        node=f"worker-{group_rank}",
        group_rank=group_rank,
        nodes=NODES,
    )
    put_file(prefix.uri, f"firstfault/roster/{roster_key_for(entry)}", encode_presence(entry))


def _raise(*_: object) -> None:
    raise DistNetworkError("the connection was reset")


def _until_counted(store: Any, nodes: int) -> None:
    """Return when so many nodes have arrived at torch's barrier."""
    connection = store.clone()
    wait_until(lambda: int(connection.add(f"{TORCHS_KEY}/num_members", 0)) >= nodes)
