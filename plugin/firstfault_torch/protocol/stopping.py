"""Stopping: how an agent ends the workers of its node, and which of them failed first.

| phase | what the agent does | until |
|---|---|---|
| RUNNING | watches its workers | a failure here or elsewhere, or torch is to stop them |
| ASKING | asks the workers for stacks and state | 0.6 s, 1 s more for exceptions on their way out |
| ENDING | has sent the signal, and waits | they have ended; their time is over |
| ASKING_PEERS | asks whether a node has got a signal, before it kills | the store answers |
| KILLING | has sent SIGKILL, and waits | they have ended; as long again |
| SPARING | waits for the exit handlers of those that failed first | they have ended; 8 s |
| KILLING_SPARED | has sent SIGKILL to these, and waits | they have ended; as long again |
| STOPPED | nothing | |

Rules; `tests/protocol` has a test of each, and plays schedules in which they are needed:

1. Peers are informed first, then deaths are documented, then siblings are asked and stopped: the
   later steps take seconds, and each makes victims.
2. A worker that failed first gets no signal, and its death isn't the stop's work. So it is with one
   that the kernel is ending or that was killed at a deadline; and, unless a signal to this node is
   the reason, with one that had begun to exit, that reports its exception while it is asked, or
   that the same signal has ended before it was sent: these may be answers to the node's signal.
3. A worker gets the signal once: its handler may be saving a checkpoint.
4. The siblings of a failure have little time to end. After a signal to any node, and before a new
   rendezvous, all workers have as long as in torch.
5. A signal that comes later lengthens the time, never shortens it. This node's own signal does so
   at once; whether a peer got one is asked before the first worker is killed, unless the workers
   have had that time already.
6. A worker is killed at a deadline only if no stop has begun: it would be the victim of another
   failure.
7. A stop that a signal's exception has interrupted is resumed, not begun again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from firstfault.model import TERMINATED, CausedBy
from firstfault_torch import time_limits

NEW_RENDEZVOUS = "a new rendezvous begins"
AGENT_FAILED = "its agent had failed"
SIBLING_FAILED = "another worker of this node had failed"
Ranks: TypeAlias = frozenset[int]
"""Local ranks."""
_NONE: Ranks = frozenset()
_NS_PER_SECOND = 1e9


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkersFailed:
    """Workers of this node have failed by themselves."""

    reported: Mapping[int, int]
    """When each has reported so, in monotonic nanoseconds, by local rank."""
    exited: tuple[int, ...] = ()
    """Local ranks of those that ended without success, in the order of their ends."""


@dataclass(frozen=True, slots=True)
class TorchFoundFailure:
    """torch saw a failure first, and has stopped the remaining workers itself."""

    failed: Ranks
    """Empty if torch names no worker."""
    exited: tuple[int, ...]
    """Those of them that have ended, in the order of their ends."""
    looked_ns: int
    """Monotonic time before torch's look: it may have stopped what ended after it."""


@dataclass(frozen=True, slots=True)
class NoticeReceived:
    """Another node has failed."""

    reason: str
    cause: CausedBy
    stop_seconds: float
    """How long healthy workers may take to end, after a signal to that node; 0 after a failure."""
    exited: Ranks
    """Workers of this node that have ended already."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """torch is about to stop the workers; several of its paths do so for one failure."""

    reason: str
    agent_error: str = ""
    """Which error of the agent ends them, if one does."""
    sent: str = "SIGTERM"
    """Name of the signal that they get."""


@dataclass(frozen=True, slots=True)
class StopBegan:
    """The processes when `StopWorkers` was carried out. During the stop no deadline kills one."""

    request: StopWorkers
    began_ns: int
    """Monotonic."""
    alive: Ranks
    ending: Ranks
    """Those of them that the kernel is ending."""
    exiting: Ranks
    """Programs that had called `sys.exit` before: exit handlers and threads take seconds."""


@dataclass(frozen=True, slots=True)
class WorkersAnswered:
    """The answer to `CollectSnapshots`."""

    reported: Ranks
    """Workers that have reported an exception that was on its way out."""
    ended_by_signal: Ranks
    """Workers that the stop's own signal has ended before it was sent."""


@dataclass(frozen=True, slots=True)
class EndsAwaited:
    """The answer to `AwaitEnds`."""

    running: Ranks
    """All workers that still run."""


@dataclass(frozen=True, slots=True)
class PeersAsked:
    """The answer to `AskPeers`."""

    has_signal: bool
    """Whether healthy workers of any node have torch's time, as far as the store answers."""


@dataclass(frozen=True, slots=True)
class AgentTerminated:
    """This agent got a signal to end."""


