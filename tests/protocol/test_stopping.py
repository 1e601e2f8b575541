"""How a node stops its workers, as pure code: rule by rule; then in simulated jobs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import product

import pytest

from firstfault.model import TERMINATED, CausedBy
from firstfault_torch import time_limits
from firstfault_torch.protocol.stopping import (
    AGENT_FAILED,
    NEW_RENDEZVOUS,
    SIBLING_FAILED,
    AgentTerminated,
    AnnounceGrace,
    AskPeers,
    AwaitEnds,
    BroadcastAgentError,
    BroadcastFailure,
    CollectSnapshots,
    DeadlinesExpired,
    DocumentExits,
    EndsAwaited,
    Kill,
    KillAtDeadline,
    NodeStop,
    NoticeReceived,
    PeersAsked,
    Ranks,
    SendSignal,
    Step,
    StopBegan,
    StopEvent,
    StopInstruction,
    StopPhase,
    StopRequested,
    StopState,
    StopWorkers,
    TorchFoundFailure,
    WorkersAnswered,
    WorkersFailed,
)
from lab.simulated_jobs import campaign, workers
from lab.simulated_jobs.faults import Fault
from lab.simulated_jobs.invariants import find_violations
from lab.simulated_jobs.job import FORMER, PRESENT, SimulatedJob
from lab.simulated_jobs.notices import build_notice

SHORT_S = 2.0
LONG_S = 30.0
NOBODY: Ranks = frozenset()
PEER = CausedBy(7, "node-3", "e1.pb")
FAILED = WorkersFailed({0: 5})
NOTICE = NoticeReceived("rank 7 on node-3 failed: boom", PEER, 0.0, NOBODY)
SIGNALLED = NoticeReceived("the agent of node-3 failed", PEER, LONG_S, NOBODY)


@dataclass
class Node:
    """Workers that a test lets run, report and end, driven by the machine; time passes in waits."""

    alive: set[int] = field(default_factory=lambda: {0, 1, 2})
    ignore_signal: set[int] = field(default_factory=set)
    ending: set[int] = field(default_factory=set)
    exiting: set[int] = field(default_factory=set)
    reporting: set[int] = field(default_factory=set)
    ended_by_signal: set[int] = field(default_factory=set)
    has_signal: bool = False
    """Whether a peer has got one."""
    now: float = 100.0
    done: list[StopInstruction] = field(default_factory=list)
    kills: dict[int, float] = field(default_factory=dict)
    """When each worker was killed."""
    interrupted_at: type[StopInstruction] | None = None
    """The instruction that a signal's exception interrupts, once."""

    def __post_init__(self) -> None:
        self.stop = NodeStop(SHORT_S, LONG_S)

    def play(self, event: StopEvent) -> Node:
        """Carry out what an event leads to."""
        instructions = self.stop.handle(event, self.now)
        while instructions:
            instruction, *instructions = instructions
            if isinstance(instruction, self.interrupted_at or ()):
                self.interrupted_at = None
                return self
            self.done.append(instruction)
            answer = self._carry_out(instruction)
            if answer is not None:
                instructions += self.stop.handle(answer, self.now)
        return self

    def _carry_out(self, instruction: StopInstruction) -> StopEvent | None:
        match instruction:
            case StopWorkers():
                sets = map(frozenset, (self.alive, self.ending, self.exiting))
                return StopBegan(instruction, int(self.now * 1e9), *sets)
            case CollectSnapshots():
                self.now += 0.5
                self.alive -= self.ended_by_signal
                return WorkersAnswered(frozenset(self.reporting), frozenset(self.ended_by_signal))
            case SendSignal(ranks):
                self.alive -= ranks - self.ignore_signal
            case AwaitEnds():
                state = self.stop.state
                if self.alive & state.awaited:
                    self.now = max(self.now, state.deadline)
                return EndsAwaited(frozenset(self.alive))
            case AskPeers():
                return PeersAsked(self.has_signal)
            case Kill(ranks):
                self.alive -= ranks
                self.kills |= dict.fromkeys(ranks, self.now)
            case _:
                pass
        return None

    def find(self, kind: type[StopInstruction]) -> list[StopInstruction]:
        """Return what was done of one kind."""
        return [instruction for instruction in self.done if isinstance(instruction, kind)]

    @property
    def signalled(self) -> set[int]:
        """The workers that got the signal."""
        sent = self.find(SendSignal)
        return {rank for one in sent if isinstance(one, SendSignal) for rank in one.local_ranks}

    @property
    def seconds_until_kill(self) -> dict[int, float]:
        """How long each killed worker had, after the signal."""
        return {rank: at - self.stop.state.waits_from for rank, at in self.kills.items()}


