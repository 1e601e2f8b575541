"""The notices of a round: how it ends, as its agents learn it from each other.

| phase | what the agent does | until |
|---|---|---|
| CONNECTING | opens its connections to the store | they are open, or it can't |
| WAITING | waits for the round's outcome | the outcome is there, or the connection breaks |
| CHECKING | looks whether the store's host still listens | it does, or doesn't |
| PAUSING | waits for a dying host to close its port | 0.2 s; then it looks once more |
| POLLING | after a failure with restarts left: waits for a fatal one | the next look, after 0.5 s |
| ASKING | looks for a fatal failure | the store answers |
| ENDED | nothing: it knows the outcome, or the store is lost | |

In each phase a node may fail, and a notice may come on another way: from the roster, a vote, or the
answer to this agent's own notice.

Rules; `tests/protocol` has a test of each, and plays schedules in which they are needed:

1. The first outcome counts. Only a fatal failure replaces another one, after which workers restart.
2. A node sends its first failure, and later ones only if they are fatal and that one wasn't.
3. What the store hasn't confirmed is sent again on a new connection: a firewall may have forgotten
   one that was idle for the whole round.
4. The store's answer to a notice is the outcome that counts, also if the waiting connection is
   silent.
5. A broken connection isn't a lost store: only a host that doesn't listen is lost. It is asked
   twice, because a dying host closes its port only a moment after its connections.
6. What an agent knows stays known when the store is lost.
7. An agent confirms each failure that it learns from the store: its peers wait for its report.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import TypeAlias

from firstfault.model import CausedBy
from firstfault_torch import time_limits
from firstfault_torch.protocol.election import LEAVING_KEY, LOST_KEY, build_key
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

OUTCOME_KEY = "firstfault/outcome"
"""Set once per round: which node failed, or that all have finished. Every agent waits for it."""
FATAL_KEY = "firstfault/fatal"
"""Set by a node that can't restart, even if `OUTCOME_KEY` already has a failure after
which workers restart.
"""
GRACE_KEY = "firstfault/stop-seconds"
"""Set by a node that stops healthy workers, after a signal or for a new rendezvous. Their
peers lose their connections, and fail; the siblings of those failures are healthy, and have the
same time.
"""
FINISHED = b'{"finished": true}'
"""The outcome of a round in which the workers of all nodes have succeeded."""
_INFORMING = "informing the peer agents"


@dataclass(frozen=True, slots=True)
class FailureNotice:
    """A node's failure, as its peers receive it. Its fields are keys of JSON in the store."""

    what: str
    """One line."""
    node: str
    group_rank: int | None = None
    rank: int | None = None
    """The worker's global rank, or None if the agent failed."""
    document: str = ""
    """Name of the error document; empty until it is written."""
    fatal: bool = True
    """Whether the node can't restart its workers."""
    asks: bool = False
    """Whether the agents vote on the restart: they all stop their workers, report, and elect a
    leader that decides.
    """
    stop_seconds: float = 0.0
    """After a signal: how long the healthy workers may take to exit, in seconds. 0 after a failure,
    when they have less time.
    """

    @property
    def reason(self) -> str:
        """Why other nodes stop their workers; the first report, so it may name a victim."""
        who = (
            f"rank {self.rank} on {self.node}"
            if self.rank is not None
            else f"the agent of {self.node}"
        )
        return f"{who} failed: {self.what}"

    @property
    def cause(self) -> CausedBy:
        """The failed rank and node, in the form that documents use."""
        return CausedBy(self.rank, self.node, self.document)

    def pack(self) -> bytes:
        """Return the notice as it is stored."""
        return json.dumps(asdict(self)).encode()


def parse_notice(text: bytes) -> FailureNotice | None:
    """Return the failure in a round's outcome, None if all nodes have finished."""
    content = json.loads(text)
    if content.get("finished"):
        return None
    known = {item.name for item in fields(FailureNotice)}
    return FailureNotice(**{name: content[name] for name in known & content.keys()})


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The end of a round, as this agent learned it."""

    failure: FailureNotice | None = None
    finished: bool = False
    """All nodes' workers have succeeded."""
    lost: str = ""
    """Why the store can't be reached; empty if it is reachable. With a failure, the store was
    lost after it.
    """


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListeningBegan:
    """This node's workers run."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The answer to `Connect`."""


