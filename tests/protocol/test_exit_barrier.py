"""The exit barrier as pure code: phase by phase, rule by rule; then in simulated jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from firstfault_torch.protocol.exit_barrier import (
    AcksAwaited,
    AllFinished,
    AnnounceFinished,
    Arrived,
    AskFatalFailure,
    AwaitAcks,
    BarrierCounter,
    BarrierEvent,
    BarrierInstruction,
    BarrierLimits,
    BarrierPhase,
    CheckNames,
    CloseRendezvous,
    Counted,
    CountFirstfaultNodes,
    CountIn,
    ExitBarrier,
    Fail,
    FailWithoutStore,
    FatalFailureRead,
    FirstfaultNodesCounted,
    IgnoreSignals,
    MarkComplete,
    NamesRead,
    OutcomeUnknown,
    PollBarrier,
    Polled,
    ReadOutcome,
    ReadRoster,
    RefuseRestart,
    RendezvousClosed,
    ReportForeignAgents,
    ReportRosterUnread,
    ReportWaiting,
    RosterRead,
    RosterUnanswered,
    RoundFailed,
    StoreLost,
    Succeed,
)
from firstfault_torch.protocol.messages import TimePassed
from lab.simulated_jobs import ends, exit_job
from lab.simulated_jobs.exit_agent import ExitState
from lab.simulated_jobs.exit_job import ExitJob
from lab.simulated_jobs.faults import Fault
from lab.simulated_jobs.notices import build_notice

LIMITS = BarrierLimits(poll=1.0, check=60.0, barrier=300.0, acks=2.0, roster=10.0)
SEEDS = range(120)


FATAL = build_notice(1, "ValueError")
VOTE = build_notice(1, "ValueError", asks=True)
EVENTS: tuple[BarrierEvent, ...] = (
    Arrived(),
    Counted(1),
    Counted(3),
    Counted(None),
    Polled(is_complete=False),
    Polled(is_complete=True),
    NamesRead(None),
    NamesRead(b"0 1 2 "),
    FirstfaultNodesCounted(None),
    FirstfaultNodesCounted(3),
    AllFinished(),
    RoundFailed(FATAL),
    RoundFailed(VOTE),
    StoreLost("reset"),
    OutcomeUnknown(),
    AcksAwaited(),
    RosterRead(has_all=None),
    RosterRead(has_all=False),
    RosterUnanswered(),
    FatalFailureRead(None),
    RendezvousClosed(),
    TimePassed(),
)


class Node:
    """The barrier of node 0 of three."""

    def __init__(self) -> None:
        self.barrier = ExitBarrier(0, 3, LIMITS)
        self.now = 100.0

    @property
    def phase(self) -> BarrierPhase:
        return self.barrier.phase

    def take(self, *events: BarrierEvent) -> list[BarrierInstruction]:
        """Pass on events; return what the last one leads to."""
        found: list[BarrierInstruction] = []
        for event in events:
            found = self.barrier.handle(event, self.now)
        return found

    def wait(self) -> Node:
        """Enter and wait for the others."""
        self.take(Arrived(), Counted(1), Polled(is_complete=False))
        assert self.phase is BarrierPhase.WAITING
        return self

    def wait_until(self, now: float) -> list[BarrierInstruction]:
        """Let time pass while the node waits."""
        self.now = now
        return self.take(TimePassed())


def test_entering_counts_the_agent_and_then_polls() -> None:
    """It counts itself once; if it isn't the last one, it looks whether it waits for anybody."""
    node = Node()
    assert node.take(Arrived()) == [CountIn(BarrierCounter.ENTERED)]
    assert node.take(Counted(2)) == [PollBarrier()]


def test_the_last_agent_completes_the_barrier() -> None:
    """The last one in torch's count marks it, for torch's agents, and announces the end."""
    node = Node()
    assert node.take(Arrived(), Counted(3)) == [
        MarkComplete(BarrierCounter.ENTERED),
        AnnounceFinished(),
    ]


def test_a_late_count_counts() -> None:
    """The store was slow with the answer of the last agent."""
    node = Node()
    node.take(Arrived(), Counted(None), Polled(is_complete=False))
    assert MarkComplete(BarrierCounter.ENTERED) in node.take(Counted(3))