# --- rule 1: peers first ----------------------------------------------------------------------


def test_peers_are_informed_before_deaths_are_documented_and_siblings_stopped() -> None:
    """Until the notice arrives, peers see only broken connections."""
    node = Node().play(WorkersFailed({}, (1,)))
    kinds = [type(instruction) for instruction in node.done[:4]]
    assert kinds == [BroadcastFailure, DocumentExits, StopWorkers, CollectSnapshots]
    assert node.stop.state.phase is StopPhase.STOPPED


@pytest.mark.parametrize(
    ("reported", "exited", "first"),
    [
        ({0: 9, 2: 4}, (1,), 2),
        ({2: 4, 1: 4}, (), 1),
        ({}, (2, 0), 2),
    ],
    ids=["the earliest report", "the lower rank of two at once", "without report the first death"],
)
def test_the_first_failure_is_broadcast(
    reported: dict[int, int], exited: tuple[int, ...], first: int
) -> None:
    node = Node().play(WorkersFailed(reported, exited))
    assert node.find(BroadcastFailure) == [BroadcastFailure(first)]
    assert node.stop.state.failed_first == {*reported, *exited}


def test_before_a_new_rendezvous_peers_get_the_same_time() -> None:
    """Their workers lose their peers, and fail."""
    node = Node().play(StopRequested(NEW_RENDEZVOUS))
    assert node.done[0] == AnnounceGrace(LONG_S)


def test_before_an_agent_ends_by_an_error_its_peers_know() -> None:
    """Its workers may take as long to end as in torch."""
    node = Node().play(StopRequested(AGENT_FAILED, "OSError in its agent"))
    assert node.done[0] == BroadcastAgentError("OSError in its agent")


# --- rule 2: who failed first -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "event", "first"),
    [
        (Node(), FAILED, {0}),
        (Node(), WorkersFailed({0: 5}, (1,)), {0, 1}),
        (Node(ending={2}), FAILED, {0, 2}),
        (Node(exiting={2}), FAILED, {0, 2}),
        (Node(reporting={2}), FAILED, {0, 2}),
        (Node(ended_by_signal={1}), FAILED, {0, 1}),
        (Node(), NOTICE, set()),
        (Node(), NoticeReceived("boom", PEER, 0.0, frozenset({1})), {1}),
        (Node(exiting={1}, reporting={2}), NOTICE, {1, 2}),
        (Node(exiting={2}), StopRequested(TERMINATED), set()),
        (Node(reporting={1}), StopRequested(TERMINATED), set()),
        (Node(ended_by_signal={1}), StopRequested(TERMINATED), set()),
        (Node(ending={1}), StopRequested(TERMINATED), {1}),
    ],
    ids=[
        "it reported",
        "it died",
        "the kernel ends it",
        "it had begun to exit",
        "it reports while it is asked",
        "a signal from elsewhere ended it",
        "a peer failed",
        "it died when a peer did",
        "it fails by itself when a peer does",
        "terminated: an exit may be the answer to the signal",
        "terminated: so may an exception",
        "terminated: the signal may have gone to all processes",
        "terminated: the kernel ends it",
    ],
)
def test_who_failed_first(node: Node, event: StopEvent, first: set[int]) -> None:
    """These get no signal; all others that run do."""
    before = set(node.alive)
    node.play(event)
    assert node.stop.state.failed_first == first
    assert node.signalled == before - first


def test_a_worker_that_was_killed_at_a_deadline_failed_first() -> None:
    """Whether or not it has ended when the stop begins."""
    node = Node().play(DeadlinesExpired(frozenset({1})))
    assert node.done == [KillAtDeadline(frozenset({1}))]
    node.play(StopRequested(TERMINATED))
    assert node.stop.state.failed_first == {1}


def test_one_that_failed_has_longer_to_end_than_its_siblings() -> None:
    """It may spend seconds in its exit handlers."""
    node = Node(ignore_signal={1}).play(FAILED)
    assert node.seconds_until_kill == {
        1: SHORT_S,
        0: time_limits.FAILED_WORKER_EXIT_GRACE_SECONDS,
    }


def test_one_that_reported_while_it_was_asked_has_no_more_time_than_its_siblings() -> None:
    """It gets no signal either."""
    node = Node(reporting={1}).play(FAILED)
    assert node.signalled == {2}
    assert node.seconds_until_kill[1] == SHORT_S


