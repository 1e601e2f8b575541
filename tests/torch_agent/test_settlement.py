"""Agents settle on one verdict over a real store, each in a thread of its own."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from firstfault.wire.documents import unpack
from firstfault_torch import time_limits
from firstfault_torch.protocol.election import LEAVING_KEY, LOST_KEY
from firstfault_torch.rounds import report_packing
from firstfault_torch.rounds.election import CollectedReports, VerdictElection
from firstfault_torch.rounds.report_packing import ElectedVerdict
from firstfault_torch.rounds.round_store import RoundStore
from tests.processes import read_processes
from tests.torch_agent.stores import Counting, acknowledge, hosted
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.forks]

LONG_S = 60.0
"""A wait that is expected not to end."""
SOON_S = 30.0
SHORT_S = 0.4
"""A wait that is expected to end."""


class Silent:
    """A connection on which nothing arrives any more, as after a firewall has forgotten it."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def wait(self, *_: object) -> None:
        self.ended.wait()
        raise ConnectionError("closed")


@dataclass
class Agent:
    """One agent of a round, what it was asked to do, and the verdict that it settled on."""

    store: Any
    group_rank: int
    nodes: int
    thinks: threading.Event | None = None
    """It concludes once this is set."""
    publishes_s: float = 0.0
    """How long it takes to publish."""
    fails: bool = False
    dies_publishing: bool = False
    leaving: bool = False
    durable: bool = True
    report_size: int = 0
    silent: Silent | None = None
    """Its connection that waits never gets an answer."""
    seconds: float = LONG_S
    reports: list[CollectedReports] = field(default_factory=list)
    published: int = 0
    settled: ElectedVerdict | None = None
    took_s: float = 0.0
    shutdown_requested: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.settlement = VerdictElection(self.group_rank, self.nodes)
        self.settlement.join(self.store, {f"joined-{self.group_rank}": b"here"})

    def begin(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        copies = {f"report-{self.group_rank}": b"x" * self.report_size or b"it failed"}
        if self.leaving:
            self.shutdown_requested.set()
        began = time.monotonic()
        connections = (self.store.clone(), self.silent or self.store.clone())
        self.settled = self._settled(
            self.settlement.settle(connections, copies, self.seconds, self.shutdown_requested)
        )
        self.took_s = time.monotonic() - began

    def _settled(self, steps: Iterator[CollectedReports | ElectedVerdict]) -> ElectedVerdict | None:
        for step in steps:
            if isinstance(step, ElectedVerdict):
                return step
            self.reports.append(step)
            if self.thinks is not None:
                self.thinks.wait(LONG_S)
            if not self.fails and self.settlement.announce_publishing():
                if self.dies_publishing:
                    return None
                self.published += 1
                time.sleep(self.publishes_s)
                return self.settlement.publish(
                    f"sealed by {self.group_rank}".encode(), durable=self.durable
                )
        return None


@pytest.fixture
def agents(store: RoundStore, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Agent]]:
    """Make the agents of a round; fields by group rank. An agent has a long turn,
    and a dead one a long time.
    """
    monkeypatch.setattr(time_limits, "LEADER_TIMEOUT_SECONDS", LONG_S)
    monkeypatch.setattr(time_limits, "ACKNOWLEDGMENT_TIMEOUT_SECONDS", LONG_S)

    def make(nodes: int, **fields: dict[int, Any]) -> list[Agent]:
        return [
            Agent(
                store,
                rank,
                nodes,
                **{name: by_rank[rank] for name, by_rank in fields.items() if rank in by_rank},
            )
            for rank in range(nodes)
        ]

    return make


