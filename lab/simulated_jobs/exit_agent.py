"""A simulated agent at the end of its job: the product's exit barrier, and around it a driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from firstfault_torch import time_limits
from firstfault_torch.protocol.exit_barrier import (
    NAMES_KEY,
    AcksAwaited,
    AllFinished,
    AnnounceFinished,
    Arrived,
    AskFatalFailure,
    AwaitAcks,
    BarrierCounter,
    BarrierEvent,
    BarrierInstruction,
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
    RosterRead,
    RosterUnanswered,
    RoundFailed,
    StoreLost,
    Succeed,
)
from firstfault_torch.protocol.messages import Append, Operation, Read, SetOnce, TimePassed
from firstfault_torch.protocol.notices import (
    FATAL_KEY,
    FINISHED,
    OUTCOME_KEY,
    RoundNotices,
    parse_notice,
)
from lab.simulated_jobs.notices import Broadcast, build_notice
from lab.simulated_jobs.process import Machines, Process, Values
from lab.simulated_jobs.store import Connection, Increment

JOINED_KEY = "firstfault/joined"
_KEYS = {
    BarrierCounter.ENTERED: ("torch/num_members", "torch/last_member"),
    BarrierCounter.FINISHED: ("firstfault/know", "firstfault/all-know"),
}
_STORE_S = float(time_limits.STORE_TIMEOUT_SECONDS)
_POLL_ANSWER_S = 0.5
"""How long a poll waits for its answer, which else counts at the next one."""
_ROSTER_READ_S = 10.0
_SHARE_OF_SLOW_UPLOADS = 0.05


class ExitState(Enum):
    """Where a node stands."""

    WORKING = "its workers run"
    WAITING = "waits at the exit"
    RESTARTING = "wants to restart"
    SUCCEEDED = "has ended with success"
    FAILED = "has ended with a failure"


@dataclass
class Roster:
    """The nodes' states in the storage, as a shared folder shows them; nothing without one."""

    events_down_until: float = 0.0
    is_shared: bool = True
    succeeded: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)


