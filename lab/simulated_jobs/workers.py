"""The workers of a simulated node, and its main thread, which stops them as `NodeStop` decides."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.model import TERMINATED
from firstfault_torch import time_limits
from firstfault_torch.protocol.notices import FailureNotice
from firstfault_torch.protocol.stopping import (
    AgentTerminated,
    AskPeers,
    AwaitEnds,
    BroadcastFailure,
    CollectSnapshots,
    DeadlinesExpired,
    EndsAwaited,
    Kill,
    KillAtDeadline,
    NodeStop,
    NoticeReceived,
    PeersAsked,
    Ranks,
    SendSignal,
    StopBegan,
    StopEvent,
    StopInstruction,
    StopPhase,
    StopRequested,
    StopWorkers,
    WorkersAnswered,
    WorkersFailed,
)

if TYPE_CHECKING:
    from lab.simulated_jobs.agent import Agent

TERMINATED_STOP_SECONDS = 30.0
"""How long healthy workers may take after a signal: Flyte's and Kubernetes' grace."""
_NS_PER_SECOND = 1e9
_PER_NODE = [1, 2, 2, 4]
_LONGEST_DEATH_S = 0.3
"""After SIGKILL: the kernel frees the memory."""
_MEAN_LOOK_S = 0.005
"""After about this time the main thread looks; it may be inside torch."""
_WAYS_TO_FAIL = {"raises": 6, "dies": 3, "misses a deadline": 2}
_SHARE_OF_SAVING_WORKERS = 0.25
_SHARE_OF_STUCK_WORKERS = 0.04
_SHARE_OF_SECOND_FAILURES = 0.2
_SHARE_OF_RAISING_WORKERS = 0.05
_SHARE_OF_SLOW_EXITS = 0.1


@dataclass
class Worker:
    """One worker process. Times are those of the schedule."""

    failed_at: float | None = None
    """When it failed by itself."""
    has_reported: bool = False
    has_expired: bool = False
    """Whether its agent killed it at a deadline."""
    ended_at: float | None = None
    signals: int = 0
    """How many it got."""
    killed_after: float | None = None
    """How many seconds after the signals to its node's workers it was killed, if it was."""


