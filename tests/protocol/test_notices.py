"""The notices of a round as pure code: phase by phase, rule by rule; then in simulated jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from firstfault_torch.protocol.messages import (
    Answered,
    Append,
    AskStore,
    Operation,
    Read,
    SetOnce,
    Swap,
    TimePassed,
    Unanswered,
)
from firstfault_torch.protocol.notices import (
    FATAL_KEY,
    FINISHED,
    GRACE_KEY,
    OUTCOME_KEY,
    AskAgain,
    AwaitOutcome,
    CheckHost,
    Connect,
    Connected,
    ConnectionBroke,
    FailureNotice,
    FatalFailurePolled,
    GraceBegan,
    HostChecked,
    LeavingBegan,
    ListeningBegan,
    ListeningEnded,
    NodeFailed,
    NoticeEvent,
    NoticeFound,
    NoticeInstruction,
    NoticeLimits,
    NoticePhase,
    OutcomeOverdue,
    OutcomeSet,
    PassOn,
    PeerLost,
    PollFatalFailure,
    RestartRefused,
    RoundLeft,
    RoundNotices,
    RoundOutcome,
    parse_notice,
)
from lab.simulated_jobs import ends, vote_job
from lab.simulated_jobs.faults import Fault
from lab.simulated_jobs.former_rules import FormerNotices
from lab.simulated_jobs.job import FORMER, PRESENT, Rules, SimulatedJob

LIMITS = NoticeLimits(poll=0.5, lost_store=0.2)
FATAL = FailureNotice("ValueError", "worker-1", 1, 3, "e1-the-root.pb")
VOTE = replace(FATAL, fatal=False, asks=True)
RESTART = replace(FATAL, fatal=False)
OWN = replace(FATAL, node="worker-0", group_rank=0)
VERDICT_ACK = Append("firstfault/heard", b"0 ")
RESTART_ACK = Append("firstfault/restart/heard", b"0 ")


class Node:
    """The notices of node 0."""

    def __init__(self, kind: type[RoundNotices] = RoundNotices) -> None:
        self.notices = kind(0, LIMITS)
        self.now = 100.0

    @property
    def phase(self) -> NoticePhase:
        return self.notices.phase

    @property
    def outcome(self) -> RoundOutcome | None:
        return self.notices.outcome

    def take(self, *events: NoticeEvent) -> list[NoticeInstruction]:
        """Pass on events; return what the last one leads to."""
        found: list[NoticeInstruction] = []
        for event in events:
            found = self.notices.handle(event, self.now)
        return found

    def ask(self, event: NoticeEvent) -> AskStore | AskAgain:
        """Pass on an event that leads to one request, and return it."""
        (request,) = self.take(event)
        assert isinstance(request, AskStore | AskAgain)
        return request

    def answer(self, request: AskStore | AskAgain, *values: bytes) -> list[NoticeInstruction]:
        """Let the store answer a request."""
        assert len(values) == len(request.operations)
        return self.take(Answered(request.request, values))

    def listen(self, *events: NoticeEvent) -> Node:
        """Wait for the outcome, and pass on more events."""
        self.take(ListeningBegan(), Connected(), *events)
        return self

    def pass_time(self) -> list[NoticeInstruction]:
        """Let the deadline come."""
        assert self.notices.deadline is not None
        self.now = self.notices.deadline
        return self.take(TimePassed())


def find_operations(instructions: list[NoticeInstruction]) -> list[Operation]:
    """Return what the store is asked to do."""
    asked = [item for item in instructions if isinstance(item, AskStore | AskAgain)]
    return [operation for request in asked for operation in request.operations]


# --- the listener ---------------------------------------------------------------------------------


def test_a_listener_connects_and_waits() -> None:
    """It has one connection to use, and one to wait with."""
    node = Node()
    assert node.take(ListeningBegan()) == [Connect()]
    assert node.take(Connected()) == [AwaitOutcome()]
    assert node.phase is NoticePhase.WAITING


@pytest.mark.parametrize(
    ("failure", "ack", "phase"),
    [
        (FATAL, VERDICT_ACK, NoticePhase.ENDED),
        (VOTE, RESTART_ACK, NoticePhase.POLLING),
        (RESTART, VERDICT_ACK, NoticePhase.POLLING),
    ],
    ids=["fatal", "vote", "restart"],
)
def test_a_failure_is_passed_on_and_confirmed(
    failure: FailureNotice, ack: Append, phase: NoticePhase
) -> None:
    """In the election for which the agents will report; after a restart it polls."""
    node = Node().listen()
    first, *asked = node.take(OutcomeSet(failure.pack()))
    assert find_operations(asked) == [ack]
    assert first == PassOn(RoundOutcome(failure))
    assert node.phase is phase


def test_a_finished_round_is_passed_on_without_a_confirmation() -> None:
    """No election follows."""
    node = Node().listen()
    assert node.take(OutcomeSet(FINISHED)) == [PassOn(RoundOutcome(finished=True))]
    assert node.phase is NoticePhase.ENDED


def test_a_notice_with_a_newer_version_s_key_is_read() -> None:
    """Unknown keys are ignored, and a key that is missing has its default."""
    text = b'{"what": "ValueError", "node": "worker-1", "since": 7}'
    assert parse_notice(text) == FailureNotice("ValueError", "worker-1")


def test_the_reason_names_the_rank_or_the_agent() -> None:
    """It is the first report, in one line."""
    assert FATAL.reason == "rank 3 on worker-1 failed: ValueError"
    assert replace(FATAL, rank=None).reason == "the agent of worker-1 failed: ValueError"


# --- rule 1: what counts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "found", "counts"),
    [
        (FATAL, replace(FATAL, group_rank=2), FATAL),
        (VOTE, replace(FATAL, group_rank=2), replace(FATAL, group_rank=2)),
        (VOTE, replace(VOTE, group_rank=2), VOTE),
        (FATAL, VOTE, FATAL),
    ],
    ids=["both fatal", "fatal after a restart", "both restarts", "restart after a fatal one"],
)
def test_only_a_fatal_failure_replaces_a_restart(
    known: FailureNotice, found: FailureNotice, counts: FailureNotice
) -> None:
    """Whether a later one is found in the roster, in a vote, or at the exit barrier."""
    node = Node().listen(OutcomeSet(known.pack()))
    passed = node.take(NoticeFound(found))
    assert node.outcome == RoundOutcome(counts)
    assert passed == ([] if counts is known else [PassOn(RoundOutcome(counts))])


def test_no_failure_replaces_a_finish() -> None:
    """All nodes have succeeded."""
    node = Node().listen(OutcomeSet(FINISHED))
    assert node.take(NoticeFound(FATAL)) == []
    assert node.outcome == RoundOutcome(finished=True)


def test_no_finish_replaces_a_restart() -> None:
    """A node that looks once more sees what this agent has learned already."""
    node = Node().listen()
    looking = node.ask(OutcomeOverdue())
    node.take(OutcomeSet(VOTE.pack()))
    assert node.answer(looking, FINISHED) == []
    assert node.outcome == RoundOutcome(VOTE)


def test_after_a_restart_a_fatal_failure_is_looked_for() -> None:
    """A third node may fail for good while two nodes vote."""
    node = Node().listen(OutcomeSet(VOTE.pack()))
    for _ in range(2):
        assert node.pass_time() == [PollFatalFailure()]
        assert node.take(FatalFailurePolled(b"")) == []
    node.pass_time()
    third = replace(FATAL, group_rank=2)
    first, *asked = node.take(FatalFailurePolled(third.pack()))
    assert find_operations(asked) == [VERDICT_ACK]
    assert first == PassOn(RoundOutcome(third))
    assert node.phase is NoticePhase.ENDED


def test_an_outcome_that_is_overdue_is_read() -> None:
    """The waiting connection may be silent; a second answer changes nothing."""
    node = Node().listen()
    looking = node.ask(OutcomeOverdue())
    assert looking.operations == (Read(OUTCOME_KEY),)
    assert node.answer(looking, b"") == []
    first, *asked = node.answer(node.ask(OutcomeOverdue()), FATAL.pack())
    assert find_operations(asked) == [VERDICT_ACK]
    assert first == PassOn(RoundOutcome(FATAL))
    assert node.take(OutcomeOverdue()) == []
    assert node.take(OutcomeSet(FATAL.pack())) == []


@pytest.mark.parametrize("way", ["answer", "roster"])
def test_a_notice_gives_time_from_the_moment_at_which_it_is_known(way: str) -> None:
    """After a signal the workers of other nodes may still be saving their state."""
    node = Node().listen()
    signal = replace(FATAL, stop_seconds=30.0)
    node.now = 5000.0
    if way == "answer":
        node.answer(node.ask(OutcomeOverdue()), signal.pack())
    else:
        node.take(NoticeFound(signal))
    assert node.notices.get_grace_left(5010.0) == 20.0
    assert node.notices.get_grace_left(5040.0) == 0.0


def test_an_own_failure_is_no_other_node_s() -> None:
    """The node that failed doesn't stop because of itself, but knows what ended the round."""
    node = Node().listen(OutcomeSet(OWN.pack()))
    notices = node.notices
    assert (notices.failure, notices.is_fatal, notices.first_failure) == (None, True, OWN)
    assert notices.find_fatal_failure(OWN.pack()) is None
    voting = Node().listen(OutcomeSet(replace(OWN, fatal=False, asks=True).pack())).notices
    assert (voting.restart_request, voting.is_fatal) == (None, False)