@dataclass(frozen=True, slots=True)
class DeadlinesExpired:
    """Workers haven't kept a deadline, or the job made no progress."""

    local_ranks: Ranks


StopEvent: TypeAlias = (
    WorkersFailed
    | TorchFoundFailure
    | NoticeReceived
    | StopRequested
    | StopBegan
    | WorkersAnswered
    | EndsAwaited
    | PeersAsked
    | AgentTerminated
    | DeadlinesExpired
)


# --- instructions -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BroadcastFailure:
    """Send the peers the failure of this worker; None if none is known."""

    local_rank: int | None


@dataclass(frozen=True, slots=True)
class BroadcastAgentError:
    """Send the peers an error of this agent."""

    what: str


@dataclass(frozen=True, slots=True)
class AnnounceGrace:
    """Let the healthy workers of the peers have this time to end, too."""

    seconds: float


@dataclass(frozen=True, slots=True)
class DocumentExits:
    """Document these deaths as failures."""

    local_ranks: Ranks


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Begin to stop the workers; answer with `StopBegan`."""

    reason: str
    seconds: float
    """How long they may take to end after the signal."""
    failed_first: Ranks = _NONE
    cause: CausedBy | None = None
    sent: str = "SIGTERM"
    """Name of the signal."""


@dataclass(frozen=True, slots=True)
class CollectSnapshots:
    """Ask these workers for stacks and state, then wait for the reports of those with an exception
    on its way out; answer with `WorkersAnswered`.
    """

    local_ranks: Ranks
    report_seconds: float
    """Longest wait for these reports."""


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Send the signal to these workers, once to each."""

    local_ranks: Ranks


@dataclass(frozen=True, slots=True)
class AwaitEnds:
    """Wait until `StopState.is_over`, and answer with `EndsAwaited`."""


@dataclass(frozen=True, slots=True)
class AskPeers:
    """Ask the store whether a node has got a signal; answer with `PeersAsked`."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Send these workers SIGKILL. One in uninterruptible sleep doesn't end by it."""

    local_ranks: Ranks


@dataclass(frozen=True, slots=True)
class KillAtDeadline:
    """Kill these workers at once, and document their deadlines."""

    local_ranks: Ranks


StopInstruction: TypeAlias = (
    BroadcastFailure
    | BroadcastAgentError
    | AnnounceGrace
    | DocumentExits
    | StopWorkers
    | CollectSnapshots
    | SendSignal
    | AwaitEnds
    | AskPeers
    | Kill
    | KillAtDeadline
)


# --- the machine ------------------------------------------------------------------------------


class StopPhase(Enum):
    """What an agent does with its workers; the table above describes each."""

    RUNNING = "running"
    ASKING = "asking"
    ENDING = "ending"
    ASKING_PEERS = "asking peers"
    KILLING = "killing"
    SPARING = "sparing"
    KILLING_SPARED = "killing spared"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class StopState:
    """What is known of a stop. Times are seconds of the monotonic clock."""

    phase: StopPhase = StopPhase.RUNNING
    request: StopWorkers | None = None
    """None until the workers are stopped."""
    began_ns: int = 0
    waits_from: float = 0.0
    """When the workers' time to end began: after they were asked."""
    alive: Ranks = _NONE
    """Workers that ran when the stop began."""
    spared: Ranks = _NONE
    """Those that failed first: they get no signal."""
    leaving: Ranks = _NONE
    """Those that reported their exception while they were asked: they get no signal, and no more
    time than others.
    """
    expired: Ranks = _NONE
    """Those that were killed at a deadline."""
    earliest_kill: float = -math.inf
    """No healthy worker is killed before."""
    has_asked_peers: bool = False
    gives_up_at: float = 0.0
    """When the present wait ends, in phases with a fixed end."""

    @property
    def failed_first(self) -> Ranks:
        """Local ranks of the workers because of which all others were stopped."""
        return self.spared | self.leaving

    @property
    def awaited(self) -> Ranks:
        """The workers for which the present phase waits."""
        # Siblings first: a failed worker may spend seconds in its exit handlers, but a sibling that
        # ignores the signal must not get that longer time.
        is_about_all = self.phase in {StopPhase.SPARING, StopPhase.KILLING_SPARED}
        return self.alive if is_about_all else self.alive - self.spared

    @property
    def kill_time(self) -> float:
        """When healthy workers are killed; it may still move later."""
        seconds = self.request.seconds if self.request is not None else 0.0
        return max(self.waits_from + seconds, self.earliest_kill)

    @property
    def killed_ns(self) -> int | None:
        """When this agent begins to send SIGKILL, monotonic; None if it sends none. An earlier
        SIGKILL isn't the agent's.
        """
        return None if math.isinf(self.kill_time) else int(self.kill_time * _NS_PER_SECOND)

    @property
    def deadline(self) -> float:
        """When the present wait ends."""
        if self.phase is StopPhase.ENDING:
            return self.kill_time
        if self.phase is StopPhase.SPARING:
            # Both limits count from one moment, so the total is the longer one.
            exit_seconds = time_limits.FAILED_WORKER_EXIT_GRACE_SECONDS
            return max(self.waits_from + exit_seconds, self.kill_time)
        return self.gives_up_at

    def is_over(self, running: Ranks, now: float) -> bool:
        """Whether the present wait is over: nobody is left to wait for, or it's too late."""
        return not running & self.awaited or now >= self.deadline