def test_waiting_ends_with_a_poll_each_second() -> None:
    """Each wait has a deadline; then it looks whether torch's barrier is complete."""
    node = Node().wait()
    assert node.barrier.deadline == node.now + LIMITS.poll
    assert node.wait_until(node.now + 1) == [PollBarrier()]
    assert node.take(Polled(is_complete=True)) == [AnnounceFinished()]


def test_each_minute_an_agent_leaves_its_name_and_reads_the_outcome() -> None:
    """The answers of torch's counter and the notice may be lost; the name is appended once."""
    node = Node().wait()
    check = [ReportWaiting(), ReadOutcome()]
    assert node.wait_until(160) == [*check, CheckNames(adds_own=True)]
    assert node.take(NamesRead(b"0 2 ")) == [PollBarrier()]
    node.take(Polled(is_complete=False))
    assert node.wait_until(220) == [*check, CheckNames(adds_own=False)]
    assert node.take(NamesRead(b"0 2 0 1 ")) == [AnnounceFinished()]


def test_a_name_that_was_not_taken_is_left_again() -> None:
    """No answer: perhaps the store doesn't have it; a name may be there twice."""
    node = Node().wait()
    node.wait_until(160)
    node.take(NamesRead(None), Polled(is_complete=False))
    assert CheckNames(adds_own=True) in node.wait_until(220)


def test_a_store_that_is_silent_for_five_minutes_is_lost() -> None:
    """Its host's machine is gone, and no connection breaks."""
    node = Node().wait()
    for minute in range(1, 5):
        node.wait_until(100 + 60 * minute)
        assert node.take(NamesRead(None)) == [PollBarrier()]
        node.take(Polled(is_complete=False))
    assert node.wait_until(400)[-1] == CheckNames(adds_own=True)
    assert node.take(NamesRead(None)) == [ReadRoster()]


@pytest.mark.parametrize(
    ("number", "instructions"),
    [
        (2, [ReportForeignAgents(), AnnounceFinished()]),
        (3, []),
        (None, []),
    ],
    ids=["foreign", "own", "no answer"],
)
def test_after_torchs_limit_it_counts_the_agents_of_firstfault(
    number: int | None, instructions: list[BarrierInstruction]
) -> None:
    """It doesn't wait longer for others: they may have failed, and nobody would learn of it.
    Without an answer it asks again.
    """
    node = Node().wait()
    node.now = 400.0
    node.barrier.handle(TimePassed(), node.now)
    node.take(NamesRead(b"0 "))
    assert node.take(Polled(is_complete=False)) == [CountFirstfaultNodes()]
    assert node.take(FirstfaultNodesCounted(number)) == instructions
    if number is None:
        node.wait_until(460)
        node.take(NamesRead(b"0 "))
        assert node.take(Polled(is_complete=False)) == [CountFirstfaultNodes()]


@pytest.mark.parametrize("event", [AllFinished(), OutcomeUnknown(), StoreLost("reset")])
def test_announcing_leads_to_confirming(event: BarrierEvent) -> None:
    """All nodes have finished, whatever becomes of the store; a signal is no failure now."""
    node = Node().wait()
    node.take(Counted(3))
    assert node.take(event) == [IgnoreSignals(), CountIn(BarrierCounter.FINISHED)]


def test_a_failure_that_was_faster_counts() -> None:
    """An agent died or got a signal while it waited: its peers have that outcome."""
    node = Node().wait()
    node.take(Counted(3))
    assert node.take(RoundFailed(FATAL)) == [Fail(FATAL)]


def test_an_agent_stays_until_all_know_the_outcome() -> None:
    """The store may be in its process; it stays at most two seconds."""
    node = Node().wait()
    node.take(AllFinished())
    assert node.take(Counted(2)) == [AwaitAcks(2.0)]
    assert node.barrier.deadline == node.now + 2
    assert node.take(AcksAwaited()) == [Succeed()]


@pytest.mark.parametrize("number", [3, None])
def test_confirming_ends_at_once_if_all_know_it_or_nobody_answers(number: int | None) -> None:
    """The last one lets the others go."""
    node = Node().wait()
    node.take(AllFinished())
    *marks, last = node.take(Counted(number))
    assert last == Succeed()
    assert marks == ([MarkComplete(BarrierCounter.FINISHED)] if number else [])


