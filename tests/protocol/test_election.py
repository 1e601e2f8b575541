"""The election as pure code: rule by rule, without a store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from firstfault_torch.protocol.election import LOST_KEY, Election, ElectionPhase
from firstfault_torch.protocol.limits import build_limits
from firstfault_torch.protocol.messages import (
    Adopt,
    Answered,
    Append,
    AskStore,
    Concluded,
    ConclusionFailed,
    Event,
    GiveUp,
    Instruction,
    Interrupted,
    KeySet,
    Lead,
    NoVerdictReason,
    Publish,
    Published,
    Read,
    ShutdownRequested,
    Started,
    Swap,
    TimePassed,
    Unanswered,
    WaitingConnectionBroke,
)

ORDER = b'{"leaders": [0, 1, 2], "complete": true}'
EVENTS: tuple[Event, ...] = (
    Started(b"report", 10.0),
    Answered(1, (b"", b"", b"0 1 ")),
    Unanswered(1),
    KeySet("order", ORDER),
    KeySet("verdict", b"verdict"),
    WaitingConnectionBroke(),
    TimePassed(),
    ShutdownRequested(),
    Concluded(),
    ConclusionFailed(),
    Published(b"own"),
    Interrupted(),
)


class Node:
    """An election of three nodes, with what it asked for last."""

    def __init__(self, own: int = 0) -> None:
        self.election = Election(own, 3, build_limits(3))
        self.now = 100.0
        self.asked: list[AskStore] = []

    @property
    def phase(self) -> ElectionPhase:
        return self.election.phase

    def take(self, event: Event) -> list[Instruction]:
        """Pass on an event; return what isn't a request to the store."""
        found = self.election.handle(event, self.now)
        self.asked += [item for item in found if isinstance(item, AskStore)]
        return [item for item in found if not isinstance(item, AskStore)]

    def answer(self, *values: bytes) -> list[Instruction]:
        """Answer the last numbered request."""
        request = next(item for item in reversed(self.asked) if item.request)
        assert len(values) == len(request.operations), request
        return self.take(Answered(request.request, values))

    def report(self, arrived: bytes) -> Node:
        self.take(Started(b"report", 10.0))
        self.answer(b"", b"", arrived)
        return self

    def look_until(self, end: float, *values: bytes) -> None:
        """Let the time pass, and answer each look with these values."""
        while self.phase is ElectionPhase.COLLECTING and (self.election.deadline or 0.0) <= end:
            self.now = self.election.deadline or 0.0
            self.take(TimePassed())
            self.answer(*values)

    def lead(self) -> Node:
        """Come to its own turn, and become the leader."""
        self.take(KeySet("order", ORDER))
        self.answer(b"", b"0", b"0 1 2 ", b"0 1 2 ", b"", b"")
        (leading,) = self.answer(b"0", b"reports")
        assert isinstance(leading, Lead)
        return self


def test_the_last_agent_to_report_publishes_the_order() -> None:
    node = Node(2).report(b"0 1 2 ")
    assert node.phase is ElectionPhase.CLOSING
    operation = node.asked[-1].operations[0]
    assert operation == Swap("firstfault/leader", b"", b"0")


def test_an_agent_that_must_end_comes_last_in_the_order() -> None:
    node = Node(1)
    node.take(ShutdownRequested())
    node.report(b"1! 0 2 ")
    assert b"1! " in [
        item.value
        for request in node.asked
        for item in request.operations
        if isinstance(item, Append)
    ]
    assert b'"leaders": [0, 2, 1]' in node.asked[-1].operations[1].value  # type: ignore[union-attr]


def test_a_signal_is_announced_when_it_comes() -> None:
    node = Node(1).report(b"1 ")
    node.take(ShutdownRequested())
    assert node.asked[-1].operations == (Append("firstfault/arrived", b"1! "),)


def test_a_deadline_reads_the_order_in_the_store() -> None:
    node = Node(1).report(b"1 ")
    node.take(TimePassed())
    assert node.phase is ElectionPhase.LOOKING
    assert Read("firstfault/order") in node.asked[-1].operations
    node.answer(ORDER, b"0 1 2 ", b"0 1 2 ", b"", b"")
    assert node.phase is ElectionPhase.FOLLOWING