Step: TypeAlias = tuple[StopState, list[StopInstruction]]


class NodeStop:
    """How one agent stops the workers of one round.

    `handle` takes an event and the time, and returns what the driver has to do. Siblings of a
    failure have `stop_seconds` to end after the signal, all other workers `healthy_seconds`.
    """

    def __init__(self, stop_seconds: float, healthy_seconds: float) -> None:
        self.state = StopState()
        self._stop_seconds = stop_seconds
        self._healthy_seconds = healthy_seconds

    @property
    def stop_seconds(self) -> float:
        """How long workers may take to end: as long as in torch, unless one of them has failed."""
        request = self.state.request
        return request.seconds if request is not None else self._healthy_seconds

    def handle(self, event: StopEvent, now: float) -> list[StopInstruction]:
        """Return what an event leads to."""
        # One assignment: the exception of a signal may interrupt the main thread anywhere, and
        # leaves the state of before or of after the event.
        self.state, instructions = self._decide(event, now)
        return instructions

    def _decide(self, event: StopEvent, now: float) -> Step:
        if isinstance(event, AgentTerminated):
            return self._lengthen(now), []
        if self.state.phase is StopPhase.RUNNING:
            return self._handle_while_running(event)
        return self._handle_while_stopping(event, now)

    def _handle_while_running(self, event: StopEvent) -> Step:
        state = self.state
        match event:
            case DeadlinesExpired(ranks):
                return replace(state, expired=state.expired | ranks), [KillAtDeadline(ranks)]
            case WorkersFailed():
                return state, self._answer_failure(event)
            case NoticeReceived():
                return state, [self._answer_notice(event)]
            case StopRequested():
                return state, self._answer_request(event)
            case TorchFoundFailure():
                return self._accept_stop_of_torch(event)
            case StopBegan():
                return self._begin(event)
            case _:
                return state, []

    def _handle_while_stopping(self, event: StopEvent, now: float) -> Step:
        state, phase = self.state, self.state.phase
        match event:
            case StopRequested(sent=sent):
                return self._resume(sent, now)
            case WorkersAnswered() if phase is StopPhase.ASKING:
                return self._send_signal(self._spare_reported(event), now)
            case EndsAwaited(running):
                return self._handle_ends(running, now)
            case PeersAsked(has_signal) if phase is StopPhase.ASKING_PEERS:
                later = self._lengthen(now) if has_signal else state
                asked = replace(later, phase=StopPhase.ENDING, has_asked_peers=True)
                return asked, [AwaitEnds()]
            case _:
                return state, []

    # --- before the stop ----------------------------------------------------------------------

    def _answer_failure(self, event: WorkersFailed) -> list[StopInstruction]:
        """A worker may have raised and reported, but still be alive in its teardown, while another
        was killed before it could report: both failed by themselves.
        """
        failed = event.reported.keys() | set(event.exited)
        first = min(
            event.reported,
            key=lambda rank: (event.reported[rank], rank),
            default=next(iter(event.exited), None),
        )
        return [
            BroadcastFailure(first),
            DocumentExits(frozenset(event.exited)),
            StopWorkers(SIBLING_FAILED, self._stop_seconds, frozenset(failed)),
        ]

    def _accept_stop_of_torch(self, event: TorchFoundFailure) -> Step:
        state = replace(
            self.state,
            phase=StopPhase.STOPPED,
            request=StopWorkers(SIBLING_FAILED, self._stop_seconds, event.failed),
            began_ns=event.looked_ns,
            waits_from=math.inf,  # this agent kills nobody
            spared=event.failed,
        )
        return state, [BroadcastFailure(next(iter(event.exited), None))]

    def _answer_notice(self, event: NoticeReceived) -> StopWorkers:
        """Both nodes may have failed at the same time: a worker that has exited already wasn't
        ended by this stop, and isn't the peer's victim.
        """
        seconds = self._healthy_seconds if event.stop_seconds else self._stop_seconds
        return StopWorkers(event.reason, seconds, event.exited, event.cause)

    def _answer_request(self, event: StopRequested) -> list[StopInstruction]:
        """The peers are informed before: these workers may take as long to end as in torch."""
        informed: list[StopInstruction] = []
        if event.reason == NEW_RENDEZVOUS:
            informed.append(AnnounceGrace(self._healthy_seconds))
        if event.agent_error:
            informed.append(BroadcastAgentError(event.agent_error))
        return [*informed, StopWorkers(event.reason, self._healthy_seconds, sent=event.sent)]

    # --- the stop -----------------------------------------------------------------------------

    def _begin(self, event: StopBegan) -> Step:
        request = event.request
        # Example: rank 3 crashes. The kernel closes its sockets while it still tears down its
        # memory, so rank 0 fails in a collective and is found first. Without `ending`, the death
        # of rank 3 would count as this stop's work, and rank 0 as the cause.
        spared = request.failed_first | self.state.expired | event.ending
        is_terminated = request.reason == TERMINATED
        if not is_terminated:
            spared |= event.exiting
        state = replace(
            self.state,
            phase=StopPhase.ASKING,
            request=request,
            began_ns=event.began_ns,
            waits_from=event.began_ns / _NS_PER_SECOND,
            alive=event.alive,
            spared=spared,
        )
        seconds = min(time_limits.IN_FLIGHT_GRACE_SECONDS, self._stop_seconds / 2)
        return state, [CollectSnapshots(event.alive - spared, 0.0 if is_terminated else seconds)]

    def _spare_reported(self, event: WorkersAnswered) -> StopState:
        """This agent hasn't sent the signal yet, so who was ended by it had failed first; not if
        the signal may have gone to all processes of the node.
        """
        state = self.state
        if state.request is None or state.request.reason == TERMINATED:
            return state
        leaving = event.reported - event.ended_by_signal
        return replace(state, spared=state.spared | event.ended_by_signal, leaving=leaving)

    def _send_signal(self, state: StopState, waits_from: float) -> Step:
        state = replace(state, phase=StopPhase.ENDING, waits_from=waits_from)
        return state, [SendSignal(state.alive - state.failed_first), AwaitEnds()]

    def _handle_ends(self, running: Ranks, now: float) -> Step:
        state, left = self.state, running & self.state.awaited
        if not state.is_over(running, now):  # the deadline has moved during the wait
            return state, [AwaitEnds()]
        match state.phase:
            case StopPhase.ENDING if left and self._must_ask_peers(now):
                return replace(state, phase=StopPhase.ASKING_PEERS), [AskPeers()]
            case StopPhase.ENDING if left:
                return self._kill(StopPhase.KILLING, left, now)
            case StopPhase.ENDING | StopPhase.KILLING:
                return replace(state, phase=StopPhase.SPARING), [AwaitEnds()]
            case StopPhase.SPARING if left:
                return self._kill(StopPhase.KILLING_SPARED, left, now)
            case StopPhase.SPARING | StopPhase.KILLING_SPARED:
                return replace(state, phase=StopPhase.STOPPED), []
            case _:
                return state, []

    def _kill(self, phase: StopPhase, left: Ranks, now: float) -> Step:
        state = replace(self.state, phase=phase, gives_up_at=now + self.stop_seconds)
        return state, [Kill(left), AwaitEnds()]

    def _resume(self, sent: str, now: float) -> Step:
        """Resume a stop after an interruption; its last instruction may not be carried out."""
        state = self.state
        match state.phase:
            case StopPhase.ASKING if state.request is not None:
                # it was interrupted before the workers got their signal
                request = replace(state.request, seconds=self._healthy_seconds, sent=sent)
                return self._send_signal(replace(state, request=request), now)
            case StopPhase.ENDING | StopPhase.ASKING_PEERS | StopPhase.KILLING:
                return self._send_signal(state, state.waits_from)
            case StopPhase.SPARING | StopPhase.KILLING_SPARED:
                return replace(state, phase=StopPhase.SPARING), [AwaitEnds()]
            case _:
                return state, []

    # --- parts --------------------------------------------------------------------------------

    def _must_ask_peers(self, now: float) -> bool:
        # A signal to one node ends its workers. Other nodes may see this before the signal's
        # notice arrives, as failures of ranks that have lost their peers. Workers that had the time
        # of a signal don't get it twice.
        state = self.state
        return now < state.waits_from + self._healthy_seconds and not state.has_asked_peers

    def _lengthen(self, now: float) -> StopState:
        earliest = max(self.state.earliest_kill, now + self._healthy_seconds)
        return replace(self.state, earliest_kill=earliest)