def test_an_agent_waits_two_seconds_for_acknowledgments() -> None:
    """One that doesn't answer holds up nobody."""
    node = Node().wait()
    node.take(AllFinished(), Counted(1))
    assert node.wait_until(102) == [Succeed()]


@pytest.mark.parametrize(
    ("roster", "end"),
    [
        (RosterRead(has_all=True), Succeed()),
        (RosterRead(has_all=None), Succeed(unknown="reset")),
        (RosterRead(has_all=False, has_failure=True), FailWithoutStore("reset")),
    ],
)
def test_without_the_store_the_roster_decides(roster: RosterRead, end: BarrierInstruction) -> None:
    """Without a shared folder it counts as finished, as in torch."""
    node = Node().wait()
    assert node.take(StoreLost("reset")) == [ReadRoster()]
    assert node.take(roster) == [end]


def test_roster_entries_may_come_a_moment_later() -> None:
    """The host may have ended because all have finished, before their entries are uploaded."""
    node = Node().wait()
    node.take(StoreLost("reset"))
    assert node.take(RosterRead(has_all=False)) == []
    assert node.wait_until(101) == [ReadRoster()]
    node.now = 110
    assert node.take(RosterRead(has_all=False)) == [FailWithoutStore("reset")]


def test_a_storage_that_does_not_answer_is_asked_again_and_proves_no_failure() -> None:
    """Then this node ends as with torch alone, with a warning. What was missing when the storage
    answered last may be there now.
    """
    node = Node().wait()
    node.take(StoreLost("reset"), RosterRead(has_all=False))
    assert node.wait_until(101) == [ReadRoster()]
    assert node.take(RosterUnanswered()) == []
    assert node.wait_until(102) == [ReadRoster()]
    node.now = 110
    assert node.take(RosterUnanswered()) == [ReportRosterUnread(), Succeed(unknown="reset")]


def test_a_storage_that_answers_again_decides() -> None:
    """The outage was shorter than the wait for late entries."""
    node = Node().wait()
    node.take(StoreLost("reset"), RosterUnanswered())
    assert node.wait_until(101) == [ReadRoster()]
    assert node.take(RosterRead(has_all=True)) == [Succeed()]


def test_a_restart_is_refused() -> None:
    """This node has finished: it ends the vote for which other agents wait."""
    node = Node().wait()
    assert node.take(RoundFailed(VOTE)) == [AskFatalFailure()]
    assert node.take(FatalFailureRead(None)) == [RefuseRestart(VOTE), CloseRendezvous()]
    assert node.take(RendezvousClosed()) == [Fail(VOTE)]


def test_a_fatal_failure_of_a_third_node_counts_instead_of_a_restart() -> None:
    """It has ended the round already."""
    node = Node().wait()
    node.take(RoundFailed(VOTE))
    assert node.take(FatalFailureRead(FATAL)) == [Fail(FATAL)]


def test_after_the_end_nothing_happens() -> None:
    """Each event is accepted."""
    node = Node().wait()
    node.take(RoundFailed(FATAL))
    assert node.phase is BarrierPhase.ENDED
    assert [node.take(event) for event in EVENTS] == [[]] * len(EVENTS)


_PATHS: dict[BarrierPhase, tuple[BarrierEvent, ...]] = {
    BarrierPhase.ENTERING: (),
    BarrierPhase.POLLING: (Counted(1),),
    BarrierPhase.WAITING: (Counted(1), Polled(is_complete=False)),
    BarrierPhase.ANNOUNCING: (Counted(3),),
    BarrierPhase.CONFIRMING: (AllFinished(),),
    BarrierPhase.AWAITING_ACKS: (AllFinished(), Counted(1)),
    BarrierPhase.READING_ROSTER: (StoreLost("reset"),),
    BarrierPhase.AWAITING_ROSTER: (StoreLost("reset"), RosterRead(has_all=False)),
    BarrierPhase.ASKING: (RoundFailed(VOTE),),
    BarrierPhase.CLOSING: (RoundFailed(VOTE), FatalFailureRead(None)),
}


def _pairs() -> Iterator[tuple[BarrierPhase, BarrierEvent]]:
    for phase in _PATHS:
        for event in EVENTS:
            yield phase, event