class Workers:
    """The workers of one node; `fail`, `terminate` and `accept` are what happens to the node."""

    def __init__(self, agent: Agent, seed: str, *, shares_grace: bool) -> None:
        self._agent = agent
        self._shares_grace = shares_grace
        self._events = agent.events
        draw = self._draw = random.Random(f"{seed}/workers/{agent.rank}")
        self.members = [Worker() for _ in range(draw.choice(_PER_NODE))]
        self._are_saving = draw.random() < _SHARE_OF_SAVING_WORKERS
        self.stop = NodeStop(float(time_limits.STOP_GRACE_SECONDS), TERMINATED_STOP_SECONDS)
        self.began_at: float | None = None
        """When the main thread began to stop them."""
        self._instructions: deque[StopInstruction] = deque()
        self._is_busy = False
        """Whether the main thread stops the workers."""
        self._is_waiting = False
        self._notice: FailureNotice | None = None
        self._interruptions = 0

    # --- what happens to them -----------------------------------------------------------------

    def fail(self) -> None:
        """One of them fails by itself, sometimes two at about the same time."""
        first, *others = self._draw.sample(range(len(self.members)), len(self.members))
        self._fail(first)
        if others and self._draw.random() < _SHARE_OF_SECOND_FAILURES:
            took = self._draw.expovariate(1 / _MEAN_LOOK_S)
            self._agent.after(took, lambda: self._fail(others[0]))

    def _fail(self, rank: int) -> None:
        worker = self.members[rank]
        (way,) = self._draw.choices(list(_WAYS_TO_FAIL), list(_WAYS_TO_FAIL.values()))
        if worker.ended_at is not None or worker.failed_at is not None:
            return
        if way == "misses a deadline":
            took = self._draw.uniform(0.0, 2 * time_limits.WORKER_QUERY_TIMEOUT_SECONDS)
            self._agent.after(took, lambda: self._expire(rank))
            return
        worker.failed_at = self._events.now
        worker.has_reported = way == "raises"
        is_slow = worker.has_reported and self._draw.random() < _SHARE_OF_SLOW_EXITS
        took = self._draw.uniform(1, 12) if is_slow else self._draw.uniform(0.0, 0.5)
        self._end_after(took if worker.has_reported else 0.0, rank)
        self._wake()

    def terminate(self, blocked_seconds: float) -> None:
        """The agent's process is told to end: its signal thread, then its main thread act.

        A main thread that is blocked does nothing for so many seconds; then the signal thread does
        its part.
        """
        if self._shares_grace:
            self._handle(AgentTerminated())
        # An exception interrupts the main thread, which then stops the workers.
        self._interruptions += 1
        self._instructions.clear()
        self._is_waiting = False
        if blocked_seconds:
            self._is_busy = True
            self._agent.after(blocked_seconds, lambda: self._play(StopRequested(TERMINATED)))
        else:
            self._is_busy = False
            self._play(StopRequested(TERMINATED))

    def accept(self, notice: FailureNotice) -> None:
        """A notice of another node wakes the main thread."""
        self._notice = notice
        self._wake()

    def _wake(self) -> None:
        self._agent.after(self._draw.expovariate(1 / _MEAN_LOOK_S), self._look)

    # --- the main thread ----------------------------------------------------------------------

    def _look(self) -> None:
        """Handle a notice, else failures of the workers, as `ReportingAgent._monitor_workers`."""
        if self._is_busy or self.stop.state.phase is not StopPhase.RUNNING:
            return
        ended = self._list(lambda worker: worker.ended_at is not None)
        if self._notice is not None:
            reason, cause = self._notice.reason, self._notice.cause
            seconds = self._notice.stop_seconds if self._shares_grace else 0.0
            self._play(NoticeReceived(reason, cause, seconds, frozenset(ended)))
            return
        reported = {
            rank: int((worker.failed_at or 0.0) * _NS_PER_SECOND)
            for rank, worker in enumerate(self.members)
            if worker.has_reported
        }
        if reported or ended:
            by_end = sorted(ended, key=lambda rank: self.members[rank].ended_at or 0.0)
            self._play(WorkersFailed(reported, tuple(by_end)))

    def _play(self, event: StopEvent) -> None:
        self._instructions += self._handle(event)
        self._is_busy = True
        while self._instructions:
            if not self._carry_out(self._instructions.popleft()):
                return  # its answer comes later
        self._is_busy = False
        if self.stop.state.phase is StopPhase.STOPPED:
            self._agent.report()

    def _answer_later(self, seconds: float, build: Callable[[], StopEvent]) -> None:
        interruptions = self._interruptions

        def answer() -> None:
            if interruptions == self._interruptions:
                self._play(build())

        self._agent.after(seconds, answer)

    def _carry_out(self, instruction: StopInstruction) -> bool:
        """Do what an instruction says; return whether the next one may follow now."""
        draw = self._draw
        match instruction:
            case BroadcastFailure():
                self._agent.notify("ValueError", 0.0)
            case StopWorkers():
                self._begin(instruction)
            case CollectSnapshots(ranks, seconds):
                took = 2 * time_limits.WORKER_QUERY_TIMEOUT_SECONDS * draw.random()
                reported = self._choose(ranks, _SHARE_OF_RAISING_WORKERS)
                took += seconds * draw.random() if reported else 0.0
                self._answer_later(took, lambda: self._report_raised(reported))
                return False
            case SendSignal(ranks):
                self._signal(ranks)
            case AwaitEnds():
                self._is_waiting = True
                self._await_ends()
                return False
            case AskPeers():
                self._ask_peers()
                return False
            case Kill(ranks):
                self._kill(ranks)
            case _:
                pass
        return True

    def _begin(self, request: StopWorkers) -> None:
        self.began_at = self._events.now
        began_ns = int(self._events.now * _NS_PER_SECOND)
        self._agent.begin_stop(request.reason)
        event = StopBegan(request, began_ns, self._running, frozenset(), frozenset())
        self._instructions += self._handle(event)

    def _report_raised(self, reported: Ranks) -> WorkersAnswered:
        for rank in reported:
            worker = self.members[rank]
            worker.failed_at = worker.failed_at or self._events.now
            self._end_after(self._draw.uniform(0.0, 0.5), rank)
        return WorkersAnswered(reported, frozenset())

    def _signal(self, ranks: Ranks) -> None:
        for rank in sorted(ranks):
            worker = self.members[rank]
            if worker.signals == 0:
                worker.signals += 1
                draw = self._draw
                took = draw.uniform(2, 25) if self._are_saving else 0.2 + draw.expovariate(2)
                if draw.random() >= _SHARE_OF_STUCK_WORKERS:  # else only SIGKILL ends it
                    self._end_after(took, rank)

    def _await_ends(self) -> None:
        """Go on when they have ended or their time is over; called at each end, too."""
        if not self._is_waiting:
            return
        state, now, running = self.stop.state, self._events.now, self._running
        if not state.is_over(running, now):
            pause = max(state.deadline - now, time_limits.STOP_POLL_SECONDS)
            self._agent.after(pause, self._await_ends)
            return
        self._is_waiting = False
        self._play(EndsAwaited(running))

    def _ask_peers(self) -> None:
        interruptions, is_over = self._interruptions, False

        def answer(value: bytes | None) -> None:
            nonlocal is_over
            if not is_over and interruptions == self._interruptions:
                is_over = True
                self._play(PeersAsked(bool(value)))

        if self._shares_grace:
            self._agent.ask_for_grace(answer)
        else:
            answer(None)

    # --- the processes ------------------------------------------------------------------------

    @property
    def _running(self) -> Ranks:
        return frozenset(self._list(lambda worker: worker.ended_at is None))

    def _expire(self, rank: int) -> None:
        """A thread of the agent finds that a worker hasn't kept its deadline."""
        if self.members[rank].ended_at is not None:
            return
        for instruction in self._handle(DeadlinesExpired(frozenset({rank}))):
            if isinstance(instruction, KillAtDeadline):
                self._agent.note(f"kills worker {rank} at its deadline")
                self.members[rank].failed_at = self._events.now
                self.members[rank].has_expired = True
                self._end_after(self._draw.uniform(0.0, _LONGEST_DEATH_S), rank)

    def _kill(self, ranks: Ranks) -> None:
        self._agent.note(f"kills workers {sorted(ranks)}")
        for rank in sorted(ranks):
            worker = self.members[rank]
            if worker.ended_at is None:
                worker.killed_after = self._events.now - self.stop.state.waits_from
                self._end_after(self._draw.uniform(0.0, _LONGEST_DEATH_S), rank)

    def _end_after(self, seconds: float, rank: int) -> None:
        self._events.after(seconds, lambda: self._end(rank))

    def _end(self, rank: int) -> None:
        worker = self.members[rank]
        if worker.ended_at is None:
            worker.ended_at = self._events.now
            self._wake()
            self._agent.do(self._await_ends)

    def _handle(self, event: StopEvent) -> list[StopInstruction]:
        return self.stop.handle(event, self._events.now)

    def _list(self, is_one: Callable[[Worker], bool]) -> list[int]:
        return [rank for rank, worker in enumerate(self.members) if is_one(worker)]

    def _choose(self, ranks: Ranks, share: float) -> Ranks:
        return frozenset(rank for rank in sorted(ranks) if self._draw.random() < share)