class ExitAgent(Process):
    """One node's agent, whose workers succeed at a time of their own."""

    def __init__(
        self,
        rank: int,
        machines: Machines,
        seed: str,
        *,
        barrier: ExitBarrier,
        notices: RoundNotices,
        roster: Roster,
        can_restart: bool,
    ) -> None:
        super().__init__(rank, machines, seed)
        self.state = ExitState.WORKING
        self.has_succeeded = False
        """Whether its workers have."""
        self.is_certain = False
        """Whether it ended with success because it knew that all nodes had finished."""
        self.has_lost_store = False
        self.reads_outcome_newly = True
        """Also on a connection that was opened at the exit."""
        self.arrived_at = 0.0
        self.barrier = barrier
        self._roster = roster
        self._can_restart = can_restart
        self._is_finished = False
        """Whether a signal is no failure any more."""
        self._torch = self.connect()
        self._own: Connection | None = None
        self._late: list[BarrierEvent] = []
        self._is_polling = False
        self._poll_result: bool | None = None
        self._deadline_number = 0
        self.broadcast = Broadcast(self, notices, self._take_outcome)
        self.watch_end: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Listen to the peers."""
        self.broadcast.start()
        if self._roster.is_shared:
            self.after(time_limits.ROSTER_POLL_SECONDS, self._poll_roster)

    def _poll_roster(self) -> None:
        """Accept another node's failure that only the roster has, unless it may restart."""
        failed = sorted(self._roster.failed - {self.rank})
        waits = time_limits.ROSTER_FAILURE_GRACE_SECONDS if self._can_restart else 0.1

        if failed:
            notice = build_notice(failed[0], "in the roster")
            self.after(waits, lambda: self.broadcast.accept(notice))
        else:
            self.after(time_limits.ROSTER_POLL_SECONDS, self._poll_roster)

    # --- what happens to it -------------------------------------------------------------------

    def succeed(self) -> None:
        """Its workers have succeeded."""
        if self.state is not ExitState.WORKING:
            return
        self.has_succeeded = True
        self.state = ExitState.WAITING
        self.arrived_at = self.events.now
        self._upload(self._roster.succeeded)
        self._feed(Arrived())

    def fail(self) -> None:
        """A worker of this node fails."""
        if self.state is not ExitState.WORKING:
            return
        self.broadcast.send(build_notice(self.rank, "ValueError", asks=self._can_restart))
        self._stop()

    def terminate(self) -> None:
        """A signal tells this process to end."""
        has_ended = self.state in {ExitState.SUCCEEDED, ExitState.FAILED}
        if self.is_terminated or self._is_finished or has_ended:
            return
        self.is_terminated = True
        self.note("is told to end")
        self.state = ExitState.FAILED
        notice = build_notice(self.rank, "SIGTERM")
        self.broadcast.send(notice, lambda: self._end(ExitState.FAILED))

    def notice_death(self, rank: int) -> None:
        """The connection to another agent has broken."""
        self.broadcast.send(build_notice(rank, "died", asks=self._can_restart))

    def _take_outcome(self) -> None:
        outcome = self.broadcast.outcome
        if self.state is ExitState.WAITING:
            self._pass_outcome()
        elif outcome is None or outcome.failure is None:
            pass  # its workers run on; without the store they fail by themselves
        elif self.state is ExitState.WORKING:
            self._stop()
        elif self.state is ExitState.RESTARTING and self.broadcast.is_fatal:
            self._end(ExitState.FAILED)

    def _stop(self) -> None:
        """Stop the workers; then end, or wait for the others to restart."""
        may_restart = self._can_restart and not self.broadcast.is_fatal
        if not may_restart:
            self._end(ExitState.FAILED)
            return
        self.state = ExitState.RESTARTING
        self._await_rendezvous()

    def _await_rendezvous(self) -> None:
        if self.state is not ExitState.RESTARTING:
            return
        if self.machines.is_rendezvous_closed:
            self._end(ExitState.FAILED)
        else:
            self.after(0.5, self._await_rendezvous)

    # --- the barrier --------------------------------------------------------------------------

    def _feed(self, event: BarrierEvent) -> None:
        if self.state is not ExitState.WAITING:
            return
        before = self.barrier.phase
        instructions = self.barrier.handle(event, self.events.now)
        self.note(f"{before.value} -> {self.barrier.phase.value}: {type(event).__name__}")
        for instruction in instructions:
            self._carry_out(instruction)
        self._deadline_number += 1
        number, deadline = self._deadline_number, self.barrier.deadline
        if deadline is not None:
            self.events.at(deadline, lambda: self.do(lambda: self._pass_time(number)))
        if self.barrier.phase is BarrierPhase.WAITING:
            self.after(0.0, self._pass_outcome)

    def _pass_time(self, number: int) -> None:
        if number == self._deadline_number:
            self._feed(TimePassed())

    def _pass_outcome(self) -> None:
        """Pass on what the driver looks at while it waits: the outcome, and late answers."""
        if self.barrier.phase is not BarrierPhase.WAITING or self.state is not ExitState.WAITING:
            return
        event = self._find_outcome() or (self._late.pop(0) if self._late else None)
        if event is not None:
            self._feed(event)

    def _find_outcome(self) -> BarrierEvent | None:
        outcome = self.broadcast.outcome
        if outcome is None:
            return None
        if outcome.finished:
            return AllFinished()
        if outcome.failure is None:
            return StoreLost(outcome.lost)
        return RoundFailed(outcome.failure)

    def _carry_out(self, instruction: BarrierInstruction) -> None:  # noqa: C901, PLR0912
        match instruction:
            case CountIn(counter):
                self._count_in(counter)
            case MarkComplete(counter):
                done = SetOnce(_KEYS[counter][1], b"1")
                self.ask(self._torch, [done], _STORE_S, lambda _: None)
            case PollBarrier():
                self._poll()
            case CheckNames(adds_own):
                own = (Append(NAMES_KEY, b"%d " % self.rank),) if adds_own else ()
                self._ask_newly(
                    (*own, Read(NAMES_KEY)),
                    lambda values: self._feed(NamesRead(values[-1] if values else None)),
                )
            case CountFirstfaultNodes():
                self._ask_newly(
                    (Read(JOINED_KEY),),
                    lambda values: self._feed(
                        FirstfaultNodesCounted(int(values[0]) if values else None)
                    ),
                )
            case ReadOutcome():
                self.broadcast.poll()
                if self.reads_outcome_newly:
                    self._ask_newly((Read(OUTCOME_KEY), Read(FATAL_KEY)), self._take_outcome_read)
            case AnnounceFinished():
                self._ask_newly((SetOnce(OUTCOME_KEY, FINISHED),), self._take_announcement)
            case IgnoreSignals():
                self._is_finished = True
            case AwaitAcks():
                key = _KEYS[BarrierCounter.FINISHED][1]
                self._torch.wait(key, lambda _: self.do(lambda: self._feed(AcksAwaited())))
            case ReadRoster():
                self.has_lost_store = True
                self._read_roster()
            case AskFatalFailure():
                self.broadcast.find_fatal_failure(lambda found: self._feed(FatalFailureRead(found)))
            case RefuseRestart(notice):
                self.broadcast.send(replace(notice, fatal=True, asks=False))
            case CloseRendezvous():
                self._close_rendezvous()
            case Succeed(unknown):
                self.is_certain = not unknown
                self.watch_end()
                self._end(ExitState.SUCCEEDED)
            case Fail() | FailWithoutStore():
                self._end(ExitState.FAILED)
            case _:
                pass

    def _count_in(self, counter: BarrierCounter) -> None:
        is_late = False

        def take(values: Values | None) -> None:
            if is_late:
                if values is not None and counter is BarrierCounter.ENTERED:
                    self._late.append(Counted(int(values[0])))
                    self._pass_outcome()
                return
            self._feed(Counted(int(values[0]) if values is not None else None))

        def give_up() -> None:
            nonlocal is_late
            if not answered:
                is_late = True
                self._feed(Counted(None))

        answered: list[bool] = []

        def answer(values: Values | None) -> None:
            answered.append(True)
            take(values)

        operation = Increment(_KEYS[counter][0])
        self.ask(self._torch, [operation], 10 * time_limits.EXIT_BARRIER_TIMEOUT_SECONDS, answer)
        self.after(_STORE_S, give_up)

    def _poll(self) -> None:
        is_answered = False

        def take(values: Values | None) -> None:
            nonlocal is_answered
            self._is_polling = False
            if is_answered:
                self._poll_result = bool(values and values[0])
                return
            is_answered = True
            self._feed(Polled(bool(values and values[0])))

        def give_up() -> None:
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                self._feed(Polled(is_complete=False))

        if self._poll_result is not None:
            result, self._poll_result = self._poll_result, None
            self._feed(Polled(result))
        elif self._is_polling:
            self._feed(Polled(is_complete=False))
        else:
            self._is_polling = True
            key = _KEYS[BarrierCounter.ENTERED][1]
            forever = 10 * time_limits.EXIT_BARRIER_TIMEOUT_SECONDS
            self.ask(self._torch, [Read(key)], forever, take)
            self.after(_POLL_ANSWER_S, give_up)

    def _ask_newly(
        self, operations: tuple[Operation, ...], answer: Callable[[Values | None], None]
    ) -> None:
        """Ask on a connection that was opened at the exit, once more if it is broken."""
        is_over = False

        def end(values: Values | None) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                if values is None:
                    self._own = None
                answer(values)

        def take_first(values: Values | None) -> None:
            if values is not None or self.machines.server.is_dead or is_over:
                end(values)
                return
            self._own = self.connect()
            self.ask(self._own, operations, _STORE_S, end)

        if self._own is None:
            self._own = self.connect()
        self.ask(self._own, operations, 2 * _STORE_S, take_first)
        self.after(_STORE_S, lambda: end(None))

    def _take_outcome_read(self, values: Values | None) -> None:
        known = [value for value in values or () if value]
        if known and self.broadcast.outcome is None:
            self._parse_outcome(known[0])

    def _take_announcement(self, values: Values | None) -> None:
        if values is None:
            self._feed(self._find_outcome() or OutcomeUnknown())
            return
        self._parse_outcome(values[0])

    def _parse_outcome(self, value: bytes) -> None:
        failure = parse_notice(value)
        if failure is not None:
            self.broadcast.accept(failure)
        self._feed(AllFinished() if failure is None else RoundFailed(failure))

    def _close_rendezvous(self) -> None:
        def close() -> None:
            if not (self.machines.server.is_dead or self.machines.server.is_silent):
                self.machines.is_rendezvous_closed = True
            self._feed(RendezvousClosed())

        self.after(0.02 + self.draw.expovariate(20), close)

    # --- the storage --------------------------------------------------------------------------

    def _get_seconds(self) -> float:
        slow = self.draw.uniform(1, 5) if self.draw.random() < _SHARE_OF_SLOW_UPLOADS else 0.0
        outage = max(self._roster.events_down_until - self.events.now, 0.0)
        return 0.05 + self.draw.expovariate(10) + slow + outage

    def _upload(self, entries: set[int]) -> None:
        # The recorder uploads it, a process of its own: it does so even if the agent is killed.
        self.events.after(self._get_seconds(), lambda: entries.add(self.rank))

    def _read_roster(self) -> None:
        roster, nodes = self._roster, self.machines.nodes
        if not roster.is_shared:
            self._feed(RosterRead(None))
            return
        took = self._get_seconds()

        def answer() -> None:
            done = {*(roster.succeeded - roster.failed), self.rank}
            is_read = took < _ROSTER_READ_S
            found = RosterRead(len(done) >= nodes, bool(roster.failed))
            self._feed(found if is_read else RosterUnanswered())

        self.after(min(took, _ROSTER_READ_S), answer)

    def _end(self, state: ExitState) -> None:
        self.state = state
        self.note(state.value)
        if state is ExitState.FAILED:
            self._upload(self._roster.failed)
        is_failed = state is ExitState.FAILED
        self.after(0.3 + self.draw.expovariate(1) if is_failed else 0.05, self.end)