@pytest.mark.parametrize(
    ("failure", "fatal", "restart"),
    [(FATAL, FATAL, None), (VOTE, None, VOTE), (RESTART, None, None)],
    ids=["fatal", "vote", "restart"],
)
def test_what_another_node_s_failure_asks_for(
    failure: FailureNotice, fatal: FailureNotice | None, restart: FailureNotice | None
) -> None:
    """Torch itself restarts the workers where no agents vote."""
    notices = Node().listen(OutcomeSet(failure.pack())).notices
    assert (notices.failure, notices.restart_request) == (fatal, restart)
    assert notices.first_failure == (fatal or restart)
    assert notices.may_elect()
    assert notices.may_elect(on_restart=True) is (fatal is None)


# --- rule 2: what is sent -------------------------------------------------------------------------


def test_a_fatal_failure_is_stored_where_a_restart_cannot_hide_it() -> None:
    """And as the outcome unless there is one; this agent knows of it."""
    value = OWN.pack()
    assert Node().listen().ask(NodeFailed(OWN)).operations == (
        Swap(FATAL_KEY, b"", value),
        SetOnce(OUTCOME_KEY, value),
    )


@pytest.mark.parametrize(
    ("first", "second", "is_sent"),
    [(OWN, OWN, False), (OWN, VOTE, False), (VOTE, VOTE, False), (VOTE, OWN, True)],
    ids=["fatal twice", "restart after fatal", "restart twice", "fatal after restart"],
)
def test_only_the_first_failure_is_sent_and_a_fatal_one(
    first: FailureNotice, second: FailureNotice, is_sent: bool
) -> None:
    """A peer's connection may break after this node's worker has failed."""
    node = Node().listen()
    assert find_operations(node.take(NodeFailed(first)))
    assert bool(node.take(NodeFailed(second))) is is_sent


