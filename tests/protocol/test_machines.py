"""What holds for each machine of the protocol, in played schedules."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest

from firstfault_torch.protocol.election import Election, ElectionPhase
from firstfault_torch.protocol.exit_barrier import BarrierPhase, ExitBarrier
from firstfault_torch.protocol.notices import NoticePhase, RoundNotices
from firstfault_torch.protocol.restart_vote import RestartVote
from firstfault_torch.protocol.stalls import StallProtocol
from lab.simulated_jobs.exit_job import ExitJob
from lab.simulated_jobs.job import PRESENT, SimulatedJob
from lab.simulated_jobs.stalls import StallingJob
from lab.simulated_jobs.vote_job import VoteJob

NEEDS_DEADLINE: dict[type, set[Enum]] = {
    Election: {ElectionPhase.COLLECTING, ElectionPhase.FOLLOWING},
    ExitBarrier: {
        BarrierPhase.WAITING,
        BarrierPhase.AWAITING_ACKS,
        BarrierPhase.AWAITING_ROSTER,
    },
    RoundNotices: {NoticePhase.PAUSING, NoticePhase.POLLING},
}
"""Phases in which a machine waits for other agents. In each other phase it waits for an answer of
its driver, which has a limit, or for the end of the round. A stall watch is polled at each
interval.
"""


@dataclass
class Course:
    """What one machine has been told, and has answered."""

    machine: Any
    """As it was before."""
    played: Any
    """The machine itself: while it lives, no other one has its id."""
    steps: list[tuple[tuple[Any, ...], Any]] = field(default_factory=list)


@pytest.fixture
def courses(monkeypatch: pytest.MonkeyPatch) -> list[Course]:
    """Return the courses of all machines that the test plays; each wait of them has a deadline."""
    found: list[Course] = []
    for kind in (Election, ExitBarrier, RestartVote, RoundNotices, StallProtocol):
        monkeypatch.setattr(kind, "handle", _recording(kind.handle, found))
    return found


def _recording(handle: Callable[..., Any], found: list[Course]) -> Callable[..., Any]:
    by_machine: dict[int, Course] = {}

    @functools.wraps(handle)
    def record(self: Any, *told: Any) -> Any:
        course = by_machine.get(id(self))
        if course is None:
            course = by_machine[id(self)] = Course(copy.deepcopy(self), self)
            found.append(course)
        answer = handle(self, *told)
        course.steps.append((told, copy.deepcopy(answer)))
        needs = NEEDS_DEADLINE.get(type(self), set())
        assert self.phase not in needs or self.deadline is not None, self.phase
        return answer

    return record


def _play_failure(seed: int) -> object:
    return SimulatedJob(seed, PRESENT).play()


def _play_exit(seed: int) -> object:
    return ExitJob(seed).play()


def _play_vote(seed: int) -> object:
    return VoteJob(seed).play()


def _play_stalls(seed: int) -> object:
    return StallingJob(seed, days=0.1).play()


@pytest.mark.parametrize(
    ("play", "kinds", "last"),
    [
        (_play_failure, {Election, RoundNotices}, 20_000),
        (_play_exit, {ExitBarrier, RoundNotices}, 10_000),
        (_play_vote, {RestartVote, Election, RoundNotices}, 10_000),
        (_play_stalls, {StallProtocol, Election}, 1_000),
    ],
    ids=["failure", "exit", "vote", "stalls"],
)
def test_a_machine_answers_the_same_again_and_waits_with_a_deadline(
    play: Callable[[int], object],
    kinds: set[type],
    last: int,
    courses: list[Course],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each hundredth schedule, with the events of each agent given to a new machine."""
    played = [play(seed) for seed in range(0, last, 100)]
    assert played
    monkeypatch.undo()
    assert {type(course.machine) for course in courses} == kinds
    for course in courses:
        for told, answer in course.steps:
            assert course.machine.handle(*told) == answer
