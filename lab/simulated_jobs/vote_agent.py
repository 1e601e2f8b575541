"""A simulated agent that votes on a restart: the product's vote and election, and a driver."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

from firstfault_torch import time_limits
from firstfault_torch.protocol.election import Election
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
    Publish,
    Published,
    SetOnce,
    Started,
    TimePassed,
    Unanswered,
    WaitingConnectionBroke,
    WatchKeys,
)
from firstfault_torch.protocol.notices import FATAL_KEY, FailureNotice, RoundNotices
from firstfault_torch.protocol.restart_vote import (
    AskWhoFailed,
    CancelVote,
    DecisionElected,
    DecisionRecorded,
    EndRound,
    FatalFailureAsked,
    FollowDecision,
    HoldElection,
    InterruptElection,
    NobodyElected,
    NodeFailedForGood,
    ProcessEnds,
    ReportLeaving,
    RestartUnagreed,
    RestartVote,
    ReturnToTorch,
    VoteCanceled,
    VoteEvent,
    VoteInstruction,
    VoteOpened,
)
from lab.simulated_jobs.notices import Broadcast, build_notice
from lab.simulated_jobs.process import Machines, Process, Values

NOBODY = b"{}"
"""An empty decision as it is stored."""
LAST_CALL_S = 30.0
"""Torch's: after this a rendezvous with enough nodes begins without the others."""
TORCH_JOIN_TIMEOUT_S = 600.0
_NO_LEADERS = json.dumps({"leaders": [], "complete": False}).encode()


class VoterState(Enum):
    """Where a node stands."""

    WORKING = "its workers run"
    STOPPING = "stops its workers"
    VOTING = "votes"
    JOINING = "is in the next rendezvous"
    RESTARTED = "its workers run again"
    FAILED = "ends with a failure"


class Rendezvous:
    """Torch's next rendezvous."""

    def __init__(self, nodes: int, min_nodes: int) -> None:
        self.nodes = nodes
        self.min_nodes = min_nodes
        self.joined: dict[int, float] = {}
        """When each group rank joined."""
        self.began_at: float | None = None
        self.has_fatal_failure = False
        """Whether a fatal failure was in the store before it began."""

    def begins(self, now: float) -> bool:
        """Whether the next round begins, or has begun."""
        if self.began_at is None and len(self.joined) >= self.min_nodes:
            enough_since = sorted(self.joined.values())[self.min_nodes - 1]
            if len(self.joined) >= self.nodes or now >= enough_since + LAST_CALL_S:
                self.began_at = now
        return self.began_at is not None