@pytest.mark.parametrize(
    ("event", "operation"),
    [
        (PeerLost(2), Append("firstfault/lost", b"2 ")),
        (LeavingBegan(), Append("firstfault/leaving", b"0 ")),
        (GraceBegan(30.0), Swap(GRACE_KEY, b"", b"30.0")),
    ],
    ids=["a lost peer", "leaving", "grace"],
)
def test_what_else_is_sent(event: NoticeEvent, operation: Operation) -> None:
    """The elections read it, and the nodes that stop their workers."""
    assert Node().listen().ask(event).operations == (operation,)


# --- rule 3: no answer ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [NodeFailed(OWN), PeerLost(2), LeavingBegan(), GraceBegan(30.0), RoundLeft()],
    ids=lambda event: type(event).__name__,
)
def test_what_the_store_has_not_confirmed_is_sent_once_more(event: NoticeEvent) -> None:
    """On a new connection, and not for ever: the listener notices a lost store."""
    node = Node().listen()
    request = node.ask(event)
    again = node.ask(Unanswered(request.request))
    assert again == AskAgain(again.request, request.operations, request.purpose)
    assert node.answer(request, *[b"0"] * len(request.operations)) == [], "too late"
    assert node.take(Unanswered(again.request)) == []


def test_a_confirmation_without_an_answer_is_sent_once_more() -> None:
    """The peers wait only for the reports of agents that have confirmed the failure."""
    node = Node().listen()
    (_, ack) = node.take(OutcomeSet(FATAL.pack()))
    assert isinstance(ack, AskStore)
    assert node.ask(Unanswered(ack.request)).operations == (VERDICT_ACK,)


