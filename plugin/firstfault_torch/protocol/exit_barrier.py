"""The exit barrier: an agent whose workers have succeeded waits for all other nodes.

| phase | what the agent does | until |
|---|---|---|
| ENTERING | counts itself in torch's barrier; the last agent completes it | the store answers |
| POLLING | asks whether torch's barrier is complete | the store answers |
| WAITING | waits for the round's outcome | the outcome is known; 1 s |
| CHECKING | each minute: reads the outcome, and who waits | the store answers |
| COUNTING | asks how many nodes run firstfault | the store answers |
| ANNOUNCING | announces that all nodes have finished | the store answers |
| CONFIRMING | counts itself among the agents that know it | the store answers |
| AWAITING_ACKS | waits until all agents know it | all know it; 2 s |
| READING_ROSTER | without a store: reads which nodes have finished | it answers; 10 s |
| AWAITING_ROSTER | waits for the entries of the others | the next look; 10 s |
| ASKING | after a restart: asks whether a node failed for good | the store answers |
| CLOSING | closes the rendezvous: this node can't restart | it is closed |
| ENDED | nothing | |

Rules; `tests/protocol` has a test of each, and plays schedules in which they are needed:

1. The first outcome in the store counts, also for the agent that announces another one.
2. Each wait has a second source. An agent may be counted or not if the store's answer is lost, so
   each agent that has waited for a minute also leaves its name, which may be repeated.
3. An agent that knows that all nodes have finished stays until all agents know it: the store may
   be in its process. From then on a signal doesn't fail it.
4. A node that has finished can't restart: it makes another node's restart a fatal failure.
5. Without the store, the roster decides; without both, the job counts as finished, as in torch. A
   store that hasn't answered for five minutes, torch's limit, is lost. The uploads of other nodes
   take a moment, and a storage may not answer for a while: it is asked again for 10 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from firstfault_torch import time_limits
from firstfault_torch.protocol.messages import TimePassed
from firstfault_torch.protocol.notices import FailureNotice

NAMES_KEY = "firstfault/at-exit"
"""Group ranks of agents that wait at the barrier, each with a space."""


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    """This node's workers have succeeded."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The answer to `CountIn`: how many agents are counted now, None without an answer. A late
    answer may follow while this agent waits.
    """

    number: int | None


@dataclass(frozen=True, slots=True)
class Polled:
    """The answer to `PollBarrier`."""

    is_complete: bool
    """False also without an answer."""


@dataclass(frozen=True, slots=True)
class NamesRead:
    """The answer to `CheckNames`: the value of `NAMES_KEY`, None without an answer."""

    names: bytes | None


@dataclass(frozen=True, slots=True)
class FirstfaultNodesCounted:
    """The answer to `CountFirstfaultNodes`, None without an answer."""

    number: int | None


@dataclass(frozen=True, slots=True)
class AllFinished:
    """The round's outcome: the workers of all nodes have succeeded."""


@dataclass(frozen=True, slots=True)
class RoundFailed:
    """The round's outcome: a node has failed."""

    notice: FailureNotice


@dataclass(frozen=True, slots=True)
class StoreLost:
    """The round's outcome can't be known: the store is gone."""

    why: str


@dataclass(frozen=True, slots=True)
class OutcomeUnknown:
    """The store hasn't answered `AnnounceFinished`."""


@dataclass(frozen=True, slots=True)
class AcksAwaited:
    """The answer to `AwaitAcks`: all agents know the outcome, or the store is gone."""


@dataclass(frozen=True, slots=True)
class RosterRead:
    """The answer to `ReadRoster`."""

    has_all: bool | None
    """Whether all nodes have succeeded; None without a folder that they share."""
    has_failure: bool = False
    """Whether a node has failed."""


@dataclass(frozen=True, slots=True)
class RosterUnanswered:
    """The storage hasn't answered `ReadRoster`."""


@dataclass(frozen=True, slots=True)
class FatalFailureRead:
    """The answer to `AskFatalFailure`: another node's fatal failure, if there is one."""

    notice: FailureNotice | None


@dataclass(frozen=True, slots=True)
class RendezvousClosed:
    """The answer to `CloseRendezvous`, also if it couldn't be closed in time."""


BarrierEvent: TypeAlias = (
    Arrived
    | Counted
    | Polled
    | NamesRead
    | FirstfaultNodesCounted
    | AllFinished
    | RoundFailed
    | StoreLost
    | OutcomeUnknown
    | AcksAwaited
    | RosterRead
    | RosterUnanswered
    | FatalFailureRead
    | RendezvousClosed
    | TimePassed
)


# --- instructions -----------------------------------------------------------------------------


