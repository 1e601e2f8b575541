"""Agents decide on a restart over a real store, each in a thread of its own, and keep a record."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from firstfault import MultiErrorFileOutputReader
from firstfault.conclude import RestartContext
from firstfault.model import Place, RestartKind, RestartRecord
from firstfault_torch import time_limits
from firstfault_torch.agent.reporter import Reporter
from firstfault_torch.agent.restarts import Restarts
from firstfault_torch.agent.settings import AgentSettings
from firstfault_torch.agent.signals import SignalWatch
from firstfault_torch.node_context import Identity, NodeContext
from firstfault_torch.options import Options
from firstfault_torch.places import get_node_place
from firstfault_torch.protocol.notices import FailureNotice
from firstfault_torch.rounds.election import CollectedReports, VerdictElection
from firstfault_torch.rounds.peers import Peers
from firstfault_torch.rounds.report_packing import ElectedVerdict
from tests.torch_agent.stores import group_on

pytestmark = pytest.mark.forks

LONG_S = 60.0
REFUSED = RestartRecord(
    RestartKind.ROUND,
    0,
    "ValueError, rank 0",
    restart=False,
    reason="the same code would fail again",
    rank=0,
)
ALLOWED = replace(
    REFUSED,
    restart=True,
    reason="it was raised as recoverable",
    fingerprint="1:abcdefabcdef",
    timestamp_ns=time.time_ns(),
)


@dataclass
class Agent:
    """One agent of a round, and what it decides."""

    store: Any
    group_rank: int
    nodes: int
    folder: str
    answer: RestartRecord | None = REFUSED
    contexts: list[RestartContext] = field(default_factory=list)
    reports: list[CollectedReports] = field(default_factory=list)
    decided: RestartRecord | None = None
    closed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        identity = Identity(self.folder, "plain", 0, f"worker-{self.group_rank}")
        self.node_context = NodeContext("evidence", identity)
        self.reporter = Reporter(self.node_context, self.place)
        self.shutdown_requested = threading.Event()
        self.woken = threading.Event()
        self.peers = Peers(
            group_on(self.store, self.group_rank, self.nodes, self.closed.set),
            self.node_context,
            patience_seconds=60.0,
            can_continue_without_node=self.nodes > 1,
            wake=self.woken.set,
            shutdown_requested=self.shutdown_requested,
        )
        self.peers.join({f"joined-{self.group_rank}": b"here"})
        settings = AgentSettings(
            Options(settle_seconds=LONG_S), SignalWatch(), decide_restart=self._decide
        )
        self.restarts = Restarts(settings, self.reporter)
        self.own = FailureNotice(
            "ValueError",
            f"worker-{self.group_rank}",
            self.group_rank,
            0,
            fatal=False,
            asks=True,
        )

    def place(self, local_rank: int | None = None) -> Place:
        del local_rank
        return replace(
            get_node_place(self.node_context),
            group_rank=self.group_rank,
            group_world_size=self.nodes,
        )

    def begin(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        assert self.woken.wait(LONG_S)
        first = self.peers.broadcast.first_failure
        assert first is not None
        self.reporter.report.copies[f"report-{self.group_rank}"] = b"failed"
        self.decided = self.restarts.decide_restart(self.place(), 3, self.peers, first)

    def _decide(
        self,
        node_context: NodeContext,
        reports: CollectedReports,
        context: RestartContext,
    ) -> RestartRecord | None:
        del node_context
        self.contexts.append(context)
        self.reports.append(reports)
        return self.answer


@pytest.fixture(autouse=True)
def _long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no agent take over, or count as dead, because the machine is busy."""
    monkeypatch.setattr(time_limits, "LEADER_TIMEOUT_SECONDS", LONG_S)
    monkeypatch.setattr(time_limits, "ACKNOWLEDGMENT_TIMEOUT_SECONDS", LONG_S)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[..., list[Agent]]]:
    """Make the agents of a round; none of their threads outlives the test."""
    shared = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made: list[Agent] = []

    def make(nodes: int, living: int | None = None, **fields: Any) -> list[Agent]:
        store = PrefixStore(f"round of {nodes}", shared)
        new = [
            Agent(store, rank, nodes, str(tmp_path), **fields) for rank in range(living or nodes)
        ]
        made.extend(new)
        return new

    yield make
    for agent in made:
        agent.peers.end()
        agent.reporter.drain()


def _run(agents: list[Agent]) -> None:
    for thread in [agent.begin() for agent in agents]:
        thread.join(LONG_S)


