"""Agents settle on one verdict over a real store, each in a thread of its own."""

from __future__ import annotations

import multiprocessing
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import TCPStore

from firstfault_torch.rounds import settlement as settlement_module
from firstfault_torch.rounds.rendezvous import RoundStore
from firstfault_torch.rounds.settlement import Reports, SettledDocument, Settlement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

LONG_S = 30.0
TURN_S = 0.6


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settlement_module, "TURN_S", TURN_S)
    monkeypatch.setattr(settlement_module, "NO_ANSWER_S", 0.5)


@dataclass
class Agent:
    """One agent of a round, what it was asked to do, and the verdict that it settled on."""

    store: Any
    group_rank: int
    nodes: int
    thinks_s: float = 0.0
    """How long it takes to conclude."""
    publishes_s: float = 0.0
    """How long it takes to publish."""
    fails: bool = False
    leaving: bool = False
    durable: bool = True
    report_size: int = 0
    reports: list[Reports] = field(default_factory=list)
    published: list[float] = field(default_factory=list)
    settled: SettledDocument | None = None
    took_s: float = 0.0
    give_up: threading.Event = field(default_factory=threading.Event)
    hears: bool = True

    def __post_init__(self) -> None:
        self.settlement = Settlement(self.group_rank, self.nodes)
        self.settlement.join(self.store, {f"joined-{self.group_rank}": b"here"})

    def begin(self) -> threading.Thread:
        """Settle in a thread."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        if self.hears:
            self.settlement.heard(self.store.clone())
        copies = {f"report-{self.group_rank}": b"x" * self.report_size or b"it failed"}
        if self.leaving:
            self.give_up.set()
        began = time.monotonic()
        connections = (self.store.clone(), self.store.clone())
        self.settled = self._settled(self.settlement.settle(connections, copies, 4.0, self.give_up))
        self.took_s = time.monotonic() - began

    def _settled(self, steps: Iterator[Reports | SettledDocument]) -> SettledDocument | None:
        for step in steps:
            if isinstance(step, SettledDocument):
                return step
            self.reports.append(step)
            time.sleep(self.thinks_s)
            if not self.fails and self.settlement.claim():
                self.published.append(time.monotonic())
                time.sleep(self.publishes_s)
                return self.settlement.hand_over(f"sealed by {self.group_rank}".encode(), durable=self.durable)
        return None


@pytest.fixture(params=[True, False], ids=["libuv", "no libuv"])
def store(request: pytest.FixtureRequest) -> RoundStore:
    """Return the store of a round."""
    shared = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=request.param)
    return RoundStore(shared, 0)


@pytest.fixture
def agents(store: RoundStore) -> Callable[..., list[Agent]]:
    """Make the agents of a round; fields by group rank."""

    def make(nodes: int, **fields: dict[int, Any]) -> list[Agent]:
        return [
            Agent(store, rank, nodes, **{name: by_rank[rank] for name, by_rank in fields.items() if rank in by_rank})
            for rank in range(nodes)
        ]

    return make


def _run(agents: list[Agent]) -> None:
    for thread in [agent.begin() for agent in agents]:
        thread.join(LONG_S)


def _documents(agents: list[Agent]) -> set[bytes | None]:
    return {agent.settled.document if agent.settled is not None else None for agent in agents}


def test_the_lowest_one_concludes_for_all(agents: Callable[..., list[Agent]]) -> None:
    """It gets the reports of all, publishes once, and the others take its verdict; no agent waits for a limit."""
    made = agents(5)
    _run(made)
    assert _documents(made) == {b"sealed by 0"}
    assert {agent.settled.durable for agent in made if agent.settled} == {True}
    assert [len(agent.published) for agent in made] == [1, 0, 0, 0, 0]
    (reports,) = made[0].reports
    assert reports == Reports({f"report-{rank}": b"it failed" for rank in range(5)}, complete=True)
    assert max(agent.took_s for agent in made) < TURN_S


def test_a_verdict_that_is_not_durable(agents: Callable[..., list[Agent]]) -> None:
    """Each agent learns that it has to publish the verdict itself."""
    made = agents(3, durable={0: False})
    _run(made)
    assert _documents(made) == {b"sealed by 0"}
    assert {agent.settled.durable for agent in made if agent.settled} == {False}


def test_one_that_leaves_does_not_conclude(agents: Callable[..., list[Agent]]) -> None:
    """A process that was terminated lets another one conclude."""
    made = agents(3, leaving={0: True, 1: True})
    _run(made)
    assert _documents(made) == {b"sealed by 2"}


def test_one_that_leaves_alone_concludes(agents: Callable[..., list[Agent]]) -> None:
    """A process that was terminated concludes itself if there is no other."""
    made = agents(1, leaving={0: True})
    _run(made)
    assert _documents(made) == {b"sealed by 0"}


def test_a_slow_one_is_replaced(agents: Callable[..., list[Agent]]) -> None:
    """The next one concludes after the time limit; the slow one then takes its verdict and publishes nothing."""
    made = agents(4, thinks_s={0: 3 * TURN_S})
    _run(made)
    assert _documents(made) == {b"sealed by 1"}
    assert [len(agent.published) for agent in made] == [0, 1, 0, 0]
    assert [agent.group_rank for agent in made if agent.reports] == [0, 1]


def test_one_that_publishes_slowly_is_not_replaced(agents: Callable[..., list[Agent]]) -> None:
    """A node that has concluded and publishes keeps its turn: two nodes must not write the same file."""
    made = agents(6, publishes_s={0: 6 * TURN_S})
    _run(made)
    assert _documents(made) == {b"sealed by 0"}
    assert [len(agent.published) for agent in made] == [1, 0, 0, 0, 0, 0]


def test_one_that_died_before_its_turn_is_replaced(agents: Callable[..., list[Agent]], store: RoundStore) -> None:
    """The next one takes over at once after the time limit, and the others take its verdict."""
    made = agents(3)
    assert made[0].settlement._arrive(store.clone(), {"report-0": b"it failed"}, leaving=False)
    _run(made[1:])
    assert _documents(made[1:]) == {b"sealed by 1"}
    assert [len(agent.published) for agent in made] == [0, 1, 0]
    assert max(agent.took_s for agent in made[1:]) < 3 * TURN_S


def test_a_process_that_is_told_to_go_takes_the_verdict(agents: Callable[..., list[Agent]]) -> None:
    """While another node concludes, it waits some seconds for that."""
    made = agents(3, publishes_s={0: 2.0})
    for agent in made[1:]:
        threading.Timer(0.3, agent.give_up.set).start()
    _run(made)
    assert _documents(made) == {b"sealed by 0"}


def test_one_that_cannot_conclude_is_replaced(agents: Callable[..., list[Agent]]) -> None:
    """So is one that fails to conclude; it takes the other's verdict too."""
    made = agents(3, fails={0: True})
    _run(made)
    assert _documents(made) == {b"sealed by 1"}