class BarrierCounter(Enum):
    """What agents count themselves in, once each: a count must not be repeated."""

    ENTERED = "entering the exit barrier"
    """Torch's barrier. Agents without firstfault count there, too."""
    FINISHED = "letting all agents know"
    """The agents that know that all nodes have finished."""


@dataclass(frozen=True, slots=True)
class CountIn:
    """Count this agent; answer with `Counted`."""

    counter: BarrierCounter


@dataclass(frozen=True, slots=True)
class MarkComplete:
    """Let all agents know that the last one is counted; no answer is needed."""

    counter: BarrierCounter


@dataclass(frozen=True, slots=True)
class PollBarrier:
    """Look whether torch's barrier is marked as complete; answer with `Polled`."""


@dataclass(frozen=True, slots=True)
class CheckNames:
    """Read `NAMES_KEY`, after appending this agent's name if `adds_own`, on a new connection if one
    is broken; answer with `NamesRead`.
    """

    adds_own: bool


@dataclass(frozen=True, slots=True)
class CountFirstfaultNodes:
    """Count the nodes that run firstfault; answer with `FirstfaultNodesCounted`."""


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """Read the round's outcome in the store: the connection that waits for it may be silent."""


@dataclass(frozen=True, slots=True)
class AnnounceFinished:
    """Set the round's outcome, unless it is set. Answer with what counts: `AllFinished`,
    `RoundFailed` or `OutcomeUnknown`.
    """


@dataclass(frozen=True, slots=True)
class IgnoreSignals:
    """All nodes have finished: from now on a signal is no failure."""


@dataclass(frozen=True, slots=True)
class AwaitAcks:
    """Wait until all agents know the outcome, at most so many seconds; answer with `AcksAwaited`,
    unless time passes.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class ReadRoster:
    """Read which nodes have succeeded; answer with `RosterRead` or `RosterUnanswered`."""


@dataclass(frozen=True, slots=True)
class AskFatalFailure:
    """Look for another node's fatal failure; answer with `FatalFailureRead`."""


@dataclass(frozen=True, slots=True)
class RefuseRestart:
    """Send this failure as a fatal one: agents may be waiting for this node's vote."""

    notice: FailureNotice


@dataclass(frozen=True, slots=True)
class CloseRendezvous:
    """Close the rendezvous; answer with `RendezvousClosed`."""


@dataclass(frozen=True, slots=True)
class ReportWaiting:
    """Log that this node waits."""


@dataclass(frozen=True, slots=True)
class ReportForeignAgents:
    """Log that some nodes run without firstfault and aren't waited for."""


@dataclass(frozen=True, slots=True)
class ReportRosterUnread:
    """Log that neither the store nor the storage answers, so this node ends as in torch."""


@dataclass(frozen=True, slots=True)
class Succeed:
    """The barrier is over: this node has succeeded."""

    unknown: str = ""
    """Why the other nodes' ends are unknown, empty if they have finished."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The barrier is over: another node has failed."""

    notice: FailureNotice


@dataclass(frozen=True, slots=True)
class FailWithoutStore:
    """The barrier is over: the store is gone, and some nodes haven't finished."""

    why: str


BarrierInstruction: TypeAlias = (
    CountIn
    | MarkComplete
    | PollBarrier
    | CheckNames
    | CountFirstfaultNodes
    | ReadOutcome
    | AnnounceFinished
    | IgnoreSignals
    | AwaitAcks
    | ReadRoster
    | AskFatalFailure
    | RefuseRestart
    | CloseRendezvous
    | ReportWaiting
    | ReportForeignAgents
    | ReportRosterUnread
    | Succeed
    | Fail
    | FailWithoutStore
)


# --- the machine ------------------------------------------------------------------------------


class BarrierPhase(Enum):
    """What an agent does at the exit barrier; the table above describes each."""

    ENTERING = "entering"
    POLLING = "polling"
    WAITING = "waiting"
    CHECKING = "checking"
    COUNTING = "counting"
    ANNOUNCING = "announcing"
    CONFIRMING = "confirming"
    AWAITING_ACKS = "awaiting acks"
    READING_ROSTER = "reading roster"
    AWAITING_ROSTER = "awaiting roster"
    ASKING = "asking"
    CLOSING = "closing"
    ENDED = "ended"


_ENTERS = {BarrierPhase.ENTERING, BarrierPhase.WAITING}
_WAITS_FOR_OUTCOME = {
    BarrierPhase.ENTERING,
    BarrierPhase.POLLING,
    BarrierPhase.WAITING,
    BarrierPhase.CHECKING,
    BarrierPhase.COUNTING,
    BarrierPhase.ANNOUNCING,
}