@dataclass(frozen=True, slots=True)
class ConnectionBroke:
    """The connections can't be opened, or the one that waits or polls broke."""

    why: str


@dataclass(frozen=True, slots=True)
class OutcomeSet:
    """The answer to `AwaitOutcome`."""

    value: bytes


@dataclass(frozen=True, slots=True)
class HostChecked:
    """The answer to `CheckHost`."""

    is_listening: bool


@dataclass(frozen=True, slots=True)
class FatalFailurePolled:
    """The answer to `PollFatalFailure`: the value of `FATAL_KEY`, empty if it isn't set."""

    value: bytes


@dataclass(frozen=True, slots=True)
class NodeFailed:
    """This node has failed, or its connection to a peer broke, which counts as failed."""

    notice: FailureNotice


@dataclass(frozen=True, slots=True)
class NoticeFound:
    """Another node's failure, which was found in the roster, in a vote, or at the exit barrier."""

    notice: FailureNotice


@dataclass(frozen=True, slots=True)
class RestartRefused:
    """The agents have voted against a restart after this failure."""

    notice: FailureNotice


@dataclass(frozen=True, slots=True)
class OutcomeOverdue:
    """Somebody has waited for the outcome for long: the waiting connection may be silent."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection to an agent broke."""

    group_rank: int


@dataclass(frozen=True, slots=True)
class LeavingBegan:
    """This agent's process has to end."""


@dataclass(frozen=True, slots=True)
class GraceBegan:
    """This node's healthy workers are stopped, and may take these seconds to end."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RoundLeft:
    """The round is over for this node: it is about to return to torch."""


@dataclass(frozen=True, slots=True)
class ListeningEnded:
    """Nothing of the round is needed any more: this process is about to end."""


NoticeEvent: TypeAlias = (
    ListeningBegan
    | Connected
    | ConnectionBroke
    | OutcomeSet
    | HostChecked
    | FatalFailurePolled
    | NodeFailed
    | NoticeFound
    | RestartRefused
    | OutcomeOverdue
    | PeerLost
    | LeavingBegan
    | GraceBegan
    | RoundLeft
    | ListeningEnded
    | Answered
    | Unanswered
    | TimePassed
)


# --- instructions -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Open two connections to the store, one to use and one to wait with; answer with `Connected`
    or `ConnectionBroke`.
    """


@dataclass(frozen=True, slots=True)
class AwaitOutcome:
    """Wait with one connection until `OUTCOME_KEY` is set; answer with `OutcomeSet` or
    `ConnectionBroke`.
    """


@dataclass(frozen=True, slots=True)
class CheckHost:
    """Look whether a server listens at the store's address; answer with `HostChecked`."""


@dataclass(frozen=True, slots=True)
class PollFatalFailure:
    """Read `FATAL_KEY`; answer with `FatalFailurePolled` or `ConnectionBroke`."""


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Carry out operations on a new connection, which replaces the one in use if it answers; answer
    with the request's number. Nobody waits for it.
    """

    request: int
    operations: tuple[Operation, ...]
    purpose: str


@dataclass(frozen=True, slots=True)
class PassOn:
    """Wake the agent: the outcome is known, or has changed, or the store is lost."""

    outcome: RoundOutcome


NoticeInstruction: TypeAlias = (
    Connect | AwaitOutcome | CheckHost | PollFatalFailure | AskStore | AskAgain | PassOn
)


# --- the machine ------------------------------------------------------------------------------


class NoticePhase(Enum):
    """What an agent does to learn the round's outcome; the table above describes each."""

    CONNECTING = "connecting"
    WAITING = "waiting"
    CHECKING = "checking"
    PAUSING = "pausing"
    POLLING = "polling"
    ASKING = "asking"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class NoticeLimits:
    """Times in seconds; `firstfault_torch.time_limits` explains each."""

    poll: float
    """Between two looks for a fatal failure."""
    lost_store: float
    """Between two looks whether the store's host listens."""


def build_notice_limits() -> NoticeLimits:
    """Return the times of a round's notices."""
    return NoticeLimits(
        poll=time_limits.FATAL_FAILURE_POLL_SECONDS,
        lost_store=time_limits.LOST_STORE_GRACE_SECONDS,
    )


@dataclass(frozen=True, slots=True)
class _Sent:
    """Operations that the store hasn't answered."""

    operations: tuple[Operation, ...]
    purpose: str
    is_notice: bool = False
    is_repeated: bool = False