def test_a_confirmation_that_the_store_never_took_is_sent_when_it_answers() -> None:
    """The store's host was frozen after it had sent the outcome."""
    node = Node().listen()
    (_, ack) = node.take(OutcomeSet(VOTE.pack()))
    assert isinstance(ack, AskStore)
    again = node.ask(Unanswered(ack.request))
    node.take(Unanswered(again.request))
    found = node.answer(node.ask(NodeFailed(replace(VOTE, group_rank=0))), VOTE.pack())
    assert find_operations(found) == [RESTART_ACK]


# --- rule 4: the answer is the outcome ------------------------------------------------------------


def test_the_answer_to_a_notice_is_the_outcome_that_counts() -> None:
    """Another node was faster. The waiting connection may be silent, or say the same later."""
    node = Node().listen()
    request = node.ask(NodeFailed(replace(OWN, fatal=False, asks=True)))
    assert node.answer(request, VOTE.pack()) == [PassOn(RoundOutcome(VOTE))]
    assert node.notices.may_elect(on_restart=True)
    assert find_operations(node.take(OutcomeSet(VOTE.pack()))) == [RESTART_ACK]
    assert node.phase is NoticePhase.POLLING


def test_the_answer_to_a_fatal_notice_is_the_first_fatal_failure() -> None:
    """The outcome is a restart, which it ends."""
    node = Node().listen(OutcomeSet(VOTE.pack()))
    third = replace(FATAL, group_rank=2)
    request = node.ask(NodeFailed(OWN))
    first, *asked = node.answer(request, third.pack(), VOTE.pack())
    assert first == PassOn(RoundOutcome(third))
    assert find_operations(asked) == [VERDICT_ACK]
    assert node.phase is NoticePhase.ENDED


def test_an_answer_on_a_new_connection_is_confirmed() -> None:
    """The waiting connection may be as silent as the one that didn't answer."""
    node = Node().listen()
    again = node.ask(Unanswered(node.ask(NodeFailed(OWN)).request))
    first, *asked = node.answer(again, FATAL.pack(), FATAL.pack())
    assert first == PassOn(RoundOutcome(FATAL))
    assert find_operations(asked) == [VERDICT_ACK]
    assert node.take(OutcomeSet(FATAL.pack())) == []


def test_a_failure_from_the_roster_alone_leads_to_no_election() -> None:
    """The store may be frozen; once it answers, the agents can elect a leader."""
    node = Node().listen(NoticeFound(FATAL))
    assert not node.notices.may_elect()
    node.take(OutcomeSet(FATAL.pack()))
    assert node.notices.may_elect()


# --- rule 5: a broken connection ------------------------------------------------------------------


def test_a_listener_connects_again_if_the_host_listens() -> None:
    """It looks twice: a dying host closes its port a moment after its connections."""
    node = Node().listen()
    assert node.take(ConnectionBroke("reset")) == [CheckHost()]
    assert node.take(HostChecked(is_listening=True)) == []
    assert node.notices.deadline == node.now + LIMITS.lost_store
    assert node.pass_time() == [CheckHost()]
    assert node.take(HostChecked(is_listening=True)) == [Connect()]
    assert node.take(Connected()) == [AwaitOutcome()]


@pytest.mark.parametrize("looks", [1, 2])
def test_a_host_that_does_not_listen_is_lost(looks: int) -> None:
    """Whether at the first look or at the second one."""
    node = Node().listen(ConnectionBroke("reset"))
    if looks == 2:
        node.take(HostChecked(is_listening=True))
        node.pass_time()
    assert node.take(HostChecked(is_listening=False)) == [PassOn(RoundOutcome(lost="reset"))]
    assert node.phase is NoticePhase.ENDED
    assert not node.notices.may_elect()
    assert not node.notices.needs_fatal_failure