@dataclass(frozen=True, slots=True)
class BarrierLimits:
    """Time limits of the barrier in seconds; `firstfault_torch.time_limits` explains each."""

    poll: float
    check: float
    """Between two checks of the names, and of the outcome."""
    barrier: float
    """Torch's limit. After this, an agent without firstfault or a silent store isn't waited for."""
    acks: float
    roster: float
    """For the roster entries of all nodes, without a store."""


def build_barrier_limits() -> BarrierLimits:
    """Return the limits of the exit barrier."""
    return BarrierLimits(
        poll=time_limits.EXIT_BARRIER_POLL_SECONDS,
        check=time_limits.EXIT_BARRIER_LOG_INTERVAL_SECONDS,
        barrier=time_limits.EXIT_BARRIER_TIMEOUT_SECONDS,
        acks=time_limits.FINISH_ACKS_TIMEOUT_SECONDS,
        roster=time_limits.EXIT_ROSTER_TIMEOUT_SECONDS,
    )


class ExitBarrier:
    """One agent's part in the exit barrier of a round.

    `handle` takes an event and returns what the driver has to do. When `deadline` has come, the
    driver sends `TimePassed`; it sends the round's outcome once it is known. At most one
    instruction that has an answer is outstanding. A signal ends the barrier from outside.
    """

    def __init__(self, own: int, nodes: int, limits: BarrierLimits) -> None:
        self.phase = BarrierPhase.ENTERING
        self.deadline: float | None = None
        """Monotonic time in seconds, or None while another event will bring the answer."""
        self._own = own
        self._nodes = nodes
        self._limits = limits
        self._check_at = 0.0
        self._count_at = 0.0
        """When this agent asks how many nodes run firstfault."""
        self._has_named_itself = False
        self._acks_until = 0.0
        self._restart: FailureNotice | None = None
        """A failure after which another node wants to restart."""
        self._answered_at = 0.0
        """When the store answered last on a connection that was opened at the exit."""
        self._roster_until = 0.0
        self._lost = ""

    def handle(  # noqa: C901, PLR0912 - one case for each event
        self, event: BarrierEvent, now: float
    ) -> list[BarrierInstruction]:
        """Return what an event leads to, at this monotonic time."""
        phase = self.phase
        match event:
            case Arrived() if phase is BarrierPhase.ENTERING:
                return self._enter(now)
            case TimePassed() if phase is BarrierPhase.WAITING:
                return self._check() if now >= self._check_at else self._poll()
            case TimePassed() if phase is BarrierPhase.AWAITING_ROSTER:
                return self._ask(BarrierPhase.READING_ROSTER, ReadRoster())
            case TimePassed() | AcksAwaited() if phase is BarrierPhase.AWAITING_ACKS:
                return self._end(Succeed())
            case AllFinished() if phase in _WAITS_FOR_OUTCOME:
                return self._confirm(now)
            case RoundFailed(notice) if phase in _WAITS_FOR_OUTCOME:
                return self._fail(notice)
            case OutcomeUnknown() | StoreLost() if phase is BarrierPhase.ANNOUNCING:
                return self._confirm(now)  # whatever becomes of the store, all nodes have finished
            case StoreLost(why) if phase in _WAITS_FOR_OUTCOME:
                return self._lose_store(why, now)
            case Counted(number) if number == self._nodes and phase in _ENTERS:
                return [MarkComplete(BarrierCounter.ENTERED), *self._announce()]
            case Counted() if phase is BarrierPhase.ENTERING:
                return self._poll()
            case Counted(number) if phase is BarrierPhase.CONFIRMING:
                return self._take_acks(number, now)
            case Polled(is_complete) if phase is BarrierPhase.POLLING:
                return self._announce() if is_complete else self._wait(now)
            case NamesRead(names) if phase is BarrierPhase.CHECKING:
                return self._take_names(names, now)
            case FirstfaultNodesCounted(number) if phase is BarrierPhase.COUNTING:
                return self._take_firstfault_nodes(number, now)
            case RosterRead() if phase is BarrierPhase.READING_ROSTER:
                return self._take_roster(event, now)
            case RosterUnanswered() if phase is BarrierPhase.READING_ROSTER:
                return self._take_roster_silence(now)
            case FatalFailureRead(found) if phase is BarrierPhase.ASKING:
                return self._take_fatal_failure(found)
            case RendezvousClosed() if phase is BarrierPhase.CLOSING and self._restart is not None:
                return self._end(Fail(self._restart))
            case _:
                return []

    def _ask(
        self, phase: BarrierPhase, *instructions: BarrierInstruction
    ) -> list[BarrierInstruction]:
        self.phase = phase
        self.deadline = None
        return list(instructions)

    # --- until all nodes have finished --------------------------------------------------------

    def _enter(self, now: float) -> list[BarrierInstruction]:
        self._answered_at = now
        self._check_at = now + self._limits.check
        # one node per second: the answer is large
        self._count_at = now + self._limits.barrier + self._own
        return self._ask(BarrierPhase.ENTERING, CountIn(BarrierCounter.ENTERED))

    def _poll(self) -> list[BarrierInstruction]:
        return self._ask(BarrierPhase.POLLING, PollBarrier())

    def _wait(self, now: float) -> list[BarrierInstruction]:
        if now >= self._count_at:
            return self._ask(BarrierPhase.COUNTING, CountFirstfaultNodes())
        self.phase = BarrierPhase.WAITING
        self.deadline = now + self._limits.poll
        return []

    def _check(self) -> list[BarrierInstruction]:
        # The answer to `CountIn` may have been lost, and with it the mark: then no agent knows
        # whether it is counted, and torch's barrier may never be complete.
        names = CheckNames(adds_own=not self._has_named_itself)
        return self._ask(BarrierPhase.CHECKING, ReportWaiting(), ReadOutcome(), names)

    def _take_names(self, names: bytes | None, now: float) -> list[BarrierInstruction]:
        self._check_at = now + self._limits.check
        if names is None and now >= self._answered_at + self._limits.barrier:
            return self._lose_store("it doesn't answer", now)
        if names is not None:
            self._answered_at = now
            self._has_named_itself = True
            if len(set(names.split())) >= self._nodes:
                return self._announce()
        return self._poll()

    def _take_firstfault_nodes(self, number: int | None, now: float) -> list[BarrierInstruction]:
        if number is not None and number < self._nodes:
            return [ReportForeignAgents(), *self._announce()]
        # Agents that run firstfault are waited for without a limit.
        self._count_at = now + self._limits.check if number is None else float("inf")
        return self._wait(now)

    # --- all nodes have finished --------------------------------------------------------------

    def _announce(self) -> list[BarrierInstruction]:
        # A failure may have been faster: an agent may have died here, or got a signal. Then its
        # peers have that outcome, and so must this one.
        return self._ask(BarrierPhase.ANNOUNCING, AnnounceFinished())

    def _confirm(self, now: float) -> list[BarrierInstruction]:
        self._acks_until = now + self._limits.acks
        return self._ask(BarrierPhase.CONFIRMING, IgnoreSignals(), CountIn(BarrierCounter.FINISHED))

    def _take_acks(self, number: int | None, now: float) -> list[BarrierInstruction]:
        if number == self._nodes:
            return [MarkComplete(BarrierCounter.FINISHED), *self._end(Succeed())]
        if number is None:
            return self._end(Succeed())
        self.phase = BarrierPhase.AWAITING_ACKS
        self.deadline = self._acks_until
        return [AwaitAcks(max(self._acks_until - now, 0.0))]

    # --- a failure ----------------------------------------------------------------------------

    def _lose_store(self, why: str, now: float) -> list[BarrierInstruction]:
        self._lost = why
        self._roster_until = now + self._limits.roster
        return self._ask(BarrierPhase.READING_ROSTER, ReadRoster())

    def _take_roster(self, roster: RosterRead, now: float) -> list[BarrierInstruction]:
        if roster.has_all is None:
            return self._end(Succeed(unknown=self._lost))
        if roster.has_all:
            return self._end(Succeed())
        if roster.has_failure or now >= self._roster_until:
            return self._end(FailWithoutStore(self._lost))
        # The host may have ended because all nodes have finished, before their entries are there.
        return self._await_roster(now)

    def _take_roster_silence(self, now: float) -> list[BarrierInstruction]:
        if now < self._roster_until:
            return self._await_roster(now)
        return [ReportRosterUnread(), *self._end(Succeed(unknown=self._lost))]

    def _await_roster(self, now: float) -> list[BarrierInstruction]:
        self.phase = BarrierPhase.AWAITING_ROSTER
        self.deadline = now + self._limits.poll
        return []

    def _fail(self, notice: FailureNotice) -> list[BarrierInstruction]:
        if notice.fatal and notice.group_rank != self._own:
            return self._end(Fail(notice))
        self._restart = notice
        return self._ask(BarrierPhase.ASKING, AskFatalFailure())

    def _take_fatal_failure(self, found: FailureNotice | None) -> list[BarrierInstruction]:
        if found is not None:
            return self._end(Fail(found))
        restart = self._restart
        refused: list[BarrierInstruction] = (
            [RefuseRestart(restart)] if restart is not None and restart.asks else []
        )
        return [*refused, *self._ask(BarrierPhase.CLOSING, CloseRendezvous())]

    def _end(self, instruction: BarrierInstruction) -> list[BarrierInstruction]:
        return self._ask(BarrierPhase.ENDED, instruction)