class RoundNotices:
    """One agent's part in the exchange of notices in a round.

    `handle` takes an event and returns what the driver has to do. Two kinds of events are mixed:
    those of the listener, which connects, then waits, then polls; and those of the agent, which
    sends. When `deadline` has come, the listener sends `TimePassed`. Each `AskStore`
    and `AskAgain` is answered with `Answered` or `Unanswered`.
    """

    def __init__(self, own: int, limits: NoticeLimits) -> None:
        self.phase = NoticePhase.CONNECTING
        self.deadline: float | None = None
        """Monotonic time in seconds, or None while another event will bring the answer."""
        self.outcome: RoundOutcome | None = None
        """How the round ended, or None if not yet known."""
        self._own = own
        self._limits = limits
        self._known_at = 0.0
        self._sent: FailureNotice | None = None
        """What this agent has sent last."""
        self._is_over = False
        """Whether this agent needs no outcome any more."""
        self._why_broken = ""
        self._is_second_check = False
        self._request = 0
        self._look = 0
        """The number of the outstanding look for an overdue outcome."""
        self._outstanding: dict[int, _Sent] = {}
        self._acknowledged: set[str] = set()
        """Keys at which this agent has confirmed a failure."""
        self._has_store_answered = False
        """Whether the outcome, or a part of it, is known from the store."""

    # --- what the agent asks for --------------------------------------------------------------

    @property
    def received_failure(self) -> FailureNotice | None:
        """The failure that the round's outcome names, of this or another node."""
        return self.outcome.failure if self.outcome is not None else None

    @property
    def failure(self) -> FailureNotice | None:
        """Another node's fatal failure, if any."""
        failure = self.received_failure
        is_another = failure is not None and failure.group_rank != self._own
        return failure if failure is not None and failure.fatal and is_another else None

    @property
    def restart_request(self) -> FailureNotice | None:
        """Another node's failure that the agents must vote on, if any."""
        failure = self.received_failure
        if failure is None or failure.fatal or failure.group_rank == self._own:
            return None
        return failure if failure.asks else None

    @property
    def is_fatal(self) -> bool:
        """Whether a node, perhaps this one, failed and can't restart."""
        failure = self.received_failure
        return failure is not None and failure.fatal

    @property
    def first_failure(self) -> FailureNotice | None:
        """The failure that ended the round, on this or another node, or None if unknown."""
        known = self.received_failure or self._sent
        return known if known is not None and (known.fatal or known.asks) else None

    @property
    def is_lost(self) -> bool:
        """Whether the store can't be reached."""
        return self.outcome is not None and bool(self.outcome.lost)

    def may_elect(self, *, on_restart: bool = False) -> bool:
        """Whether the agents can hold an election now, on the verdict or on a restart."""
        if self.outcome is None or self.is_lost or not self._has_store_answered:
            return False
        return not (on_restart and self.is_fatal)

    @property
    def needs_fatal_failure(self) -> bool:
        """Whether to read `FATAL_KEY` for `find_fatal_failure`."""
        return self.failure is None and not self.is_lost

    def find_fatal_failure(self, value: bytes) -> FailureNotice | None:
        """Return another node's fatal failure; `value` is that of `FATAL_KEY`, empty if unread."""
        if self.failure is not None or not value:
            return self.failure
        found = parse_notice(value)
        return found if found is not None and found.group_rank != self._own else None

    def get_grace_left(self, now: float) -> float:
        """Return the seconds for which workers of other nodes may still be saving their state
        after a signal to one of them.
        """
        failure = self.received_failure
        return max(self._known_at + failure.stop_seconds - now, 0.0) if failure is not None else 0.0

    # --- events -------------------------------------------------------------------------------

    def handle(  # noqa: C901, PLR0912 - one case for each event
        self, event: NoticeEvent, now: float
    ) -> list[NoticeInstruction]:
        """Return what an event leads to, at this monotonic time."""
        phase = self.phase
        match event:
            case ListeningBegan():
                return self._connect()
            case Connected() if phase is NoticePhase.CONNECTING:
                return self._listen(now)
            case OutcomeSet(value) if phase is NoticePhase.WAITING:
                return self._take_outcome(value, now)
            case ConnectionBroke(why):
                return self._take_broken_connection(why)
            case HostChecked(is_listening) if phase is NoticePhase.CHECKING:
                return self._take_host(now) if is_listening else self._lose_store()
            case TimePassed() if phase is NoticePhase.PAUSING:
                return self._check_host()
            case TimePassed() if phase is NoticePhase.POLLING:
                self._enter(NoticePhase.ASKING)
                return [PollFatalFailure()]
            case FatalFailurePolled(value) if phase is NoticePhase.ASKING:
                self._await_fatal_failure(now)
                return self._learn_from_store(value, now) if value else []
            case NodeFailed(notice):
                return self._send(notice)
            case NoticeFound(notice):
                return self._learn(RoundOutcome(notice), now)
            case RestartRefused(notice):
                return self._refuse_restart(notice)
            case OutcomeOverdue() if self.outcome is None:
                self._look = self._number()
                return [
                    AskStore(self._look, (Read(OUTCOME_KEY),), "looking for the round's outcome")
                ]
            case PeerLost(group_rank):
                return self._write(LOST_KEY, group_rank, f"{_INFORMING} of a lost one")
            case LeavingBegan():
                return self._write(LEAVING_KEY, self._own, f"{_INFORMING} of the end")
            case GraceBegan(seconds):
                grace = Swap(GRACE_KEY, b"", str(seconds).encode())
                return self._ask(_Sent((grace,), f"{_INFORMING} of a signal"))
            case RoundLeft():
                return self._leave_round()
            case ListeningEnded():
                return self._stop_listening()
            case Answered(request, values):
                return self._take_answer(request, values, now)
            case Unanswered(request):
                return self._take_silence(request)
            case _:
                return []

    # --- the listener -------------------------------------------------------------------------

    def _enter(self, phase: NoticePhase, deadline: float | None = None) -> None:
        self.phase = phase
        self.deadline = deadline

    def _connect(self) -> list[NoticeInstruction]:
        self._enter(NoticePhase.CONNECTING)
        return [Connect()]

    def _listen(self, now: float) -> list[NoticeInstruction]:
        """Wait for what isn't known yet: the outcome, or a fatal failure after another one."""
        if self.received_failure is not None and not self.is_fatal:
            self._await_fatal_failure(now)
            return []
        self._enter(NoticePhase.WAITING)
        return [AwaitOutcome()]

    def _take_outcome(self, value: bytes, now: float) -> list[NoticeInstruction]:
        learned = self._learn_from_store(value, now)
        self._await_fatal_failure(now)
        return learned

    def _await_fatal_failure(self, now: float) -> None:
        """Poll after a failure with restarts left: a third node may fail permanently."""
        if self._is_over or self.received_failure is None or self.is_fatal:
            self._enter(NoticePhase.ENDED)
        else:
            self._enter(NoticePhase.POLLING, now + self._limits.poll)

    def _take_broken_connection(self, why: str) -> list[NoticeInstruction]:
        if self.phase is NoticePhase.ENDED:
            return []
        self._why_broken = why
        self._is_second_check = False
        return self._lose_store() if self._is_over else self._check_host()

    def _check_host(self) -> list[NoticeInstruction]:
        self._enter(NoticePhase.CHECKING)
        return [CheckHost()]

    def _take_host(self, now: float) -> list[NoticeInstruction]:
        if self._is_over:
            return self._lose_store()
        if self._is_second_check:
            return self._connect()
        self._is_second_check = True
        self._enter(NoticePhase.PAUSING, now + self._limits.lost_store)
        return []

    def _lose_store(self) -> list[NoticeInstruction]:
        self._enter(NoticePhase.ENDED)
        known = self.outcome or RoundOutcome()
        if not known.finished:
            self.outcome = replace(known, lost=self._why_broken)
        return self._pass_on()

    def _stop_listening(self) -> list[NoticeInstruction]:
        self._is_over = True
        if self.phase in {NoticePhase.POLLING, NoticePhase.PAUSING}:
            self._enter(NoticePhase.ENDED)
        return []

    # --- what counts --------------------------------------------------------------------------

    def _learn(self, outcome: RoundOutcome, now: float) -> list[NoticeInstruction]:
        """Accept an outcome unless another one counts, and start the time limit that it sets."""
        known = self.outcome
        if known is not None and (known.finished or self.is_fatal):
            return []
        if self.received_failure is not None and not (outcome.failure and outcome.failure.fatal):
            return []
        self._known_at = now
        self.outcome = replace(outcome, lost=known.lost if known is not None else "")
        if self.is_fatal and self.phase in {NoticePhase.POLLING, NoticePhase.ASKING}:
            self._enter(NoticePhase.ENDED)
        return self._pass_on()

    def _learn_from_store(self, value: bytes, now: float) -> list[NoticeInstruction]:
        """Accept an outcome, and confirm its failure: the agent is alive, and will report."""
        return [*self._accept_from_store(value, now), *self._acknowledge()]

    def _accept_from_store(self, value: bytes, now: float) -> list[NoticeInstruction]:
        self._has_store_answered = True
        if self.outcome is not None:
            self.outcome = replace(self.outcome, lost="")
        failure = parse_notice(value)
        return self._learn(RoundOutcome(failure, finished=failure is None), now)

    def _acknowledge(self) -> list[NoticeInstruction]:
        failure = self.received_failure
        if failure is None or _get_acks_key(failure) in self._acknowledged:
            return []
        key = _get_acks_key(failure)
        self._acknowledged.add(key)
        return self._write(key, self._own, "acknowledging a notice")

    def _pass_on(self) -> list[NoticeInstruction]:
        return [PassOn(self.outcome)] if self.outcome is not None else []

    def _refuse_restart(self, notice: FailureNotice) -> list[NoticeInstruction]:
        self._stop_listening()
        if self.is_fatal:
            return []
        known = self.outcome or RoundOutcome()
        self.outcome = replace(known, failure=replace(notice, fatal=True, asks=False))
        return [*self._pass_on(), *(() if self.is_lost else self._acknowledge())]

    # --- what this agent sends ----------------------------------------------------------------

    def _send(self, notice: FailureNotice) -> list[NoticeInstruction]:
        sent = self._sent
        if sent is not None and (sent.fatal or not notice.fatal):
            return []
        self._sent = notice
        value = notice.pack()
        fatal = (Swap(FATAL_KEY, b"", value),) if notice.fatal else ()
        operations = (*fatal, SetOnce(OUTCOME_KEY, value))
        return self._ask(_Sent(operations, _INFORMING, is_notice=True))

    def _leave_round(self) -> list[NoticeInstruction]:
        """End the wait for the outcome by setting it, unless it is set."""
        self._stop_listening()
        if self.phase is NoticePhase.ENDED or self._sent is not None:
            return []
        self._sent = FailureNotice("the round is over", "", self._own, fatal=False)
        over = SetOnce(OUTCOME_KEY, self._sent.pack())
        return self._ask(_Sent((over,), _INFORMING))

    def _write(self, key: str, group_rank: int, purpose: str) -> list[NoticeInstruction]:
        return self._ask(_Sent((Append(key, b"%d " % group_rank),), purpose))

    def _ask(self, sent: _Sent) -> list[NoticeInstruction]:
        number = self._number()
        self._outstanding[number] = sent
        asks = AskAgain if sent.is_repeated else AskStore
        return [asks(number, sent.operations, sent.purpose)]

    def _number(self) -> int:
        self._request += 1
        return self._request

    def _take_answer(
        self, request: int, values: tuple[bytes, ...], now: float
    ) -> list[NoticeInstruction]:
        if request == self._look:
            return self._learn_from_store(values[0], now) if values[0] else []
        sent = self._outstanding.pop(request, None)
        if sent is None or not sent.is_notice:
            return []
        # the outcome, and before it, of a fatal failure, the first fatal one
        *fatal, outcome = values
        learned = self._accept_from_store(outcome, now)
        for value in fatal:
            learned += self._accept_from_store(value, now)
        # The listener is about to receive the same, and confirms it: this node's workers wait for
        # the end of this call. But its connection may be as silent as the one that didn't answer.
        is_listener_first = self.phase is NoticePhase.WAITING and not sent.is_repeated
        return learned if is_listener_first else [*learned, *self._acknowledge()]

    def _take_silence(self, request: int) -> list[NoticeInstruction]:
        sent = self._outstanding.pop(request, None)
        if sent is None:
            return []
        if not sent.is_repeated:
            return self._ask(replace(sent, is_repeated=True))
        self._acknowledged.difference_update(each.key for each in sent.operations)
        return []


def _get_acks_key(failure: FailureNotice) -> str:
    """Return where agents confirm this failure: in the election for which they will report."""
    return build_key("heard", "restart" if failure.asks else "")
