"""The election: one agent of a failed round, the leader, concludes for all nodes."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from firstfault_torch import time_limits
from firstfault_torch.guard import call_with_timeout, logger, start_late, try_call
from firstfault_torch.protocol.election import (
    JOINED_KEY,
    LEAVING_KEY,
    LOST_KEY,
    Agents,
    Election,
    ElectionPhase,
)
from firstfault_torch.protocol.limits import build_limits
from firstfault_torch.protocol.messages import (
    Adopt,
    Answered,
    AskStore,
    Concluded,
    ConclusionFailed,
    Event,
    GiveUp,
    Interrupted,
    KeySet,
    Lead,
    NoVerdictReason,
    Operation,
    Publish,
    Published,
    Read,
    ShutdownRequested,
    Started,
    TimePassed,
    Unanswered,
    WaitingConnectionBroke,
    WatchKeys,
)
from firstfault_torch.protocol.shutdown import ExitStep, Hurry, get_limit
from firstfault_torch.rounds.report_packing import (
    ElectedVerdict,
    frame_report,
    pack_verdict,
    parse_frames,
    unpack_verdict,
)
from firstfault_torch.rounds.round_store import carry_out, connect_to_store, set_once

_T = TypeVar("_T")
UNBOUNDED_WAIT = dt.timedelta(days=30)


@dataclass(frozen=True, slots=True)
class CollectedReports:
    """The reports of all nodes, for the leader."""

    copies: dict[str, bytes] = field(default_factory=dict)
    """Documents and roster entries of all nodes, by path below the output prefix."""
    complete: bool = True
    """Every live agent has reported."""
    lost: frozenset[int] = frozenset()
    """Group ranks of the agents that leave, and of those whose connection broke."""


@dataclass(frozen=True, slots=True)
class LeftElection:
    """What an agent found in an election that it left."""

    verdict: ElectedVerdict | None
    """None as long as there is none."""
    others_decide: bool
    """Whether agents take part that don't have to end."""