def test_one_that_does_not_end_by_sigkill_is_left_to_torch() -> None:
    """A process in uninterruptible sleep."""

    class Sleeping(Node):
        def _carry_out(self, instruction: StopInstruction) -> StopEvent | None:
            answer = super()._carry_out(instruction)
            self.alive.add(1)
            return answer

    node = Sleeping().play(NOTICE)
    assert node.stop.state.phase is StopPhase.STOPPED
    assert node.find(Kill) == [Kill(frozenset({1}))] * 2


def test_what_torch_has_stopped_is_not_stopped_again() -> None:
    """The deaths after torch's look count as stopped; the agent kills nobody."""
    node = Node().play(TorchFoundFailure(frozenset({1}), (1,), 7))
    state = node.stop.state
    assert node.done == [BroadcastFailure(1)]
    assert (state.began_ns, state.failed_first, state.killed_ns) == (7, {1}, None)
    assert node.play(StopRequested(NEW_RENDEZVOUS)).done == [BroadcastFailure(1)]


def test_torch_may_name_no_worker() -> None:
    """Since torch 2.13 it may report UNHEALTHY for one in uninterruptible sleep."""
    node = Node().play(TorchFoundFailure(NOBODY, (), 7))
    assert node.done == [BroadcastFailure(None)]


def test_a_stop_says_because_of_whom() -> None:
    """A failure of a peer, or a sibling."""
    for event, reason, cause in ((FAILED, SIBLING_FAILED, None), (NOTICE, NOTICE.reason, PEER)):
        request = Node().play(event).stop.state.request
        assert request is not None
        assert (request.reason, request.cause) == (reason, cause)


@pytest.mark.parametrize(
    ("event", "seconds"), [(FAILED, 1.0), (NOTICE, 1.0), (StopRequested(TERMINATED), 0.0)]
)
def test_how_long_exceptions_on_their_way_out_are_awaited(event: StopEvent, seconds: float) -> None:
    """Not after a signal to this node: they may be answers to it."""
    (asked,) = Node().play(event).find(CollectSnapshots)
    assert isinstance(asked, CollectSnapshots)
    assert asked.report_seconds == seconds


# --- rules 4 and 5: how long they may take ----------------------------------------------------


@pytest.mark.parametrize(
    ("event", "seconds"),
    [
        (FAILED, SHORT_S),
        (NOTICE, SHORT_S),
        (SIGNALLED, LONG_S),
        (StopRequested(TERMINATED), LONG_S),
        (StopRequested(NEW_RENDEZVOUS), LONG_S),
        (StopRequested(AGENT_FAILED), LONG_S),
    ],
    ids=[
        "a sibling failed",
        "a peer failed",
        "a signal to a peer",
        "a signal",
        "a new rendezvous",
        "the agent failed",
    ],
)
def test_the_time_to_end(event: StopEvent, seconds: float) -> None:
    """Only the siblings of a failure have little."""
    node = Node(ignore_signal={1}).play(event)
    assert node.seconds_until_kill[1] == seconds
    assert node.stop.stop_seconds == seconds


@pytest.mark.parametrize("event", [FAILED, NOTICE], ids=["a sibling failed", "a peer failed"])
def test_a_signal_to_a_peer_lengthens_the_time_before_the_first_is_killed(
    event: StopEvent,
) -> None:
    """Its notice may come after the failures that it causes."""
    node = Node(ignore_signal={1}, has_signal=True).play(event)
    assert node.seconds_until_kill[1] == SHORT_S + LONG_S
    assert node.find(AskPeers) == [AskPeers()]


def test_peers_are_not_asked_if_nobody_would_be_killed() -> None:
    """The store may not answer for seconds."""
    assert Node().play(NOTICE).find(AskPeers) == []
    assert Node(ignore_signal={1}).play(StopRequested(TERMINATED)).find(AskPeers) == []


@pytest.mark.parametrize("when", [StopWorkers, CollectSnapshots, SendSignal, AwaitEnds, AskPeers])
def test_a_signal_to_this_node_lengthens_the_time_at_any_moment(
    when: type[StopInstruction],
) -> None:
    """The signal thread reports it while the main thread stops the workers."""

    class Signalled(Node):
        signalled_at = 0.0

        def _carry_out(self, instruction: StopInstruction) -> StopEvent | None:
            if isinstance(instruction, when) and not self.signalled_at:
                self.signalled_at = self.now
                self.stop.handle(AgentTerminated(), self.now)
            return super()._carry_out(instruction)

    node = Signalled(ignore_signal={1}).play(FAILED)
    assert node.kills[1] == node.signalled_at + LONG_S