class VoteAgent(Process):
    """One node's agent, whose job may restart."""

    def __init__(
        self,
        rank: int,
        machines: Machines,
        seed: str,
        *,
        vote: RestartVote,
        notices: RoundNotices,
        rendezvous: Rendezvous,
    ) -> None:
        super().__init__(rank, machines, seed)
        self.state = VoterState.WORKING
        self.vote = vote
        self.refused = False
        """Whether it followed a decision against a restart."""
        self.announces_refusal = True
        self.decides_alone = False
        self.followed = b""
        """The decision that it followed."""
        self.ignored_failure = False
        """Whether it returned to torch although it knew of a fatal failure."""
        self.has_known_failure = False
        """Whether it has learned of a failure."""
        self.has_forgotten_failure = False
        self.ended_by_torch = False
        self._rendezvous = rendezvous
        self._can_continue = machines.nodes - 1 >= rendezvous.min_nodes
        self._election = Election(rank, machines.nodes, build_limits(machines.nodes), "restart")
        self._is_electing = False
        self._own = b""
        self._deadline_number = 0
        self.broadcast = Broadcast(self, notices, self._take_outcome)

    def start(self) -> None:
        """Listen to the peers."""
        self.broadcast.start()

    # --- what happens to it -------------------------------------------------------------------

    def fail(self) -> None:
        """A worker of this node fails."""
        if self.state is VoterState.WORKING:
            self._notify(self.rank, "ValueError", asks=True)
            self._stop()

    def terminate(self) -> None:
        """A signal tells this process to end."""
        if self.is_terminated or self.state is VoterState.FAILED:
            return
        self.is_terminated = True
        self.note("is told to end")
        if self.state is VoterState.RESTARTED:
            return
        if not self._can_continue:
            self._notify(self.rank, "SIGTERM", asks=False)
        stops = self.state in {VoterState.WORKING, VoterState.STOPPING}
        self.state = VoterState.FAILED
        self._is_electing = False
        self.after(self._draw_stop() if stops else 0.1, self._leave)

    def _leave(self) -> None:
        outcome = self.broadcast.outcome
        failure = outcome.failure if outcome is not None else None
        is_open = failure is not None and failure.asks
        self._feed(ProcessEnds(is_open, has_reported=self._election.arrival_number > 0))
        self._end()

    def notice_death(self, rank: int) -> None:
        """The connection to another agent has broken."""
        listens = {VoterState.WORKING, VoterState.STOPPING, VoterState.VOTING}
        if self.state in listens:
            self.broadcast.mark_lost(rank)
            self._notify(rank, "died", asks=self._can_continue)

    def _notify(self, rank: int, what: str, *, asks: bool) -> None:
        self.broadcast.send(build_notice(rank, what, asks=asks))

    def _take_outcome(self) -> None:
        outcome = self.broadcast.outcome
        failure = outcome.failure if outcome is not None else None
        self.has_forgotten_failure |= self.has_known_failure and failure is None
        self.has_known_failure |= failure is not None
        if failure is None or self.state is VoterState.JOINING:
            return
        if failure.fatal:
            self._feed(NodeFailedForGood())
        if self.state is VoterState.WORKING:
            self._stop()

    def _draw_stop(self) -> float:
        draw = self.draw
        return 0.2 + draw.expovariate(2) if draw.random() < 0.85 else draw.uniform(2, 9)

    def _stop(self) -> None:
        self.state = VoterState.STOPPING
        self.after(self._draw_stop(), self._open_vote)

    def _open_vote(self) -> None:
        if self.state is not VoterState.STOPPING:
            return
        self.state = VoterState.VOTING
        self.broadcast.await_outcome(self._begin_vote)

    def _begin_vote(self) -> None:
        self._feed(VoteOpened(self.broadcast.machine.may_elect(on_restart=True)))

    # --- the vote -----------------------------------------------------------------------------

    def _feed(self, event: VoteEvent) -> None:
        before = self.vote.phase
        instructions = self.vote.handle(event)
        self.note(f"{before.value} -> {self.vote.phase.value}: {type(event).__name__}")
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(  # noqa: C901 - one case for each instruction
        self, instruction: VoteInstruction
    ) -> None:
        match instruction:
            case HoldElection() if self.decides_alone:
                restart = self.draw.random() < 0.6
                own = json.dumps({"restart": restart, "by": self.rank}).encode()
                self._feed(DecisionElected(own, is_own=True))
            case HoldElection():
                self._is_electing = True
                self._elect(Started(b"%d " % self.rank, float(time_limits.SETTLE_SECONDS)))
            case InterruptElection():
                self._elect(Interrupted())
            case CancelVote():
                self._cancel()
            case AskWhoFailed():
                self.broadcast.find_fatal_failure(self._take_fatal_failure)
            case ReportLeaving():
                key = self._election.key
                report = Append(key("reports"), b"%d " % self.rank)
                leaving = Append(key("arrived"), b"%d! " % self.rank)
                self.ask(self.broadcast.using, [report, leaving], 5, lambda _: None)
            case FollowDecision(decision, is_own):
                self._record(lambda: self._follow(decision, is_own=is_own))
            case RestartUnagreed():
                self._record(lambda: self._feed(DecisionRecorded()))
            case EndRound():
                self._fail()
            case ReturnToTorch():
                self._join()

    def _record(self, then: Callable[[], None]) -> None:
        """The uploads of records take a moment, and fatal failures may come."""
        self.after(0.01 + self.draw.expovariate(5), then)

    def _follow(self, decision: bytes, *, is_own: bool) -> None:
        if self.state is not VoterState.VOTING:
            return
        self.followed = decision
        if not json.loads(decision)["restart"]:
            self.refused = True
            first = self.broadcast.machine.first_failure or build_notice(self.rank, "its workers")
            if is_own and self.announces_refusal:
                self.broadcast.send(replace(first, fatal=True, asks=False))
                self._close_rendezvous()
            self.broadcast.refuse_restart(first)
        self._feed(DecisionRecorded())

    def _cancel(self) -> None:
        key = self._election.key
        operations = [SetOnce(key("order"), _NO_LEADERS), SetOnce(key("verdict"), NOBODY)]

        def take(values: Values | None) -> None:
            decision = values[-1] if values is not None else NOBODY
            self._feed(VoteCanceled(b"" if decision == NOBODY else decision))

        seconds = float(time_limits.ELECTION_STEP_TIMEOUT_SECONDS)
        self.ask(self.broadcast.using, operations, seconds, take)

    def _take_fatal_failure(self, found: FailureNotice | None) -> None:
        if found is not None:
            self.broadcast.accept(found)
        self._feed(FatalFailureAsked(has_failed=found is not None))

    # --- the election -------------------------------------------------------------------------

    def _elect(self, event: Event) -> None:
        if not self._is_electing:
            return
        instructions = self._election.handle(event, self.events.now)
        self.note(f"    {self._election.phase.value} after {type(event).__name__}")
        for instruction in instructions:
            self._carry_out_election(instruction)
        self._deadline_number += 1
        number, deadline = self._deadline_number, self._election.deadline
        if deadline is not None:
            self.events.at(deadline, lambda: self.do(lambda: self._pass_time(number)))

    def _pass_time(self, number: int) -> None:
        if number == self._deadline_number:
            self._elect(TimePassed())

    def _carry_out_election(self, instruction: Instruction) -> None:
        match instruction:
            case AskStore():
                self._ask_store(instruction)
            case WatchKeys(names):
                self._watch(names)
            case Lead():
                self._judge(instruction)
            case Publish(is_allowed) if is_allowed:
                self._elect(Published(self._own))
            case Adopt(decision):
                self._is_electing = False
                is_nobody = decision == NOBODY
                is_own = decision == self._own
                self._feed(DecisionElected(b"" if is_nobody else decision, is_own))
            case GiveUp():
                self._is_electing = False
                self._feed(NobodyElected())
            case _:
                pass

    def _ask_store(self, request: AskStore) -> None:
        seconds = time_limits.ELECTION_STEP_TIMEOUT_SECONDS
        seconds += time_limits.ELECTION_STEP_TIMEOUT_SECONDS_PER_NODE * self.machines.nodes
        end = self.events.now + seconds

        def take_second(values: Values | None) -> None:
            answer = Unanswered(request.request) if values is None else None
            self._elect(answer or Answered(request.request, values or ()))

        def take(values: Values | None) -> None:
            if values is not None or self.machines.server.is_dead or self.events.now >= end:
                take_second(values)
                return
            self.broadcast.using = self.connect()
            rest = end - self.events.now
            self.ask(self.broadcast.using, request.operations, rest, take_second)

        self.ask(self.broadcast.using, request.operations, seconds, take)

    def _watch(self, names: Sequence[str]) -> None:
        if not names:
            return
        name, *rest = names

        def take(value: bytes | None) -> None:
            if value is None:
                self._elect(WaitingConnectionBroke())
                return
            self._elect(KeySet(name, value))
            self._watch(rest)

        waiting = self.broadcast.waiting
        waiting.wait(self._election.key(name), lambda value: self.do(lambda: take(value)))

    def _judge(self, leading: Lead) -> None:
        draw = self.draw
        fails, is_slow = draw.random() < 0.05, draw.random() < 0.15
        left = self.machines.nodes - len(leading.lost)
        restart = draw.random() < 0.6 and left >= self._rendezvous.min_nodes

        def end() -> None:
            if fails:
                self._elect(ConclusionFailed())
                return
            self._own = json.dumps({"restart": restart, "by": self.rank}).encode()
            self._elect(Concluded())

        self.after(draw.uniform(1.5, 15) if is_slow else 0.1 + draw.expovariate(5), end)

    # --- afterward ----------------------------------------------------------------------------

    def _join(self) -> None:
        if self.state is not VoterState.VOTING:
            return
        if self.refused:
            self._fail()
            return
        self.ignored_failure = self.broadcast.is_fatal
        self.broadcast.end()
        self.state = VoterState.JOINING
        self.note(self.state.value)
        self.after(0.05 + self.draw.expovariate(5), self._enter_rendezvous)

    def _enter_rendezvous(self) -> None:
        self._rendezvous.joined.setdefault(self.rank, self.events.now)
        self._poll_rendezvous(self.events.now + TORCH_JOIN_TIMEOUT_S)

    def _poll_rendezvous(self, until: float) -> None:
        if self.state is not VoterState.JOINING:
            return
        machines, rendezvous = self.machines, self._rendezvous
        if machines.is_rendezvous_closed or machines.server.is_dead:
            self._fail()
        elif rendezvous.begins(self.events.now):
            rendezvous.has_fatal_failure = FATAL_KEY in machines.server.values
            self.state = VoterState.RESTARTED
            self.note(self.state.value)
        elif self.events.now >= until:
            self.ended_by_torch = True
            self._fail()
        else:
            self.after(0.2, lambda: self._poll_rendezvous(until))

    def _close_rendezvous(self) -> None:
        def close() -> None:
            if not (self.machines.server.is_dead or self.machines.server.is_silent):
                self.machines.is_rendezvous_closed = True

        self.after(0.02 + self.draw.expovariate(20), close)

    def _fail(self) -> None:
        if self.state is VoterState.FAILED:
            return
        self.state = VoterState.FAILED
        self._rendezvous.joined.pop(self.rank, None)
        self.note(self.state.value)
        if self.announces_refusal:
            self._close_rendezvous()  # `launch_agent` does, unless a signal ends it
        self._end()

    def _end(self) -> None:
        """End the process after the verdict; the store's host stays for the others."""
        self.state = VoterState.FAILED
        limit = self.events.now + 2 + time_limits.CONFIRMATIONS_TIMEOUT_SECONDS
        self.after(1.0 + self.draw.expovariate(1), lambda: self._linger(limit))

    def _linger(self, limit: float) -> None:
        busy = {VoterState.STOPPING, VoterState.VOTING, VoterState.FAILED}
        others = (one for one in self.machines.processes if one is not self and one.is_live)
        is_needed = any(isinstance(one, VoteAgent) and one.state in busy for one in others)
        if self.rank == self.machines.host and is_needed and self.events.now < limit:
            self.after(0.2, lambda: self._linger(limit))
        else:
            self.end()