def test_no_agent_can_conclude(agents: Callable[..., list[Agent]]) -> None:
    """The agents do not settle: each node concludes alone."""
    made = agents(2, fails={0: True, 1: True})
    _run(made)
    assert _documents(made) == {None}


def test_a_dead_node_is_not_waited_for(agents: Callable[..., list[Agent]]) -> None:
    """A node that never heard of the failure counts as dead; what it said when it began is in the reports."""
    made = agents(4)
    _run(made[1:])
    assert _documents(made[1:]) == {b"sealed by 1"}
    (reports,) = made[1].reports
    assert reports.complete
    assert set(reports.copies) == {"joined-0", "report-1", "report-2", "report-3"}
    assert 0.5 <= max(agent.took_s for agent in made[1:]) < 2.5


def test_a_node_that_lives_is_waited_for(agents: Callable[..., list[Agent]], store: RoundStore) -> None:
    """A node that has heard is waited for until the limit; without it the reports are not complete."""
    made = agents(3)
    made[0].settlement.heard(store)
    _run(made[1:])
    assert _documents(made[1:]) == {b"sealed by 1"}
    (reports,) = made[1].reports
    assert not reports.complete
    assert 3.5 <= max(agent.took_s for agent in made[1:]) < 8


def test_a_late_node_takes_the_verdict(agents: Callable[..., list[Agent]]) -> None:
    """A node that reports after the others have settled takes their verdict."""
    made = agents(3)
    _run(made[:2])
    _run(made[2:])
    assert _documents(made) == {b"sealed by 0"}
    assert made[2].took_s < TURN_S