def test_a_broken_waiting_connection_is_no_lost_store() -> None:
    node = Node(1).report(b"1 ")
    assert node.take(WaitingConnectionBroke()) == []
    assert node.phase is ElectionPhase.LOOKING


@pytest.mark.parametrize(
    ("lost", "is_complete"), [(b"", b"false"), (b"2 ", b"true")], ids=["unreported", "lost"]
)
def test_an_agent_is_lost_only_if_its_connection_broke(lost: bytes, is_complete: bytes) -> None:
    node = Node(0).report(b"0 ")
    node.take(TimePassed())
    node.answer(b"", b"0 1 ", b"0 1 ", lost, b"")
    assert node.phase is ElectionPhase.CLOSING
    assert b'"complete": ' + is_complete in node.asked[-1].operations[1].value  # type: ignore[union-attr]
    assert Read(LOST_KEY) in node.asked[-2].operations


def test_no_answer_is_no_permission_to_publish() -> None:
    node = Node(0).report(b"0 ").lead()
    node.take(Concluded())
    found = node.take(Unanswered(node.asked[-1].request))
    assert found == [Publish(is_allowed=False), GiveUp(NoVerdictReason.STORE_LOST)]


def test_a_leader_takes_a_verdict_that_arrives_while_it_concludes() -> None:
    node = Node(0).report(b"0 ").lead()
    assert node.take(KeySet("verdict", b"another's")) == []
    assert node.take(Concluded()) == [Publish(is_allowed=False), Adopt(b"another's")]


def test_a_leader_that_was_replaced_publishes_nothing() -> None:
    node = Node(0).report(b"0 ").lead()
    node.take(Concluded())
    assert node.answer(b"1") == [Publish(is_allowed=False)]
    assert node.phase is ElectionPhase.FOLLOWING


def test_the_first_verdict_in_the_store_counts() -> None:
    node = Node(0).report(b"0 ").lead()
    node.take(Concluded())
    assert node.answer(b"0!") == [Publish(is_allowed=True)]
    node.take(Published(b"own"))
    assert node.answer(b"another's") == [Adopt(b"another's")]


def test_a_leader_that_publishes_has_more_time_and_then_a_successor() -> None:
    node = Node(1).report(b"1 ")
    node.take(KeySet("order", ORDER))
    node.take(TimePassed())
    node.answer(b"", b"0!")
    assert node.phase is ElectionPhase.FOLLOWING
    assert node.election.deadline == node.now + build_limits(3).publishing
    node.take(TimePassed())
    node.answer(b"", b"0!")
    node.answer(b"", b"0!", b"0 1 2 ", b"", b"", b"")
    (leading,) = node.answer(b"1", b"reports")
    assert isinstance(leading, Lead)


@pytest.mark.parametrize(
    ("leaving", "phase", "reason"),
    [
        (b"1 ", ElectionPhase.ENDED, [GiveUp(NoVerdictReason.LEFT_TO_OTHERS)]),
        (b"1 0 2 ", ElectionPhase.CLOSING, []),
    ],
    ids=["others stay", "all leave"],
)
def test_an_agent_that_must_end_closes_no_arrivals_while_others_stay(
    leaving: bytes, phase: ElectionPhase, reason: list[Instruction]
) -> None:
    node = Node(1).report(b"1 ")
    node.take(ShutdownRequested())
    node.now += build_limits(3).hurried_settle
    node.take(TimePassed())
    assert node.answer(b"", b"1! ", b"0 1 2 ", b"", leaving) == reason
    assert node.phase is phase


def test_an_agent_that_was_frozen_waits_longer_for_the_others() -> None:
    """It may host the store, so that no other agent could hand in its report meanwhile."""
    node = Node(0).report(b"0 ")
    assert node.election.deadline is not None
    node.now = node.election.deadline + 41.0
    node.take(TimePassed())
    seen = b"", b"0 ", b"0 1 2 ", b"", b""
    node.answer(*seen)
    closes_at = 100.0 + 10.0 + 41.0
    node.look_until(closes_at - 0.1, *seen)
    assert node.phase is ElectionPhase.COLLECTING
    node.look_until(closes_at, *seen)
    assert node.phase is ElectionPhase.CLOSING