@pytest.mark.parametrize(
    ("event", "signalled_after"),
    [(SIGNALLED, None), (FAILED, 1.0)],
    ids=["its notice has it", "this node got one"],
)
def test_workers_that_had_the_time_of_a_signal_do_not_get_it_twice(
    event: StopEvent, signalled_after: float | None
) -> None:
    """The signal is in the store, too, but a process that has to end can't wait for so long."""
    node = Node(ignore_signal={1}, has_signal=True)
    if signalled_after is not None:
        node.stop.handle(AgentTerminated(), node.now + signalled_after)
    node.play(event)
    assert node.find(AskPeers) == []
    assert LONG_S <= node.seconds_until_kill[1] < LONG_S + SHORT_S


def test_a_signal_never_shortens_the_time() -> None:
    node = Node(ignore_signal={1})
    node.stop.handle(AgentTerminated(), node.now - 29)
    node.play(FAILED)
    assert node.seconds_until_kill[1] == SHORT_S


def test_a_sigkill_before_the_time_is_over_is_somebody_elses() -> None:
    """Such as the kernel's, when memory runs out during the grace period."""
    node = Node().play(SIGNALLED)
    state = node.stop.state
    assert state.killed_ns == int((state.waits_from + LONG_S) * 1e9)


# --- rule 6: deadlines ------------------------------------------------------------------------


@pytest.mark.parametrize("event", [FAILED, NOTICE, StopRequested(TERMINATED)])
def test_no_worker_is_killed_at_a_deadline_once_a_stop_has_begun(event: StopEvent) -> None:
    """It waits for the one that failed."""
    node = Node(interrupted_at=CollectSnapshots).play(event)
    assert node.stop.handle(DeadlinesExpired(frozenset({1})), node.now) == []
    assert node.stop.state.expired == NOBODY


# --- rules 3 and 7: interruptions -------------------------------------------------------------


@pytest.mark.parametrize("when", [BroadcastFailure, DocumentExits, StopWorkers])
def test_a_stop_that_had_not_begun_begins_with_the_signal_as_its_reason(
    when: type[StopInstruction],
) -> None:
    """Nobody has been asked or signalled."""
    node = Node(interrupted_at=when).play(FAILED).play(StopRequested(TERMINATED))
    request = node.stop.state.request
    assert request is not None
    assert (request.reason, request.seconds) == (TERMINATED, LONG_S)


@pytest.mark.parametrize("when", [CollectSnapshots, SendSignal, AwaitEnds, AskPeers, Kill])
def test_a_stop_that_a_signal_interrupts_is_carried_on(when: type[StopInstruction]) -> None:
    """It keeps its reason and who failed first, and ends."""
    node = Node(ignore_signal={1}, interrupted_at=when).play(FAILED)
    assert node.stop.state.phase is not StopPhase.STOPPED
    node.play(StopRequested(TERMINATED, sent="SIGINT"))
    state = node.stop.state
    assert state.request is not None
    assert (state.phase, state.request.reason) == (StopPhase.STOPPED, SIBLING_FAILED)
    assert state.failed_first == {0}
    assert node.alive == set()
    is_unsignalled = when is CollectSnapshots
    assert state.request.sent == ("SIGINT" if is_unsignalled else "SIGTERM")
    assert node.seconds_until_kill[1] == (LONG_S if is_unsignalled else SHORT_S)


def test_a_stop_that_is_over_is_not_begun_again() -> None:
    """Torch's `_stop_workers` and `_shutdown` both stop the workers after one failure."""
    node = Node().play(FAILED)
    before = list(node.done)
    for reason in (NEW_RENDEZVOUS, TERMINATED, AGENT_FAILED):
        node.play(StopRequested(reason))
    assert node.done == before


def test_two_threads_may_wait_for_one_stop() -> None:
    """If the main thread is stuck, the signal thread ends the process: an answer of the one may
    come after the other has gone on.
    """
    node = Node(ignore_signal={1}, interrupted_at=AwaitEnds).play(FAILED)
    stop, now = node.stop, node.now
    assert stop.handle(EndsAwaited(frozenset({0})), now) == [AwaitEnds()]
    assert stop.state.phase is StopPhase.SPARING
    assert stop.handle(EndsAwaited(frozenset({0})), now) == [AwaitEnds()]
    assert stop.handle(EndsAwaited(NOBODY), now) == []
    assert stop.handle(EndsAwaited(NOBODY), now) == []


# --- in simulated jobs ------------------------------------------------------------------------