def test_a_broken_poll_leads_to_new_connections_and_on_to_polling() -> None:
    """The connection broke while the agents vote."""
    node = Node().listen(OutcomeSet(VOTE.pack()))
    node.pass_time()
    assert node.take(ConnectionBroke("reset")) == [CheckHost()]
    node.take(HostChecked(is_listening=True))
    node.pass_time()
    assert node.take(HostChecked(is_listening=True)) == [Connect()]
    assert node.take(Connected()) == []
    assert node.phase is NoticePhase.POLLING
    assert node.pass_time() == [PollFatalFailure()]


# --- rule 6: a lost store -------------------------------------------------------------------------


def lose_store_while_polling(kind: type[RoundNotices]) -> RoundNotices:
    """Return the notices of an agent whose store is lost after a failure with restarts left."""
    node = Node(kind).listen(OutcomeSet(VOTE.pack()))
    node.pass_time()
    node.take(ConnectionBroke("reset"), HostChecked(is_listening=False))
    return node.notices


def test_a_known_failure_stays_known_when_the_store_is_lost() -> None:
    """The record of the restart names it; the agents can't vote."""
    notices = lose_store_while_polling(RoundNotices)
    assert notices.outcome == RoundOutcome(VOTE, lost="reset")
    assert (notices.restart_request, notices.first_failure) == (VOTE, VOTE)
    assert not notices.may_elect(on_restart=True)
    assert lose_store_while_polling(FormerNotices).restart_request is None


def test_a_failure_from_the_roster_counts_after_the_store_is_lost() -> None:
    """The store stays lost: no election waits for it."""
    node = Node().listen(ConnectionBroke("reset"), HostChecked(is_listening=False))
    assert node.take(NoticeFound(FATAL)) == [PassOn(RoundOutcome(FATAL, lost="reset"))]
    assert node.notices.failure == FATAL
    assert not node.notices.may_elect()


def test_a_store_that_answers_is_not_lost() -> None:
    """Its host was out of reach for a moment."""
    node = Node().listen(ConnectionBroke("reset"), HostChecked(is_listening=False))
    again = node.ask(Unanswered(node.ask(NodeFailed(OWN)).request))
    node.answer(again, OWN.pack(), FATAL.pack())
    assert node.outcome == RoundOutcome(FATAL)
    assert node.notices.may_elect()


# --- the end of the round -------------------------------------------------------------------------


def test_a_refused_restart_is_a_fatal_failure() -> None:
    """The agents have voted; they elect the leader that concludes."""
    node = Node().listen(OutcomeSet(VOTE.pack()))
    refused = RoundOutcome(replace(VOTE, fatal=True, asks=False))
    first, *asked = node.take(RestartRefused(VOTE))
    assert find_operations(asked) == [VERDICT_ACK]
    assert first == PassOn(refused)
    assert node.outcome == refused
    assert node.phase is NoticePhase.ENDED
    assert node.take(RestartRefused(VOTE)) == []


def test_a_fatal_failure_that_was_faster_than_a_refusal_counts() -> None:
    """The agents have the same reason to end."""
    third = replace(FATAL, group_rank=2)
    node = Node().listen(OutcomeSet(VOTE.pack()), NoticeFound(third))
    assert node.take(RestartRefused(VOTE)) == []
    assert node.outcome == RoundOutcome(third)


def test_the_end_of_a_round_sets_its_outcome() -> None:
    """So that the listener ends: it waits in the store, and the next round may fork."""
    node = Node().listen()
    request = node.ask(RoundLeft())
    (operation,) = request.operations
    assert isinstance(operation, SetOnce)
    assert operation.key == OUTCOME_KEY
    over = parse_notice(operation.value)
    node.take(OutcomeSet(operation.value))
    assert node.phase is NoticePhase.ENDED
    assert over is not None
    assert (node.notices.failure, node.notices.restart_request) == (None, None)
    assert node.notices.first_failure is None