class ForeignAgent(Process):
    """Torch's own agent on one node: it knows torch's barrier, and nothing of failures."""

    def __init__(self, rank: int, machines: Machines, seed: str) -> None:
        super().__init__(rank, machines, seed)
        self.has_succeeded = False
        self._torch = self.connect()

    def start(self) -> None:
        """Listen to nobody."""

    def succeed(self) -> None:
        """Its workers have succeeded."""
        self.has_succeeded = True
        members, last = _KEYS[BarrierCounter.ENTERED]
        limit = time_limits.EXIT_BARRIER_TIMEOUT_SECONDS

        def take(values: Values | None) -> None:
            if values is not None and int(values[0]) == self.machines.nodes:
                self.ask(self._torch, [SetOnce(last, b"1")], _STORE_S, lambda _: self.end())
            else:
                self._torch.wait(last, lambda _: self.do(self.end))
                self.after(limit, self.end)

        self.ask(self._torch, [Increment(members)], limit, take)

    def fail(self) -> None:
        """A worker fails: it ends, and no peer learns why."""
        if not self.has_succeeded:
            self.after(0.5, self.end)

    def terminate(self) -> None:
        """A signal ends it."""
        self.is_terminated = True
        self.end()

    def notice_death(self, rank: int) -> None:
        """It has no connections to peers."""