@pytest.mark.parametrize(("phase", "event"), list(_pairs()))
def test_each_phase_accepts_each_event(phase: BarrierPhase, event: BarrierEvent) -> None:
    """Afterwards something will happen: a deadline, an answer, or the end."""
    node = Node()
    node.take(Arrived(), *_PATHS[phase])
    assert node.phase is phase
    node.take(event)
    waits = {BarrierPhase.WAITING, BarrierPhase.AWAITING_ACKS, BarrierPhase.AWAITING_ROSTER}
    assert node.phase not in waits or node.barrier.deadline is not None


# --- simulated jobs -------------------------------------------------------------------------------


def test_jobs_with_faults_end_alike() -> None:
    """No agent succeeds too early, fails without a failure, or waits without an end."""
    assert ends.play("exit", SEEDS, "present").seeds == {}


@pytest.mark.parametrize(
    ("seed", "faults", "name"),
    [
        # The answer of torch's counter is lost, and nobody is the last.
        (48, [Fault(1.69, "reset", 1, 0.0)], exit_job.ENDS),
        # A firewall has forgotten all connections of a node.
        (33, [Fault(1.11, "forgotten connections", 1, 0.0)], exit_job.ENDS),
        # One agent gets a signal while another sees that all have arrived.
        (1421, [Fault(5.444, "signal", 1, 0.0)], exit_job.DIFFERENT_ENDS),
        # The host ends while a node with a slow link hasn't learned the outcome, and the roster
        # has only some entries yet.
        (1199, [Fault(3.61, "slow link", 1, 8.6)], exit_job.DIFFERENT_ENDS),
        # The host has ended, the agent with a slow link asks the storage, and it doesn't answer.
        (
            1378,
            [Fault(8.41, "storage outage", 0, 12.1), Fault(5.71, "slow link", 2, 8.3)],
            exit_job.FAILURE_OF_SUCCESS,
        ),
    ],
    ids=["lost count", "forgotten connections", "signal", "late entries", "storage outage"],
)
def test_past_faults(seed: int, faults: list[Fault], name: str) -> None:
    """With the former rules each of these schedules is a violation, with the present ones none."""
    assert name in ends.find_violations("exit", seed, "former", faults)
    assert ends.find_violations("exit", seed, "present", faults) == {}


def test_a_lost_store_proves_no_success() -> None:
    """With the wrong rule that it does, an agent succeeds while the workers of another run."""
    name = exit_job.SUCCESS_TOO_EARLY
    faults = ends.shrink("exit", 83, "trusting", name)
    assert name in ends.find_violations("exit", 83, "trusting", faults)
    assert ends.find_violations("exit", 83, "present", faults) == {}


def test_a_notice_that_nobody_gets() -> None:
    """A node is killed at the exit; only the first agent sees it, whose connections a firewall has
    forgotten. If it sent its notice only once, all would wait without end.
    """
    faults = [Fault(8.04, "kill", 6, 0.0), Fault(2.52, "forgotten connections", 0, 0.0)]
    assert exit_job.ENDS in ends.find_violations("exit", 3570, "once", faults)
    assert ends.find_violations("exit", 3570, "present", faults) == {}


@pytest.mark.parametrize(("rules", "is_lost"), [("hasty", True), ("present", False)])
def test_a_host_that_ends_at_once_leaves_a_slow_agent_alone(rules: str, is_lost: bool) -> None:
    """The agents' store ends with its host, so that one waits for acknowledgments."""
    at = max(ExitJob(1, nodes=2).plan.ends)
    job = ExitJob(1, rules, 2, [Fault(at - 0.01, "slow link", 1, 2.5)]).play()
    assert job.plan.host == 0
    assert job.own_agents[1].has_lost_store is is_lost


def test_a_schedule_is_played_again_in_the_same_way() -> None:
    """The trace of a seed is always the same."""
    traces = [ExitJob(4, trace=True).play().events.lines for _ in range(2)]
    assert traces[0]
    assert traces[0] == traces[1]


def test_a_job_of_1000_nodes_succeeds() -> None:
    """All agents end with success, and know why."""
    job = ExitJob(3, nodes=1000, faults=[]).play()
    assert dict(job.find_violations()) == {}
    assert {agent.state for agent in job.own_agents} == {ExitState.SUCCEEDED}
    assert all(agent.is_certain for agent in job.own_agents)