def test_a_process_that_is_told_to_go_meanwhile(agents: Callable[..., list[Agent]]) -> None:
    """It waits shortly, and names who concludes if no other agent has."""
    made = agents(2)
    threading.Timer(0.3, made[1].give_up.set).start()
    _run(made[1:])
    assert _documents(made[1:]) == {b"sealed by 1"}
    assert made[1].took_s < 3


def test_a_report_that_is_too_large(agents: Callable[..., list[Agent]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left out: the node that concludes reads it from the storage."""
    monkeypatch.setattr(settlement_module, "_MAX_REPORT", 200)
    made = agents(2, report_size={1: 1_000_000})
    _run(made)
    (reports,) = made[0].reports
    assert set(reports.copies) == {"report-0"}


def test_what_is_not_a_report(agents: Callable[..., list[Agent]], store: RoundStore) -> None:
    """A value that cannot be unpacked is left out."""
    made = agents(1)
    store.append(settlement_module._Keys("").reports, settlement_module._FRAME.pack(7, 3) + b"abc")
    _run(made)
    assert _documents(made) == {b"sealed by 0"}


def test_the_requests_of_one_agent_do_not_grow(store: RoundStore) -> None:
    """Each agent sends the store few requests, however many there are; one more reads."""
    counts = {nodes: _most_requests(RoundStore(store, nodes), nodes) for nodes in (4, 32)}
    assert max(counts.values()) <= 14, counts


class _Counting:
    """A connection that counts its requests."""

    def __init__(self, store: Any, requests: list[str]) -> None:
        self._store = store
        self._requests = requests

    def clone(self) -> _Counting:
        return _Counting(self._store.clone(), self._requests)

    def __getattr__(self, name: str) -> Any:
        self._requests.append(name)
        return getattr(self._store, name)


def _most_requests(store: Any, nodes: int) -> int:
    requests: list[list[str]] = [[] for _ in range(nodes)]
    made = [Agent(_Counting(store, requests[rank]), rank, nodes) for rank in range(nodes)]
    _run(made)
    assert _documents(made) == {b"sealed by 0"}
    return max(len(sent) for sent, agent in zip(requests, made, strict=True) if not agent.reports)


# --- the store's host is lost ---------------------------------------------------------------------------------------


def _host(port: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    time.sleep(LONG_S)


@pytest.fixture
def host() -> Iterator[tuple[multiprocessing.process.BaseProcess, RoundStore]]:
    """Return the process that hosts a store, and the store as another one sees it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_host, args=(theirs,))
    process.start()
    client = TCPStore("127.0.0.1", ours.recv(), is_master=False, wait_for_workers=False)
    yield process, RoundStore(client, 0)
    process.kill()
    process.join()


def test_the_host_is_killed_meanwhile(host: tuple[multiprocessing.process.BaseProcess, RoundStore]) -> None:
    """The agents notice at once that they cannot settle."""
    process, store = host
    made = [Agent(store, rank, 3) for rank in range(3)]
    threads = [agent.begin() for agent in made[:2]]
    time.sleep(0.3)
    process.kill()
    for thread in threads:
        thread.join(LONG_S)
    assert _documents(made[:2]) == {None}
    assert max(agent.took_s for agent in made[:2]) < 2