class VerdictElection:
    """One agent's part in an election on the round's verdict, a restart, or a stall: the driver of
    `firstfault_torch.protocol.election.Election`, which decides what it does.

        join            workers have started: store what its peers need if this node dies
        settle          report; wait until all live agents have reported; the last one publishes the
                        order of leaders
          leader        gets `CollectedReports`, concludes, `announce_publishing`, publishes to the
                        engine, `publish`
          follower      waits for the verdict; takes over if the leader doesn't publish in time
        cancel          no conclusion: wake everybody with an empty verdict

    Keys in the store: "heard" (agents that acknowledged the failure), "reports", "arrived" (who has
    reported; "!" behind an agent that leaves), "order" (who may lead, one after another), "leader"
    (the group rank of the leader, with "!" behind it while it publishes), "verdict", "confirmed"
    (who has the verdict); "lost" and "leaving" for all topics.
    """

    def __init__(self, group_rank: int, nodes: int, topic: str = "") -> None:
        self._own = group_rank
        self._nodes = nodes
        self._election = Election(group_rank, nodes, build_limits(nodes), topic)
        self._connections: tuple[Any, Any] = (None, None)
        """The arguments of `settle`: a connection to use, and one to wait with."""
        self._hints: queue.SimpleQueue[KeySet | WaitingConnectionBroke | Interrupted] = (
            queue.SimpleQueue()
        )
        """What the waiting thread has seen, and calls of `interrupt`."""
        self._outcomes: deque[Lead | Publish | Adopt | GiveUp] = deque()
        """What the election asks the caller for."""
        self._shutdown_requested = threading.Event()
        """The event that `settle` was given."""
        self._knows_of_shutdown = False
        self.is_left_to_others = False
        """Whether `settle` ended without a verdict because this process has to end, and agents take
        part that stay.
        """
        self._has_lost_store = False
        """Whether the store didn't answer after the election: it is asked nothing more."""
        self.thread: threading.Thread | None = None
        """Waits in the store for the order and the verdict; None before `settle` begins."""
        more = time_limits.ELECTION_STEP_TIMEOUT_SECONDS_PER_NODE * nodes
        self._step_seconds = time_limits.ELECTION_STEP_TIMEOUT_SECONDS + more

    @property
    def arrival_number(self) -> int:
        """1 for the first agent that reported, 2 for the second, and so on; 0 before the report."""
        return self._election.arrival_number

    def join(self, store: Any, copies: Mapping[str, bytes]) -> None:
        """Store this node's roster entry when its workers start;
        the leader needs it if the node dies.
        """
        store.append(JOINED_KEY, frame_report(self._own, self._nodes, copies))

    def settle(  # noqa: PLR0913 - keywords
        self,
        connections: tuple[Any, Any],
        copies: Mapping[str, bytes],
        seconds: float,
        shutdown_requested: threading.Event,
        *,
        grace_seconds: float = 0.0,
        may_leave: bool = True,
    ) -> Iterator[CollectedReports | ElectedVerdict]:
        """Yield the nodes' reports if this agent is the leader,
        and another leader's verdict as the last value.

        A leader concludes, calls `announce_publishing`, publishes the verdict, and calls `publish`;
        if that fails, it takes the next value. The values end without a verdict if the store or too
        many agents are lost.

        The second of the two connections to the store only waits, at most `seconds` for other
        nodes' reports, and `grace_seconds` longer once a node got a signal. `shutdown_requested`
        shortens the waits; if it is already set, this process was terminated, and other nodes
        conclude if this one `may_leave` that to them.
        """
        self._connections = connections
        self._shutdown_requested = shutdown_requested
        if shutdown_requested.is_set():
            self._handle(self._take_shutdown())
        report = frame_report(self._own, self._nodes, copies)
        self._handle(Started(report, seconds, grace_seconds, may_leave))
        while True:
            while not self._outcomes:
                self._handle(self._await_event())
            outcome = self._outcomes.popleft()
            if isinstance(outcome, Lead):
                yield _build_reports(outcome)
                # the caller has no conclusion, or couldn't publish it
                if self._election.phase in {ElectionPhase.LEADING, ElectionPhase.PUBLISHING}:
                    self._handle(ConclusionFailed())
            elif isinstance(outcome, Adopt):
                yield unpack_verdict(outcome.verdict)
                return
            elif isinstance(outcome, GiveUp):
                self._has_lost_store = outcome.reason is NoVerdictReason.STORE_LOST
                self.is_left_to_others = outcome.reason is NoVerdictReason.LEFT_TO_OTHERS
                logger.info("no agreement with the other nodes: %s", outcome.reason.value)
                return

    def announce_publishing(self) -> bool:
        """Announce that this agent is about to publish its conclusion. Return False if another
        agent may have taken over.

        No answer is a no. While this agent concluded, another one may have published, and its
        process may have ended, and with it the store. `settle` then yields that verdict if it has
        arrived; else the caller looks for a published one before it publishes its own.
        """
        while not self._hints.empty():
            self._handle(self._hints.get())
        self._handle(Concluded())
        # An interruption that was among the hints has ended the election: `settle` takes that.
        if not isinstance(self._outcomes[0], Publish):
            return False
        answer = self._outcomes.popleft()
        return isinstance(answer, Publish) and answer.is_allowed

    def publish(self, document: bytes, *, durable: bool, bundle: bytes = b"") -> ElectedVerdict:
        """Send a published verdict to its peers; return theirs if another leader was faster."""
        own = ElectedVerdict(document, durable, bundle)
        self._handle(Published(pack_verdict(own)))
        counts = self._outcomes.popleft() if self._outcomes else None
        return unpack_verdict(counts.verdict) if isinstance(counts, Adopt) else own

    def hand_over(
        self, verdict: ElectedVerdict, connect: Callable[[], Any] | None = None
    ) -> ElectedVerdict | None:
        """Send a verdict that was published without an election to agents that still wait for one;
        return the verdict that counts, None if the store is lost.

        With `connect` it uses another connection than `settle`, and any thread may call it.
        """
        # Also if `settle` ended because the store didn't answer: it may only be slow, while other
        # agents wait. The verdict is published already; only its report is delayed, once.
        store = self._connections[0]
        if store is None and connect is None:
            return None

        def put() -> bytes:
            connection = store if connect is None else connect()
            return set_once(connection, self._key("verdict"), pack_verdict(verdict))

        call = partial(try_call, put, dist.DistError)
        hurry = Hurry.NONE if connect is None else Hurry.LEAVING_NOW
        seconds = get_limit(ExitStep.TELL_PEERS, hurry)
        doing = "handing the verdict to the other nodes"
        found, _ = call_with_timeout(call, seconds, doing, self._shutdown_requested) or (None, None)
        self._has_lost_store = found is None
        return unpack_verdict(found) if found is not None else None

    def confirm(self) -> None:
        """Notify the agent that hosts the store that this agent has the verdict."""
        if self._can_ask:
            store = self._connections[0]
            confirm = partial(store.append, self._key("confirmed"), f"{self._own} ")
            seconds = time_limits.STORE_TIMEOUT_SECONDS
            call_with_timeout(confirm, seconds, "confirming the verdict", self._shutdown_requested)

    def await_confirmations(self) -> None:
        """As the agent that hosts the store, wait until all live agents have the verdict."""
        # The store ends with this process. An agent that still waits would lose it, conclude alone,
        # and could publish a second verdict.
        if not self._can_ask:
            return
        names = self._key("arrived"), self._key("heard")
        keys = (*names, LOST_KEY, LEAVING_KEY, self._key("confirmed"))
        look = partial(carry_out, self._connections[0], [Read(key) for key in keys])
        deadline = time.monotonic() + time_limits.CONFIRMATIONS_TIMEOUT_SECONDS
        while time.monotonic() < deadline and not self._shutdown_requested.is_set():
            seconds, doing = time_limits.STORE_TIMEOUT_SECONDS, "looking who has the verdict"
            values = call_with_timeout(look, seconds, doing, self._shutdown_requested)
            if values is None:
                return
            *states, confirmed = values
            agents = Agents.parse(*states)
            if agents.live <= set(map(int, confirmed.split())):
                return
            self._shutdown_requested.wait(time_limits.CONFIRMATIONS_POLL_SECONDS)

    @property
    def _can_ask(self) -> bool:
        """Whether `settle` has begun, and the store may answer."""
        return self._connections[0] is not None and not self._has_lost_store

    def leave(self, store: Any, copies: Mapping[str, bytes]) -> LeftElection | None:
        """Store this node's report and announce that its process exits, so that no agent waits for
        it. Return None if the store doesn't answer.

        Any thread may call it, also while another one is inside of `settle`: it uses only what
        `__init__` has set, and the connection that it's given.
        """

        def report() -> LeftElection:
            # A second report of the same agent has no effect, so both threads may hand it in.
            if not self.arrival_number:
                store.append(self._key("reports"), frame_report(self._own, self._nodes, copies))
            store.append(self._key("arrived"), f"{self._own}! ")
            keys = self._key("arrived"), self._key("heard"), LOST_KEY, LEAVING_KEY
            verdict, *states = (
                bytes(store.get(key)) if store.check([key]) else b""
                for key in (self._key("verdict"), *keys)
            )
            others = Agents.parse(*states).staying - {self._own}
            return LeftElection(unpack_verdict(verdict) if verdict else None, bool(others))

        return self._call_store(report, "handing in this node's report")

    def interrupt(self) -> None:
        """End `settle` at once, from any thread: the election is pointless."""
        self._hints.put(Interrupted())

    def cancel(self, store: Any) -> ElectedVerdict | None:
        """Publish an empty verdict unless there is one, so that no agent waits. Return the verdict
        that counts, or None if the store is lost.
        """

        def end() -> ElectedVerdict:
            set_once(store, self._key("order"), json.dumps({"leaders": [], "complete": False}))
            nobody = pack_verdict(ElectedVerdict(b"", durable=False))
            return unpack_verdict(set_once(store, self._key("verdict"), nobody))

        return self._call_store(end, "informing all agents that nobody concludes")

    @classmethod
    def forget(cls, store: Any, topic: str) -> None:
        """Delete what an election has left in the store, once no agent needs it any more."""
        election = cls(0, 1, topic)
        for name in ("heard", "reports", "arrived", "order", "leader", "verdict", "confirmed"):
            store.delete_key(election._key(name))

    def has_begun(self, store: Any) -> bool:
        """Whether an agent has reported."""
        return bool(store.check([self._key("arrived")]))

    def _key(self, name: str) -> str:
        return self._election.key(name)

    def _call_store(self, call: Callable[[], _T], doing: str) -> _T | None:
        """Return a store operation's result, or None on timeout. Agents may call concurrently."""
        return call_with_timeout(call, self._step_seconds, doing)

    # --- events and instructions ------------------------------------------------------------------

    def _await_event(self) -> Event:
        """Return what happens next: a hint, a request to shut down, or the election's deadline."""
        deadline = self._election.deadline
        while True:
            if self._shutdown_requested.is_set() and not self._knows_of_shutdown:
                return self._take_shutdown()
            left = max((deadline or 0.0) - time.monotonic(), 0.0)
            poll = left if self._knows_of_shutdown else time_limits.SHUTDOWN_POLL_SECONDS
            with contextlib.suppress(queue.Empty):
                return self._hints.get(timeout=min(left, poll))
            if time.monotonic() >= (deadline or 0.0):
                return TimePassed()

    def _take_shutdown(self) -> ShutdownRequested:
        self._knows_of_shutdown = True
        return ShutdownRequested()

    def _handle(self, event: Event) -> None:
        """Pass an event to the election, and carry out what follows from it,
        until the caller has to do something or to wait.
        """
        events = deque([event])
        while events:
            for instruction in self._election.handle(events.popleft(), time.monotonic()):
                if isinstance(instruction, AskStore):
                    events.append(self._ask(instruction))
                elif isinstance(instruction, WatchKeys):
                    self._watch(instruction.names)
                else:
                    self._outcomes.append(instruction)

    def _ask(self, request: AskStore) -> Answered | Unanswered:
        # an optional answer is worth little time once a shutdown is requested
        hurried = self._shutdown_requested if request.is_optional else None
        values, error = call_with_timeout(
            partial(
                try_call, partial(self._carry_out_once_more, request.operations), dist.DistError
            ),
            self._step_seconds,
            request.purpose,
            hurried,
            shutdown_seconds=time_limits.STORE_TIMEOUT_SECONDS,
        ) or (None, None)
        if error is not None:
            logger.info("lost the store while %s: %s", request.purpose, error)
        return Unanswered(request.request) if values is None else Answered(request.request, values)

    def _carry_out_once_more(self, operations: Sequence[Operation]) -> tuple[bytes, ...]:
        """Carry out operations, on a new connection if this one is broken: the store may live."""
        try:
            return carry_out(self._connections[0], operations)
        except (dist.DistNetworkError, dist.DistStoreError):
            using, waiting = self._connections
            self._connections = connect_to_store(using), waiting
            return carry_out(self._connections[0], operations)

    def _watch(self, names: Sequence[str]) -> None:
        # a second connection, because a wait blocks its connection for as long as it takes
        wait = partial(self._wait_for_keys, self._connections[1], names)
        self.thread = threading.Thread(target=wait, name="firstfault-settlement", daemon=True)
        start_late(self.thread)

    def _wait_for_keys(self, waiting: Any, names: Sequence[str]) -> None:
        """Put the keys' values into the queue, one after the other; last, if the wait ends early,
        that the connection broke.
        """

        def wait() -> None:
            for name in names:
                waiting.wait([self._key(name)], UNBOUNDED_WAIT)
                self._hints.put(KeySet(name, bytes(waiting.get(self._key(name)))))

        _, error = try_call(wait, Exception)
        if error is not None:
            self._hints.put(WaitingConnectionBroke())
            logger.info("lost a connection to the store that the agents share: %s", error)


def _build_reports(leading: Lead) -> CollectedReports:
    """Return the nodes' reports; of an unreported one, what it stored when its workers started."""
    copies: dict[str, bytes] = {}
    for group_rank, files in parse_frames(leading.joined):
        if group_rank not in leading.arrived:
            copies.update(files)
    for _, files in parse_frames(leading.reports):
        copies.update(files)
    return CollectedReports(copies, leading.complete, leading.lost)


def count_joined(store: Any) -> int:
    """Return the number of agents in the round that run firstfault:
    torch's own agents don't join.
    """
    return len(dict(parse_frames(bytes(store.get(JOINED_KEY))))) if store.check([JOINED_KEY]) else 0