SEEDS = range(600)
SAME_TIME = "I5 the same grace for all nodes after a signal"
HAS_CAUSE = "I7 no worker is stopped without a failure or a signal"
DEADLINE_IS_FIRST = "I14 who was killed at a deadline failed first"
FAILURE_IS_FIRST = "I14 who failed before the stop failed first"
ONE_SIGNAL = "I14 a worker gets one signal, none if it failed first"


class ForgetsDeadlines(NodeStop):
    """A wrong rule: a death at a deadline counts as the stop's work."""

    def _begin(self, event: StopBegan) -> Step:
        self.state = replace(self.state, expired=NOBODY)
        return super()._begin(event)


class SparesNobody(NodeStop):
    """A wrong rule: all others are stopped because of one worker."""

    def _begin(self, event: StopBegan) -> Step:
        first = frozenset(sorted(event.request.failed_first)[:1])
        request = replace(event.request, failed_first=first)
        return super()._begin(replace(event, request=request))


class SignalsAll(NodeStop):
    """A wrong rule: workers that failed first get the signal, too."""

    def _send_signal(self, state: StopState, waits_from: float) -> Step:
        state, (_, wait) = super()._send_signal(state, waits_from)
        return state, [SendSignal(state.alive), wait]


class NeverAsksPeers(NodeStop):
    """A wrong rule: only a signal to this node, or its notice, gives workers more time."""

    def _must_ask_peers(self, now: float) -> bool:
        del now
        return False


class AlwaysAsksPeers(NodeStop):
    """A wrong rule, which the product had: workers may get the time of a signal twice."""

    def _must_ask_peers(self, now: float) -> bool:
        del now
        return not self.state.has_asked_peers


def test_present_rules_stop_workers_for_a_reason_and_give_all_the_same_time() -> None:
    found = campaign.play(SEEDS, PRESENT).seeds
    seen = {SAME_TIME, HAS_CAUSE, DEADLINE_IS_FIRST, FAILURE_IS_FIRST, ONE_SIGNAL}
    assert not found.keys() & seen, found


@pytest.mark.parametrize(
    ("wrong", "kind", "violated"),
    [
        (ForgetsDeadlines, "worker", DEADLINE_IS_FIRST),
        (SparesNobody, "worker", FAILURE_IS_FIRST),
        (SignalsAll, "worker", ONE_SIGNAL),
        (NeverAsksPeers, "signal", SAME_TIME),
        (AlwaysAsksPeers, "signal", SAME_TIME),
    ],
)
def test_the_simulator_sees_a_wrong_rule(
    wrong: type[NodeStop], kind: str, violated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find() -> set[str]:
        jobs = (SimulatedJob(seed, PRESENT, 16, [Fault(1.0, kind, 0, 0.0)]) for seed in range(100))
        return {name for job in jobs for name in dict(find_violations(job.play()))}

    assert violated not in find()
    monkeypatch.setattr(workers, "NodeStop", wrong)
    assert violated in find()


def test_the_simulator_sees_a_stop_without_a_cause() -> None:
    """A notice that nobody has sent."""
    job = SimulatedJob(3, PRESENT, 2, [Fault(20.0, "worker", 0, 0.0)])
    job.agents[1].workers.accept(build_notice(0, "nothing"))
    assert HAS_CAUSE in dict(find_violations(job.play()))


def test_the_former_rules_gave_workers_different_times_after_a_signal() -> None:
    assert campaign.play(SEEDS, FORMER).seeds[SAME_TIME]


# --- each event in each phase -----------------------------------------------------------------

EVENTS: tuple[StopEvent, ...] = (
    FAILED,
    TorchFoundFailure(NOBODY, (), 7),
    NOTICE,
    StopRequested(TERMINATED),
    StopBegan(StopWorkers(SIBLING_FAILED, SHORT_S), 1, frozenset({0, 1}), NOBODY, NOBODY),
    WorkersAnswered(NOBODY, NOBODY),
    EndsAwaited(frozenset({0, 1})),
    EndsAwaited(NOBODY),
    PeersAsked(has_signal=True),
    AgentTerminated(),
    DeadlinesExpired(frozenset({1})),
)


@pytest.mark.parametrize(("first", "second"), list(product(EVENTS, repeat=2)))
def test_each_event_is_accepted_in_each_phase(first: StopEvent, second: StopEvent) -> None:
    """And after any two of them a requested stop comes to its end."""
    node = Node()
    for event in (first, second):
        node.stop.handle(event, node.now)
    node.play(StopRequested(TERMINATED))
    assert node.stop.state.phase is StopPhase.STOPPED
    assert not math.isnan(node.stop.state.kill_time)
