"""The election: one agent of a failed round, the leader, concludes for all nodes.

| phase | what the agent does | until |
|---|---|---|
| REPORTING | hands in its report | the store answers |
| COLLECTING | waits for the order of leaders | the next look, later each time |
| LOOKING | asks the store who has reported | the store answers |
| CLOSING | publishes the order of leaders | the store answers |
| FOLLOWING | waits for the verdict of the present leader | its turn is over |
| ASKING | asks whether there is a verdict, or somebody publishes one | the store answers |
| TAKING | takes the leadership in its own turn, and reads the reports | the store answers |
| LEADING | concludes | the caller has concluded |
| ANNOUNCING | asks whether it still leads | the store answers |
| PUBLISHING | publishes | the caller has published |
| SHARING | hands its verdict to all agents | the store answers |
| ENDED | nothing | |

Rules; `tests/protocol` has a test of each, and plays schedules in which they are needed:

1. A wake of the waiting connection is a hint. Each wait also reads the key at its deadline.
2. No answer is a no: a leader publishes only if the store confirms that it still leads.
3. A leader takes a verdict that arrives while it concludes.
4. That a process has to end is a message of its own, sent when the signal comes.
5. An agent is lost if a connection to it broke. One that has only not reported may live.
6. Publishing fails if there is a verdict, and that one counts. So leaders that don't know of each
   other publish one verdict.
7. An agent whose process has to end decides only if no other one can: it knows less than an agent
   that stays, and its verdict would be the first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

from firstfault_torch.protocol.limits import Limits
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
    Operation,
    Publish,
    Published,
    Read,
    SetOnce,
    ShutdownRequested,
    Started,
    Swap,
    TimePassed,
    Unanswered,
    WaitingConnectionBroke,
    WatchKeys,
)

MAX_LEADERS = 4
JOINED_KEY = "firstfault/joined"
"""What each agent stored when its workers started: concatenated frames."""
LOST_KEY = "firstfault/lost"
"""Group ranks of agents whose connection broke."""
LEAVING_KEY = "firstfault/leaving"
"""Group ranks of agents whose processes have to end, from the moment of the signal."""
_LEAVING_MARK = b"!"
"""Behind a group rank in "arrived": the agent's process has to end."""
_PUBLISHING_MARK = b"!"
"""Behind the leader's group rank: it publishes."""


def build_key(name: str, topic: str = "") -> str:
    """Return a key in the store of the election on a topic; the verdict has none."""
    return f"firstfault/{topic}/{name}" if topic else f"firstfault/{name}"


class ElectionPhase(Enum):
    """What an agent does in an election; the table above describes each."""

    REPORTING = "reporting"
    COLLECTING = "collecting"
    LOOKING = "looking"
    CLOSING = "closing"
    FOLLOWING = "following"
    ASKING = "asking"
    TAKING = "taking"
    LEADING = "leading"
    ANNOUNCING = "announcing"
    PUBLISHING = "publishing"
    SHARING = "sharing"
    ENDED = "ended"


_ASKS_STORE = {
    ElectionPhase.REPORTING,
    ElectionPhase.LOOKING,
    ElectionPhase.CLOSING,
    ElectionPhase.ASKING,
    ElectionPhase.TAKING,
}
"""Phases in which an agent can't go on without the store."""


@dataclass(frozen=True, slots=True)
class Agents:
    """What the store knows about the agents of a round, by group rank."""

    arrived: tuple[int, ...]
    """In the order of their reports."""
    leaving: frozenset[int]
    """Their processes have to end."""
    acknowledged: frozenset[int]
    """They have received the failure notice."""
    lost: frozenset[int]
    """Connections to them broke, and they haven't reported."""

    @classmethod
    def parse(cls, arrived: bytes, acknowledged: bytes, lost: bytes, leaving: bytes) -> Agents:
        """Parse the values of four keys: words that are group ranks."""
        words = arrived.split()
        ranks = dict.fromkeys(int(word.rstrip(_LEAVING_MARK)) for word in words)
        marked = (int(word[:-1]) for word in words if word.endswith(_LEAVING_MARK))
        return cls(
            tuple(ranks),
            frozenset(marked).union(map(int, leaving.split())),
            frozenset(map(int, acknowledged.split())),
            frozenset(map(int, lost.split())) - ranks.keys(),
        )

    @property
    def live(self) -> set[int]:
        """The agents that have acknowledged the failure or reported, and aren't lost."""
        return {*self.arrived, *self.acknowledged} - self.lost

    @property
    def staying(self) -> set[int]:
        """The live agents whose processes don't have to end."""
        return self.live - self.leaving

    def is_complete(self, nodes: int) -> bool:
        """Whether every agent has reported or is known to be dead."""
        return len({*self.arrived, *self.lost}) >= nodes

    def have_live_ones_reported(self) -> bool:
        """Whether every agent has reported that is known to live."""
        live = self.acknowledged - self.lost
        return bool(self.acknowledged) and live <= set(self.arrived)

    def order_leaders(self) -> list[int]:
        """Return who may lead, one after another: rank 0's node also prints what a person sees.

        Leaving agents come last: their processes may be gone before they have concluded.
        """
        return sorted(self.arrived, key=lambda rank: (rank in self.leaving, rank))[:MAX_LEADERS]