def test_an_agent_that_must_end_closes_the_arrivals_after_the_usual_time() -> None:
    node = Node(1).report(b"1 ")
    node.look_until(100.0 + 9.5, b"", b"1 ", b"0 1 2 ", b"", b"")
    node.take(ShutdownRequested())
    node.look_until(100.0 + 10.0, b"", b"1! ", b"0 1 2 ", b"", b"")
    assert node.phase is ElectionPhase.CLOSING


@pytest.mark.parametrize(
    ("leaving", "reason"),
    [(b"1 ", NoVerdictReason.LEFT_TO_OTHERS), (b"0 1 2 ", NoVerdictReason.UNDECIDED)],
    ids=["others stay", "all leave"],
)
def test_an_agent_that_must_end_leaves_a_slow_leader_alone(
    leaving: bytes, reason: NoVerdictReason
) -> None:
    node = Node(1).report(b"1 ")
    node.take(TimePassed())
    node.answer(ORDER, b"0 1 2 ", b"0 1 2 ", b"", leaving)
    node.take(ShutdownRequested())
    node.now += build_limits(3).hurried_leader
    node.take(TimePassed())
    assert node.answer(b"", b"0") == [GiveUp(reason)]


def test_an_agent_gives_up_if_what_it_handed_in_was_deleted() -> None:
    """It was frozen, and the stall is long over."""
    node = Node(1).report(b"1 ")
    node.take(TimePassed())
    nothing = [b""] * len(node.asked[-1].operations)
    assert node.answer(*nothing) == [GiveUp(NoVerdictReason.UNDECIDED)]


def _reach(phase: ElectionPhase) -> Node:  # noqa: C901 - one case for each phase
    """Return a node in a phase."""
    node = Node(0)
    match phase:
        case ElectionPhase.REPORTING:
            node.take(Started(b"report", 10.0))
        case ElectionPhase.COLLECTING:
            node.report(b"0 ")
        case ElectionPhase.LOOKING:
            node.report(b"0 ").take(TimePassed())
        case ElectionPhase.CLOSING:
            node.report(b"0 1 2 ")
        case ElectionPhase.FOLLOWING | ElectionPhase.ASKING:
            node = Node(1).report(b"1 ")
            node.take(KeySet("order", ORDER))
            if phase is ElectionPhase.ASKING:
                node.take(TimePassed())
        case ElectionPhase.TAKING:
            node.report(b"0 ").take(KeySet("order", ORDER))
        case ElectionPhase.ENDED:
            node.report(b"0 ").take(Interrupted())
        case _:
            node.report(b"0 ").lead()
            if phase is not ElectionPhase.LEADING:
                node.take(Concluded())
            if phase in {ElectionPhase.PUBLISHING, ElectionPhase.SHARING}:
                node.answer(b"0!")
            if phase is ElectionPhase.SHARING:
                node.take(Published(b"own"))
    assert node.phase is phase
    return node


def _pairs() -> Iterator[tuple[ElectionPhase, Event]]:
    for phase in ElectionPhase:
        for event in EVENTS:
            yield phase, event


@pytest.mark.parametrize(
    ("phase", "event"),
    list(_pairs()),
    ids=lambda item: item.value if isinstance(item, ElectionPhase) else type(item).__name__,
)
def test_each_phase_accepts_each_event(phase: ElectionPhase, event: Event) -> None:
    """It raises nothing, and afterwards something will happen: a deadline, a request, or an end."""
    if phase is ElectionPhase.REPORTING and isinstance(event, Answered):
        pytest.skip("the answer of the report, tested above")
    node = _reach(phase)
    node.take(event)
    waits_for_agents = {ElectionPhase.COLLECTING, ElectionPhase.FOLLOWING}
    assert node.phase not in waits_for_agents or node.election.deadline is not None