@pytest.fixture
def short_turns(agents: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next agent take over after a moment."""
    monkeypatch.setattr(time_limits, "LEADER_TIMEOUT_SECONDS", SHORT_S)


@pytest.fixture
def short_life(agents: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look after a moment which agents live."""
    monkeypatch.setattr(time_limits, "ACKNOWLEDGMENT_TIMEOUT_SECONDS", SHORT_S)


def _run(agents: list[Agent]) -> None:
    for agent in agents:
        acknowledge(agent.store, agent.group_rank)
    for thread in [agent.begin() for agent in agents]:
        thread.join(SOON_S)
        assert not thread.is_alive()


def _documents(agents: list[Agent]) -> set[bytes | None]:
    return {agent.settled.document if agent.settled is not None else None for agent in agents}


@pytest.mark.parametrize("store", [True, False], ids=["libuv", "no libuv"], indirect=True)
@pytest.mark.parametrize("durable", [True, False])
def test_the_lowest_one_concludes_for_all(
    durable: bool, agents: Callable[..., list[Agent]]
) -> None:
    """It gets the reports of all, publishes once, and the others take its verdict;
    no agent waits for a limit.
    """
    made = agents(5, durable={0: durable})
    _run(made)
    assert {agent.settled for agent in made} == {ElectedVerdict(b"sealed by 0", durable)}
    assert [agent.published for agent in made] == [1, 0, 0, 0, 0]
    assert made[0].reports == [
        CollectedReports({f"report-{rank}": b"it failed" for rank in range(5)}, complete=True)
    ]


@pytest.mark.parametrize(("nodes", "leader"), [(3, 2), (1, 0)])
def test_one_that_leaves(nodes: int, leader: int, agents: Callable[..., list[Agent]]) -> None:
    """A process that was terminated concludes only if there is no other."""
    made = agents(nodes, leaving={0: True, 1: True})
    thread = made[-1].begin()
    wait_until(lambda: made[-1].settlement.arrival_number)
    _run(made[:-1])
    thread.join(SOON_S)
    assert _documents(made) == {f"sealed by {leader}".encode()}


@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize("first", ["is slow", "fails", "is dead"])
def test_one_that_does_not_conclude_is_replaced(
    first: str, agents: Callable[..., list[Agent]]
) -> None:
    """Another one concludes after the time limit;
    a slow one then takes its verdict and publishes nothing.
    """
    concludes = threading.Event()
    made = agents(
        4, thinks={0: concludes if first == "is slow" else None}, fails={0: first == "fails"}
    )
    if first == "is dead":
        report = report_packing.frame_report(0, 4, {"report-0": b"it failed"})
        made[0].store.append("firstfault/reports", report)
        made[0].store.append("firstfault/arrived", "0 ")
    for agent in made:
        acknowledge(agent.store, agent.group_rank)
    threads = [agent.begin() for agent in made[first == "is dead" :]]
    for thread in threads[-3:]:
        thread.join(SOON_S)
    concludes.set()
    threads[0].join(SOON_S)
    settled = _documents([agent for agent in made if agent.took_s])
    assert len(settled) == 1
    assert settled < {f"sealed by {rank}".encode() for rank in (1, 2, 3)}
    assert (made[0].published, sum(agent.published for agent in made)) == (0, 1)


@pytest.mark.usefixtures("short_turns")
def test_one_that_publishes_slowly_is_not_replaced(agents: Callable[..., list[Agent]]) -> None:
    """A node that has concluded and publishes keeps its turn:
    two nodes must not write the same file.
    """
    made = agents(6, publishes_s={0: 4 * SHORT_S})
    _run(made)
    assert len(_documents(made)) == sum(agent.published for agent in made) == 1


@pytest.mark.usefixtures("short_turns")
def test_one_that_dies_while_it_publishes_is_replaced(
    agents: Callable[..., list[Agent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the limit the next node concludes, and all settle on its verdict;
    so does the one after that.
    """
    monkeypatch.setattr(time_limits, "LEADER_PUBLISH_TIMEOUT_SECONDS", SHORT_S)
    made = agents(4, dies_publishing={0: True, 1: True})
    _run(made)
    assert _documents(made[2:]) == {b"sealed by 2"}


@pytest.mark.usefixtures("short_turns")
def test_no_agent_can_conclude(agents: Callable[..., list[Agent]]) -> None:
    """The agents do not settle: each node concludes alone."""
    made = agents(2, fails={0: True, 1: True})
    _run(made)
    assert _documents(made) == {None}


def test_a_process_that_is_told_to_go_takes_the_verdict(agents: Callable[..., list[Agent]]) -> None:
    """While another node concludes, it waits some seconds for that."""
    made = agents(3, publishes_s={0: 0.8})
    threads = [agent.begin() for agent in made]
    wait_until(lambda: made[0].published)
    for agent in made[1:]:
        agent.shutdown_requested.set()
    for thread in threads:
        thread.join(SOON_S)
    assert _documents(made) == {b"sealed by 0"}


def test_a_process_that_is_told_to_go_leaves_the_decision_to_one_that_stays(
    agents: Callable[..., list[Agent]],
) -> None:
    """The other agent hasn't reported yet: it still stops its workers."""
    first, second = agents(2, leaving={0: True})
    store = first.store
    store.append(LEAVING_KEY, "0 ")
    for agent in (first, second):
        acknowledge(store, agent.group_rank)
    thread = first.begin()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert (first.settled, first.settlement.is_left_to_others, first.reports) == (None, True, [])
    second.begin().join(SOON_S)
    assert _documents([second]) == {b"sealed by 1"}
    assert (second.reports[0].complete, second.reports[0].lost) == (True, frozenset({0}))


@pytest.mark.usefixtures("short_life")
@pytest.mark.parametrize("is_lost", [True, False])
def test_a_node_without_acknowledgment_is_lost_only_if_its_connection_broke(
    is_lost: bool, agents: Callable[..., list[Agent]]
) -> None:
    """It isn't waited for; what it said when it began is in the reports."""
    made = agents(4)
    if is_lost:
        made[1].store.append(LOST_KEY, "0 ")
    _run(made[1:])
    assert _documents(made[1:]) == {b"sealed by 1"}
    (reports,) = made[1].reports
    assert (reports.complete, reports.lost) == (is_lost, {0} if is_lost else set())
    assert set(reports.copies) == {"joined-0", "report-1", "report-2", "report-3"}


@pytest.mark.usefixtures("short_life")
def test_a_node_that_lives_is_waited_for(agents: Callable[..., list[Agent]]) -> None:
    """A node that has heard is waited for until the limit;
    without it the reports are not complete.
    """
    made = agents(3, seconds={1: 3 * SHORT_S})
    acknowledge(made[0].store, 0)
    _run(made[1:])
    assert _documents(made[1:]) == {b"sealed by 1"}
    assert not made[1].reports[0].complete
    assert made[1].took_s >= 3 * SHORT_S


@pytest.mark.usefixtures("short_life")
def test_a_late_node_takes_the_verdict(agents: Callable[..., list[Agent]]) -> None:
    """A node that reports after the others have settled takes their verdict."""
    made = agents(3)
    _run(made[:2])
    _run(made[2:])
    assert _documents(made) == {b"sealed by 0"}


def test_a_report_that_is_too_large(
    agents: Callable[..., list[Agent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left out: the node that concludes reads it from the storage. So is a
    value that is not a report.
    """
    monkeypatch.setattr(report_packing, "MAX_REPORT_BYTES", 200)
    made = agents(2, report_size={1: 1_000_000})
    made[0].store.append("firstfault/reports", report_packing.FRAME_HEADER.pack(7, 3) + b"abc")
    _run(made)
    (reports,) = made[0].reports
    assert set(reports.copies) == {"report-0"}


def test_the_copies_for_many_nodes() -> None:
    """The more nodes ask the store's host for them, the fewer bytes they have;
    what the verdict rests on stays.
    """
    files = {
        f"errors/{number}": random.Random(number).randbytes(1000 + number) for number in range(300)
    }
    first = {"errors/299": files["errors/299"]}
    few, many = (report_packing.pack_copies(nodes, files, first) for nodes in (2, 2500))
    assert unpack(few) == files
    assert len(many) < 2**28 / 2500
    kept = unpack(many)
    assert 40 < len(kept) < 100
    assert kept.items() <= files.items()
    assert kept.keys() == {"errors/299", *(f"errors/{number}" for number in range(len(kept) - 1))}


@pytest.mark.usefixtures("agents")
def test_the_requests_of_one_agent_do_not_grow(store: RoundStore) -> None:
    """Each agent sends the store few requests, however many there are; one more reads."""
    counts = {nodes: _most_requests(RoundStore(store, nodes), nodes) for nodes in (4, 32)}
    assert max(counts.values()) <= 14, counts


def _most_requests(store: Any, nodes: int) -> int:
    requests: list[list[str]] = [[] for _ in range(nodes)]
    made = [Agent(Counting(store, requests[rank]), rank, nodes) for rank in range(nodes)]
    _run(made)
    assert _documents(made) == {b"sealed by 0"}
    return max(len(sent) for sent, agent in zip(requests, made, strict=True) if not agent.reports)


@pytest.mark.usefixtures("short_turns", "short_life")
@pytest.mark.parametrize(("nodes", "there"), [(2, [0]), (2, [0, 1]), (3, [0, 2])])
def test_a_silent_connection(
    nodes: int, there: list[int], agents: Callable[..., list[Agent]]
) -> None:
    """An agent whose waiting connection is silent settles like the others,
    as the leader and as a follower.
    """
    made = agents(nodes, silent={rank: Silent() for rank in there})
    running = [made[rank] for rank in there]
    _run(running)
    for agent in running:
        assert agent.silent is not None
        agent.silent.ended.set()
    (document,) = _documents(running)
    assert document is not None
    assert sum(agent.published for agent in running) == 1


@pytest.mark.usefixtures("short_turns")
def test_a_slow_leader_after_the_end_of_the_store(agents: Callable[..., list[Agent]]) -> None:
    """It publishes nothing once another agent has, even if the store has ended:
    no answer is a no.
    """
    concludes = threading.Event()
    with hosted() as (process, store):
        slow, other = [
            Agent(store, rank, 2, thinks=concludes if rank == 0 else None) for rank in (0, 1)
        ]
        threads = [agent.begin() for agent in (slow, other)]
        threads[1].join(SOON_S)
        # it ends after the verdict, which it waits for last
        wait_until(
            lambda: slow.settlement.thread is not None and not slow.settlement.thread.is_alive(),
            "the verdict has reached the slow leader",
        )
        process.kill()
        process.join()
        concludes.set()
        threads[0].join(SOON_S)
    assert _documents([slow, other]) == {b"sealed by 1"}
    assert (slow.published, other.published) == (0, 1)


@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize("is_signalled", [True, False])
def test_a_leader_whose_store_falls_silent(
    is_signalled: bool, agents: Callable[..., list[Agent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks nothing more of a store that doesn't answer, so that its verdict isn't delayed;
    a signal hurries it.
    """
    monkeypatch.setattr(
        time_limits, "ELECTION_STEP_TIMEOUT_SECONDS", LONG_S if is_signalled else SHORT_S
    )
    concludes = threading.Event()
    requests = list[str]()
    with hosted() as (process, store):
        leader = Agent(Counting(store, requests), 0, 4, thinks=concludes, seconds=0)
        thread = leader.begin()
        wait_until(lambda: leader.reports)
        os.kill(process.pid or 0, signal.SIGSTOP)
        # the signal is sent, but the store may still answer one more request
        wait_until(lambda: read_processes()[process.pid or 0].state == "T")
        requests.clear()
        concludes.set()
        wait_until(lambda: requests)
        if is_signalled:
            leader.shutdown_requested.set()
        thread.join(SOON_S)
        assert not thread.is_alive()
        # before the store's process ends: then an abandoned request connects again
        assert requests == ["compare_set"]
    assert (leader.settled, leader.published) == (None, 0)


def test_the_host_is_killed_meanwhile(agents: Callable[..., list[Agent]]) -> None:
    """The agents notice at once that they cannot settle."""
    with hosted() as (process, store):
        made = [Agent(store, rank, 3) for rank in range(3)]
        threads = [agent.begin() for agent in made[:2]]
        wait_until(lambda: all(agent.settlement.arrival_number for agent in made[:2]))
        process.kill()
        for thread in threads:
            thread.join(SOON_S)
            assert not thread.is_alive()
    assert _documents(made[:2]) == {None}


def test_a_leader_that_is_interrupted_while_it_concludes(
    agents: Callable[..., list[Agent]],
) -> None:
    """A fatal failure of a third node ends the vote; the leader publishes nothing, and goes on."""
    concludes = threading.Event()
    (leader,) = agents(1, thinks={0: concludes})
    thread = leader.begin()
    wait_until(lambda: leader.reports)
    leader.settlement.interrupt()
    concludes.set()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert (leader.settled, leader.published) == (None, 0)


@pytest.mark.usefixtures("short_turns")
def test_a_silent_store_is_asked_once_after_the_election(
    agents: Callable[..., list[Agent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict is handed over, because the store may only be slow. Confirming it, too, would
    delay the report again.
    """
    monkeypatch.setattr(time_limits, "ELECTION_STEP_TIMEOUT_SECONDS", SHORT_S)
    concludes = threading.Event()
    requests = list[str]()
    with hosted() as (process, store):
        leader = Agent(Counting(store, requests), 0, 4, thinks=concludes, seconds=0)
        thread = leader.begin()
        wait_until(lambda: leader.reports)
        os.kill(process.pid or 0, signal.SIGSTOP)
        wait_until(lambda: read_processes()[process.pid or 0].state == "T")
        concludes.set()
        thread.join(SOON_S)
        requests.clear()
        assert leader.settlement.hand_over(ElectedVerdict(b"own", durable=True)) is None
        leader.settlement.confirm()
        leader.settlement.await_confirmations()
        # before the store's process ends: then an abandoned request connects again
        assert requests == ["compare_set"]