class Election:
    """One agent's part in an election on a topic: the verdict, a restart, or a stall.

    `handle` takes an event and returns what the driver has to do. When `deadline` has come, the
    driver sends `TimePassed`; it answers each `AskStore` with `Answered` or `Unanswered`. Nothing
    is ever outstanding beside one request and the caller's answer to `Lead` and `Publish`.
    """

    def __init__(self, own: int, nodes: int, limits: Limits, topic: str = "") -> None:
        self.phase = ElectionPhase.REPORTING
        self.deadline: float | None = None
        """Monotonic time in seconds, or None while another event will bring the answer."""
        self.arrival_number = 0
        """1 for the first agent that reported, 2 for the second, and so on; 0 before the report."""
        self._own = own
        self._nodes = nodes
        self._limits = limits
        self._topic = topic
        self._request = 0
        self._shutdown_at: float | None = None
        self._waits_since = 0.0
        """When the present wait for other agents began."""
        self._max_hurried_wait_seconds = 0.0
        """Most seconds of that wait once this process has to end."""
        self._ordered_at = 0.0
        """When this agent learned the order of leaders."""
        self._closes_at = 0.0
        """When the arrivals are closed without the missing agents."""
        self._more_seconds_if_leaving = 0.0
        """Seconds by which that is later if an agent leaves: then workers may still be saving."""
        self._may_leave = True
        self._pause = limits.first_pause
        self._agents = Agents.parse(b"", b"", b"", b"")
        self._leaders: list[int] = []
        self._is_complete = True
        self._turn = 0
        """Index of the leader whose turn it is."""
        self._is_taking = False
        """Whether the outstanding request of the phase TAKING takes the leadership."""
        self._overdue_publisher = b""
        """The leader's key, if that agent began to publish and didn't finish in time."""
        self._verdict = b""
        """One that arrived while this agent concluded."""
        self._own_verdict = b""

    def key(self, name: str) -> str:
        """Return a key of this election in the store."""
        return build_key(name, self._topic)

    def handle(  # noqa: C901 - one case for each event
        self, event: Event, now: float
    ) -> list[Instruction]:
        """Return what an event leads to, at this monotonic time."""
        match event:
            case _ if self.phase is ElectionPhase.ENDED:
                return []
            case Started(report, settle_seconds, grace_seconds, may_leave):
                self._more_seconds_if_leaving = grace_seconds
                self._may_leave = may_leave
                return self._begin(report, now + settle_seconds)
            case Answered(request, values):
                return self._take_answer(values, now) if request == self._request else []
            case Unanswered(request):
                return self._take_silence() if request == self._request else []
            case KeySet(name, value):
                return self._take_key(name, value, now)
            case WaitingConnectionBroke():
                return self._read_what_is_awaited()
            case TimePassed():
                # Late: this process was frozen. It may host the store, so that its peers couldn't
                # hand in their reports meanwhile.
                self._closes_at += max(now - (now if self.deadline is None else self.deadline), 0.0)
                return self._read_what_is_awaited()
            case ShutdownRequested():
                return self._hurry(now)
            case Concluded():
                return self._announce()
            case ConclusionFailed():
                return self._follow(now)
            case Published(verdict):
                return self._share(verdict)
            case Interrupted():
                return self._give_up(NoVerdictReason.INTERRUPTED)

    # --- the store ----------------------------------------------------------------------------

    def _ask(
        self,
        phase: ElectionPhase,
        purpose: str,
        *operations: Operation,
        is_optional: bool = False,
    ) -> list[Instruction]:
        self.phase = phase
        self.deadline = None
        self._request += 1
        return [AskStore(self._request, operations, purpose, is_optional)]

    def _take_answer(self, values: tuple[bytes, ...], now: float) -> list[Instruction]:
        match self.phase:
            case ElectionPhase.REPORTING:
                return self._collect(values, now)
            case ElectionPhase.LOOKING:
                return self._take_look(values, now)
            case ElectionPhase.CLOSING:
                return self._take_order(values[-1], now)
            case ElectionPhase.ASKING:
                return self._take_turn_state(values, now)
            case ElectionPhase.TAKING:
                return self._take_leadership(values, now)
            case ElectionPhase.ANNOUNCING:
                return self._take_permission(values[-1], now)
            case ElectionPhase.SHARING:
                return self._adopt(values[-1])
            case _:
                return []  # the message about leaving, whose answer nobody needs

    def _take_silence(self) -> list[Instruction]:
        match self.phase:
            case ElectionPhase.SHARING:
                return self._adopt(self._own_verdict)  # it is published where users read it
            case ElectionPhase.ANNOUNCING:
                # A verdict that has arrived counts; else the caller looks where it is published.
                is_known = bool(self._verdict)
                return [
                    Publish(is_allowed=False),
                    *(
                        self._adopt(self._verdict)
                        if is_known
                        else self._give_up(NoVerdictReason.STORE_LOST)
                    ),
                ]
            case _ if self.phase in _ASKS_STORE:
                return self._give_up(NoVerdictReason.STORE_LOST)
            case _:
                return []

    def _take_key(self, name: str, value: bytes, now: float) -> list[Instruction]:
        waits_for_order = {ElectionPhase.COLLECTING, ElectionPhase.LOOKING, ElectionPhase.CLOSING}
        waits_for_verdict = {ElectionPhase.FOLLOWING, ElectionPhase.ASKING, ElectionPhase.TAKING}
        if name == "order" and self.phase in waits_for_order:
            return self._take_order(value, now)
        if name == "verdict":
            self._verdict = value
            if self.phase in waits_for_verdict:
                return self._adopt(value)
        return []

    def _read_what_is_awaited(self) -> list[Instruction]:
        """Read in the store what this agent waits for."""
        if self.phase is ElectionPhase.COLLECTING:
            return self._look()
        if self.phase is ElectionPhase.FOLLOWING:
            return self._ask(
                ElectionPhase.ASKING,
                "looking for a verdict, and whose turn it is",
                Read(self.key("verdict")),
                Read(self.key("leader")),
                is_optional=True,
            )
        return []

    def _read_agents(self) -> tuple[Read, ...]:
        keys = self.key("arrived"), self.key("heard"), LOST_KEY, LEAVING_KEY
        return tuple(map(Read, keys))

    # --- until all agents have reported -------------------------------------------------------

    def _begin(self, report: bytes, closes_at: float) -> list[Instruction]:
        self._closes_at = closes_at
        return self._ask(
            ElectionPhase.REPORTING,
            "handing in this node's report",
            Append(self.key("reports"), report),
            Append(self.key("arrived"), self._name_self()),
            Read(self.key("arrived")),
        )

    def _name_self(self) -> bytes:
        is_leaving = self._shutdown_at is not None
        return b"%d%s " % (self._own, _LEAVING_MARK if is_leaving else b"")

    def _collect(self, values: tuple[bytes, ...], now: float) -> list[Instruction]:
        self._agents = Agents.parse(values[-1], b"", b"", b"")
        self.arrival_number = self._agents.arrived.index(self._own) + 1
        before: list[Instruction] = [WatchKeys(("order", "verdict"))]
        if self._shutdown_at is not None and self._own not in self._agents.leaving:
            before.append(self._announce_leaving())
        if len(self._agents.arrived) >= self._nodes:
            return [*before, *self._close(is_complete=True)]
        # A dead agent never reports, so somebody must close the arrivals without it: as soon as
        # every agent that acknowledged the failure has reported. Looks are staggered by two seconds
        # in the order of arrival: the first agent's look is enough unless it dies, and 1,000 agents
        # don't read the same keys at once.
        first_look = now + self._limits.acknowledgment + 2 * (self.arrival_number - 1)
        return [*before, *self._await_order(first_look, now)]

    def _await_order(self, look_at: float, now: float) -> list[Instruction]:
        self.phase = ElectionPhase.COLLECTING
        self._waits_since = now
        self._max_hurried_wait_seconds = self._limits.hurried_settle
        self.deadline = max(min(look_at, self._limit(self._closes_at)), now)
        return []

    def _limit(self, deadline: float) -> float:
        """Return a deadline of the present wait, or an earlier one after a request to shut down."""
        if self._shutdown_at is None:
            return deadline
        return min(
            deadline, max(self._shutdown_at, self._waits_since) + self._max_hurried_wait_seconds
        )

    def _look(self) -> list[Instruction]:
        return self._ask(
            ElectionPhase.LOOKING,
            "looking which nodes live",
            Read(self.key("order")),
            *self._read_agents(),
        )

    def _take_look(self, values: tuple[bytes, ...], now: float) -> list[Instruction]:
        order, *agents = values
        self._agents = Agents.parse(*agents)
        if order:
            return self._take_order(order, now)
        if self._own not in self._agents.arrived:
            # This agent was frozen for so long that its peers have deleted what it handed in.
            return self._give_up(NoVerdictReason.UNDECIDED)
        if self._agents.have_live_ones_reported() or self._agents.is_complete(self._nodes):
            return self._close(is_complete=self._agents.is_complete(self._nodes))
        usual = self._closes_at + (self._more_seconds_if_leaving if self._agents.leaving else 0.0)
        closes_at = self._limit(usual)
        if now >= closes_at:
            if now < usual and self._can_others_decide():
                return self._give_up(NoVerdictReason.LEFT_TO_OTHERS)
            return self._close(is_complete=False)
        pause = self._pause
        self._pause = min(2 * pause, self._limits.longest_pause)
        self.phase = ElectionPhase.COLLECTING
        self.deadline = min(now + pause, closes_at)
        return []

    def _close(self, *, is_complete: bool) -> list[Instruction]:
        leaders = self._agents.order_leaders()
        order = json.dumps({"leaders": leaders, "complete": is_complete})
        return self._ask(
            ElectionPhase.CLOSING,
            "publishing who may lead",
            Swap(self.key("leader"), b"", str(leaders[0]).encode()),
            SetOnce(self.key("order"), order.encode()),
        )

    def _can_others_decide(self) -> bool:
        """Whether this agent may leave the decision to one that stays."""
        return self._may_leave and bool(self._agents.staying - {self._own})

    # --- turn by turn -------------------------------------------------------------------------

    def _take_order(self, value: bytes, now: float) -> list[Instruction]:
        order = json.loads(value)
        self._leaders = order["leaders"]
        self._is_complete = order["complete"]
        self._ordered_at = now
        self._turn = -1
        return self._next_turn(now)

    def _next_turn(self, now: float) -> list[Instruction]:
        # Turn-taking without a coordinator: all agents walk the same list. While it is another
        # agent's turn, this agent waits for that agent's verdict; if none comes, the turn passes to
        # the next agent, perhaps this one.
        self._turn += 1
        if self._verdict:
            return self._adopt(self._verdict)
        if self._turn >= len(self._leaders):
            return self._give_up(NoVerdictReason.UNDECIDED)
        if self._leaders[self._turn] != self._own:
            return self._follow(now)
        self._is_taking = False
        return self._ask(
            ElectionPhase.TAKING,
            "asking for the current turn",
            Read(self.key("verdict")),
            Read(self.key("leader")),
            *self._read_agents(),
        )

    def _follow(self, now: float, *, is_publishing: bool = False) -> list[Instruction]:
        """Wait for the verdict of the agent whose turn it is; `is_publishing` if it uploads one."""
        if self._verdict:
            return self._adopt(self._verdict)
        limits = self._limits
        self.phase = ElectionPhase.FOLLOWING
        self._waits_since = now
        self._max_hurried_wait_seconds = (
            limits.hurried_publishing if is_publishing else limits.hurried_leader
        )
        self.deadline = self._limit(now + (limits.publishing if is_publishing else limits.leader))
        return []

    def _take_turn_state(self, values: tuple[bytes, ...], now: float) -> list[Instruction]:
        """Another agent's turn is over."""
        verdict, leader = values
        if verdict:
            return self._adopt(verdict)
        # The leader has concluded and is uploading. Taking over now would publish a second
        # verdict. It may also have died there, and then no agent removes the mark: after the limit
        # the next agent takes over.
        if leader.endswith(_PUBLISHING_MARK) and leader != self._overdue_publisher:
            self._overdue_publisher = leader
            return self._follow(now, is_publishing=True)
        if self._shutdown_at is not None:
            hurried_since = max(self._shutdown_at, self._ordered_at)
            if now >= hurried_since + self._limits.hurried_leader:
                return self._give_up(
                    NoVerdictReason.LEFT_TO_OTHERS
                    if self._can_others_decide()
                    else NoVerdictReason.UNDECIDED
                )
        return self._next_turn(now)

    def _take_leadership(self, values: tuple[bytes, ...], now: float) -> list[Instruction]:
        """Its own turn: first see whether it may lead, then take the leadership."""
        if not self._is_taking:
            return self._see_whether_to_lead(values, now)
        leader, reports, *joined = values
        if leader != str(self._own).encode():
            return self._follow(now)  # another agent has taken over
        self.phase = ElectionPhase.LEADING
        self.deadline = None
        agents = self._agents
        return [
            Lead(
                reports,
                joined[0] if joined else b"",
                frozenset(agents.arrived),
                self._is_complete,
                agents.leaving | agents.lost,
            )
        ]

    def _see_whether_to_lead(self, values: tuple[bytes, ...], now: float) -> list[Instruction]:
        verdict, leader, *agents = values
        self._agents = Agents.parse(*agents)
        if verdict:
            return self._adopt(verdict)
        is_publishing = leader.endswith(_PUBLISHING_MARK) and leader != self._overdue_publisher
        if is_publishing:
            return self._follow(now)
        self._is_taking = True
        is_someone_missing = len(self._agents.arrived) < self._nodes
        return self._ask(
            ElectionPhase.TAKING,
            "collecting the nodes' reports",
            Swap(self.key("leader"), leader, str(self._own).encode()),
            Read(self.key("reports")),
            *((Read(JOINED_KEY),) if is_someone_missing else ()),
        )

    # --- the leader ---------------------------------------------------------------------------

    def _announce(self) -> list[Instruction]:
        if self.phase is not ElectionPhase.LEADING or self._verdict:
            adopted = self._adopt(self._verdict) if self._verdict else []
            return [Publish(is_allowed=False), *adopted]
        mine = str(self._own).encode()
        return self._ask(
            ElectionPhase.ANNOUNCING,
            "announcing that this node publishes",
            Swap(self.key("leader"), mine, mine + _PUBLISHING_MARK),
            is_optional=True,
        )

    def _take_permission(self, leader: bytes, now: float) -> list[Instruction]:
        if leader == b"%d%s" % (self._own, _PUBLISHING_MARK):
            self.phase = ElectionPhase.PUBLISHING
            return [Publish(is_allowed=True)]
        return [Publish(is_allowed=False), *self._follow(now)]

    def _share(self, verdict: bytes) -> list[Instruction]:
        self._own_verdict = verdict
        return self._ask(
            ElectionPhase.SHARING,
            "handing the verdict to all nodes",
            SetOnce(self.key("verdict"), verdict),
        )

    # --- the end ------------------------------------------------------------------------------

    def _hurry(self, now: float) -> list[Instruction]:
        if self._shutdown_at is not None:
            return []
        self._shutdown_at = now
        if self.deadline is not None:
            self.deadline = self._limit(self.deadline)
        return [] if self.phase is ElectionPhase.REPORTING else [self._announce_leaving()]

    def _announce_leaving(self) -> AskStore:
        # Beside the outstanding request: nobody needs its answer, so it has no number of its own.
        word = Append(self.key("arrived"), self._name_self())
        return AskStore(0, (word,), "announcing that this process ends", is_optional=True)

    def _adopt(self, verdict: bytes) -> list[Instruction]:
        self._end()
        return [Adopt(verdict)]

    def _give_up(self, reason: NoVerdictReason) -> list[Instruction]:
        self._end()
        return [GiveUp(reason)]

    def _end(self) -> None:
        self.phase = ElectionPhase.ENDED
        self.deadline = None