def test_observing_refuses_no_restart(
    agents: Callable[..., list[Agent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few nodes are the one refusal without a proof; it's observed, too,
    and torch goes on to its rendezvous.
    """
    monkeypatch.setenv("FIRSTFAULT_DECISIONS", "observe")
    too_few = replace(REFUSED, reason="the job needs 2 nodes, and 1 are left")
    (agent,) = agents(1, answer=too_few)
    agent.decided = agent.restarts.decide_restart(agent.place(), 3, agent.peers, agent.own)
    assert agent.decided is not None
    assert agent.decided.restart
    assert (
        agent.decided.reason == f"observed: would not have restarted the workers: {too_few.reason}"
    )


def _records(agents: list[Agent]) -> tuple[RestartRecord, ...]:
    for agent in agents:
        agent.reporter.drain()
    return MultiErrorFileOutputReader(agents[0].node_context.output_prefix).restarts()


def _settled(agents: list[Agent]) -> list[bytes]:
    """Return the verdicts that agents settle on after the attempt has ended."""
    found: list[bytes] = []

    def settle(agent: Agent) -> None:
        for step in agent.peers.settle({}, LONG_S, 0.0, may_leave=True):
            if isinstance(step, CollectedReports) and agent.peers.settlement.announce_publishing():
                # the last one
                step = agent.peers.settlement.publish(b"sealed", durable=True)  # noqa: PLW2901
            if isinstance(step, ElectedVerdict):
                found.append(step.document)
                return

    threads = [threading.Thread(target=settle, args=(agent,)) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    return found


def test_one_agents_refusal_ends_the_job(agents: Callable[..., list[Agent]]) -> None:
    """One agent decides for all; the failure is fatal then, the rendezvous is closed,
    and all can settle again.
    """
    made = agents(3)
    made[1].peers.notify(made[1].own)
    _run(made)
    assert [agent.decided for agent in made] == [REFUSED] * 3
    assert [len(agent.contexts) for agent in made] == [1, 0, 0]
    assert set(made[0].reports[0].copies) == {"report-0", "report-1", "report-2"}
    assert made[0].contexts[0].nodes_left == 3
    assert made[0].closed.wait(LONG_S)
    assert _records(made) == (REFUSED,)
    assert all(agent.peers.broadcast.is_fatal for agent in made)
    assert [agent.peers.broadcast.failure is None for agent in made] == [False, True, False]
    assert _settled(made) == [b"sealed"] * 3


def test_agents_decide_without_a_dead_one(
    agents: Callable[..., list[Agent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others decide without it, and know that it is lost;
    what it said when it joined is there.
    """
    monkeypatch.setattr(time_limits, "ACKNOWLEDGMENT_TIMEOUT_SECONDS", 0.5)
    made = agents(3, living=2, answer=ALLOWED)
    VerdictElection(2, 3).join(made[0].store, {"joined-2": b"here"})
    made[0].peers._report_dead_agent(2, "worker-2")
    _run(made)
    assert [agent.decided for agent in made] == [ALLOWED] * 2
    assert made[0].contexts[0].nodes_left == 2
    assert made[0].reports[0].lost == {2}
    assert "joined-2" in made[0].reports[0].copies


def test_a_terminated_agent_is_not_waited_for(agents: Callable[..., list[Agent]]) -> None:
    """An agent that is terminated hands in its report and is not waited for;
    the job continues without it.
    """
    made = agents(3, answer=ALLOWED)
    made[2].peers.notify(made[2].own)
    assert made[2].woken.wait(LONG_S)
    made[2].peers.leave({"report-2": b"terminated"})
    _run(made[:2])
    assert [agent.decided for agent in made[:2]] == [ALLOWED] * 2
    assert (made[0].contexts[0].nodes_left, made[0].reports[0].lost) == (2, {2})
    assert made[0].reports[0].copies["report-2"] == b"terminated"


def test_all_agents_restart_if_none_can_judge(
    agents: Callable[..., list[Agent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no agent can judge the round, all of them restart as torch does,
    and the node that failed keeps a record.
    """
    monkeypatch.setattr(time_limits, "LEADER_TIMEOUT_SECONDS", 0.4)
    made = agents(2, answer=None)
    made[1].peers.notify(made[1].own)
    _run(made)
    for agent in made:
        assert (agent.decided.restart, agent.decided.is_agreed, agent.decided.rank) == (
            True,
            False,
            0,
        )
    (record,) = _records(made)
    assert "the agents reached no decision in time" in record.reason
    assert "rank 0 on worker-1 failed: ValueError" in record.headline
    assert not any(thread.name == "firstfault-settlement" for thread in threading.enumerate()), (
        "the next round may fork"
    )


class _LateEvent(threading.Event):
    """Waits ten times as long, as the thread of a busy machine does."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(None if timeout is None else 10 * timeout)


@pytest.mark.parametrize("late", [False, True])
def test_a_fatal_failure_ends_the_wait_for_the_decision(
    late: bool, agents: Callable[..., list[Agent]]
) -> None:
    """A node that fails for good ends the wait for the decision;
    then all settle on the verdict on the attempt.
    """
    made = agents(3)
    if late:
        made[1].peers.broadcast._ended = _LateEvent()
    made[1].peers.notify(made[1].own)
    threads = [agent.begin() for agent in made[:2]]
    assert made[2].woken.wait(LONG_S)
    made[2].peers.notify(replace(made[2].own, fatal=True, asks=False))
    for thread in threads:
        thread.join(LONG_S)
    assert [agent.decided for agent in made[:2]] == [None, None]
    assert _records(made) == ()
    if not late:
        assert _settled(made) == [b"sealed"] * 3


def test_unconnected_agents_restart_as_torch_does(agents: Callable[..., list[Agent]]) -> None:
    """With other nodes but without a connection to them, torch's way counts:
    they might decide otherwise.
    """
    (agent,) = agents(2, living=1)
    found = agent.restarts.decide_restart(agent.place(), 3, None, agent.own)
    assert (found.restart, found.is_agreed, agent.contexts) == (True, False, [])


def test_agents_do_not_wait_for_a_node_that_never_joined(
    agents: Callable[..., list[Agent]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Agents do not wait for a node that never joined: it may have failed."""
    made = agents(3, 2)
    monkeypatch.setattr(time_limits, "EXIT_BARRIER_TIMEOUT_SECONDS", 0.25)
    monkeypatch.setattr(time_limits, "EXIT_BARRIER_POLL_SECONDS", 0.25)
    monkeypatch.setattr(time_limits, "FINISH_ACKS_TIMEOUT_SECONDS", 0.2)
    ended: list[FailureNotice | None] = []

    def wait(agent: Agent) -> None:
        ended.append(agent.peers.exit_barrier.await_all(agent.woken))

    waiting = [threading.Thread(target=wait, args=(agent,)) for agent in made]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join(LONG_S)
    assert ended == [None, None]
    assert "some nodes run without firstfault" in caplog.text