@pytest.mark.parametrize("event", [RoundLeft(), ListeningEnded()])
def test_a_listener_that_polls_ends_with_the_round(event: NoticeEvent) -> None:
    """Its node is on its way into the next round, or ends."""
    node = Node().listen(OutcomeSet(VOTE.pack()))
    assert node.take(event) == []
    assert node.phase is NoticePhase.ENDED


def test_a_broken_connection_ends_a_listener_that_is_not_needed() -> None:
    """It doesn't connect again: this process ends."""
    node = Node().listen()
    node.take(ListeningEnded(), ConnectionBroke("interrupted"))
    assert node.phase is NoticePhase.ENDED


# --- all events in all phases ---------------------------------------------------------------------

EVENTS: tuple[NoticeEvent, ...] = (
    ListeningBegan(),
    Connected(),
    ConnectionBroke("reset"),
    OutcomeSet(VOTE.pack()),
    OutcomeSet(FATAL.pack()),
    OutcomeSet(FINISHED),
    HostChecked(is_listening=True),
    HostChecked(is_listening=False),
    FatalFailurePolled(b""),
    FatalFailurePolled(FATAL.pack()),
    NodeFailed(OWN),
    NoticeFound(FATAL),
    RestartRefused(VOTE),
    OutcomeOverdue(),
    PeerLost(1),
    LeavingBegan(),
    GraceBegan(30.0),
    RoundLeft(),
    ListeningEnded(),
    Answered(99, (b"",)),
    Unanswered(99),
    TimePassed(),
)
_PATHS: dict[NoticePhase, tuple[NoticeEvent, ...]] = {
    NoticePhase.CONNECTING: (),
    NoticePhase.WAITING: (Connected(),),
    NoticePhase.CHECKING: (ConnectionBroke("reset"),),
    NoticePhase.PAUSING: (ConnectionBroke("reset"), HostChecked(is_listening=True)),
    NoticePhase.POLLING: (Connected(), OutcomeSet(VOTE.pack())),
    NoticePhase.ASKING: (Connected(), OutcomeSet(VOTE.pack()), TimePassed()),
    NoticePhase.ENDED: (Connected(), OutcomeSet(FATAL.pack())),
}


def _pairs() -> Iterator[tuple[NoticePhase, NoticeEvent]]:
    for phase in NoticePhase:
        for event in EVENTS:
            yield phase, event


@pytest.mark.parametrize(("phase", "event"), list(_pairs()))
def test_each_phase_accepts_each_event(phase: NoticePhase, event: NoticeEvent) -> None:
    """Afterwards something will happen: a deadline, an answer, or the end."""
    node = Node()
    node.take(ListeningBegan(), *_PATHS[phase])
    assert node.phase is phase
    node.take(event)
    assert node.phase not in {NoticePhase.PAUSING, NoticePhase.POLLING} or node.notices.deadline
    assert node.phase is not NoticePhase.ENDED or node.notices.deadline is None


# --- simulated jobs -------------------------------------------------------------------------------


def test_a_failure_stays_known_when_the_host_dies_during_a_vote() -> None:
    """With the former rules the agent forgot it, and the record of the restart blamed itself."""
    faults = [Fault(1.0, "worker", 0, 0.0), Fault(2.0, "kill", 0, 0.0)]
    seed = next(seed for seed in range(20) if vote_job.VoteJob(seed).machines.host == 0)
    assert vote_job.REMEMBERED in ends.find_violations("vote", seed, "forgetful", faults)
    assert ends.find_violations("vote", seed, "present", faults) == {}


@pytest.mark.parametrize(("rules", "is_alone"), [(FORMER, True), (PRESENT, False)])
def test_an_agent_with_a_silent_connection_takes_part_in_the_election(
    rules: Rules, is_alone: bool
) -> None:
    """It learns the outcome from the answer to its own notice. Before, it concluded alone, with
    what it knew, and that verdict was the first.
    """
    faults = [Fault(0.5, "silent connection", 1, 0.0), Fault(1.0, "worker", 1, 0.0)]
    agent = SimulatedJob(1, rules, 3, faults).play().agents[1]
    assert any("concludes alone" in note for note in agent.notes) is is_alone
