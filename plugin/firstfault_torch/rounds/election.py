"""The election: one agent of a failed round, the leader, concludes for all nodes."""

from __future__ import annotations

import datetime as dt
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from firstfault_torch import time_limits
from firstfault_torch.guard import call_with_timeout, logger, start_late, try_call
from firstfault_torch.rounds.report_packing import (
    ElectedVerdict,
    frame_report,
    pack_verdict,
    parse_frames,
    unpack_verdict,
)
from firstfault_torch.rounds.round_store import set_once

_T = TypeVar("_T")
JOINED_KEY = "firstfault/joined"
"""What each agent stored when its workers started: concatenated frames."""
MAX_LEADERS = 4
UNBOUNDED_WAIT = dt.timedelta(days=30)


@dataclass(frozen=True, slots=True)
class CollectedReports:
    """The reports of all nodes, as the leader gets them."""

    copies: dict[str, bytes] = field(default_factory=dict)
    """Documents and roster entries of all nodes, by path below the output prefix."""
    complete: bool = True
    """Every live agent has reported."""
    lost: frozenset[int] = frozenset()
    """Group ranks of the agents that leave, and of joined agents that are dead."""


class VerdictElection:
    """One agent's part in an election: who concludes on the round's verdict, a restart, or a stall.

        join            workers have started: store what its peers need if this node dies
        acknowledge     a failure notice arrived: this agent is alive and will report
        settle          report; wait until all live agents have reported; the last one publishes the
                        order of leaders
          leader        gets `CollectedReports`, concludes, `announce_publishing`, publishes to the
                        engine, `publish`
          follower      waits for the verdict; takes over if the leader doesn't publish in time
        cancel          no conclusion: wake everybody with an empty verdict

    Keys in the store: "heard" (agents that acknowledged the failure), "reports", "arrived" and
    "arrivals" (who has reported, and how many), "order" (who may lead, one after another), "leader"
    (the group rank of the leader, with "!" behind it while it publishes), "verdict".
    """

    def __init__(self, group_rank: int, nodes: int, topic: str = "") -> None:
        self._own = group_rank
        self._nodes = nodes
        self._prefix = f"firstfault/{topic}/" if topic else "firstfault/"
        self._store: Any = None
        """The connection that `settle` was given."""
        self._results: queue.SimpleQueue[tuple[str, bytes] | BaseException] = queue.SimpleQueue()
        """The values of keys that the waiting thread has read."""
        self._shutdown_requested: threading.Event | None = None
        """The event that `settle` was given."""
        self._is_silent = False
        """Whether the store didn't answer when this agent announced that it publishes."""
        self.thread: threading.Thread | None = None
        """Waits in the store for the order and the verdict; None: `settle` hasn't begun."""
        self._arrival_number = 0
        """1 for the first agent that reported, and so on; 0: not reported yet."""
        more = time_limits.ELECTION_STEP_TIMEOUT_SECONDS_PER_NODE * nodes
        self._step_seconds = time_limits.ELECTION_STEP_TIMEOUT_SECONDS + more

    def join(self, store: Any, copies: Mapping[str, bytes]) -> None:
        """Store this node's roster entry when its workers start;
        the leader needs it if the node dies.
        """
        store.append(JOINED_KEY, frame_report(self._own, self._nodes, copies))

    def acknowledge(self, store: Any) -> None:
        """Record that this node has received the failure notice, so its agent is alive."""
        store.append(self._key("heard"), f"{self._own} ")

    def settle(
        self,
        connections: tuple[Any, Any],
        copies: Mapping[str, bytes],
        seconds: float,
        shutdown_requested: threading.Event,
    ) -> Iterator[CollectedReports | ElectedVerdict]:
        """Yield the nodes' reports if this agent is the leader,
        and another leader's verdict as the last value.

        A leader concludes, calls `announce_publishing`, publishes the verdict, and calls `publish`;
        if that fails, it takes the next value. The values end without a verdict if the store or too
        many agents are lost.

        The second of the two connections to the store only waits, at most `seconds` for other
        nodes' reports. `shutdown_requested` shortens the waits; if it is already set, this process
        was terminated, and other nodes conclude.
        """
        self._store, waiting = connections
        self._shutdown_requested = shutdown_requested
        arrive = partial(self._report, self._store, copies, leaving=shutdown_requested.is_set())
        if not self._call_store(arrive, "handing in this node's report"):
            return
        # a second connection, because a wait blocks its connection for as long as it takes
        wait = partial(self._wait_for_leaders_and_verdict, waiting)
        self.thread = threading.Thread(target=wait, name="firstfault-settlement", daemon=True)
        start_late(self.thread)
        # without an order the store is lost: the caller concludes alone
        order = self._wait_for_leaders(seconds, shutdown_requested) or {"leaders": []}
        # Turn-taking without a coordinator: all agents walk the same list. While it is another
        # agent's turn, this agent waits for that agent's verdict; if none comes, the turn passes to
        # the next agent, perhaps this one.
        overdue = b""  # the leader's key, if that agent began to publish and didn't finish in time
        for group_rank in order["leaders"]:
            if group_rank == self._own:
                turn = self._call_store(
                    partial(self._take_leadership, order, overdue), "collecting the nodes' reports"
                )
                if turn is not None:
                    yield turn
                if isinstance(turn, ElectedVerdict):
                    return
            patience = (
                time_limits.LEADER_TIMEOUT_SECONDS
                + time_limits.LEADER_TIMEOUT_SECONDS_PER_NODE * self._nodes
            )
            hurried = time_limits.TERMINATED_PEER_VERDICT_TIMEOUT_SECONDS
            found = self._await_verdict(patience, shutdown_requested, hurried)
            leader = (
                b""
                if found is not None
                else self._ask_store(self._read_leader, "asking for the current turn")
            )
            # "!": the leader has concluded and is uploading. Taking over now would publish a second
            # verdict. It may also have died there, and then no agent removes the "!": after the
            # limit the next agent takes over.
            if leader and leader.endswith(b"!") and leader != overdue:
                patience = time_limits.LEADER_PUBLISH_TIMEOUT_SECONDS
                hurried = time_limits.TERMINATED_PEER_PUBLISH_TIMEOUT_SECONDS
                found = self._await_verdict(patience, shutdown_requested, hurried)
                overdue = leader
            if isinstance(found, bytes):
                yield unpack_verdict(found)
            if found is not None or leader is None or shutdown_requested.is_set():
                return

    def announce_publishing(self) -> bool:
        """Announce that this agent is about to publish its conclusion;
        False if another agent may have taken over.

        No answer is a no. While this agent concluded, another one may have published, and its
        process may have ended, and with it the store. `settle` then yields that verdict if it has
        arrived; else the caller looks for a published one before it publishes its own.
        """
        mine = str(self._own).encode()
        announce_publishing = partial(
            self._store.compare_set,
            self._key("leader"),
            mine,
            mine + b"!",
        )
        leader = self._ask_store(announce_publishing, "announcing that this node publishes")
        self._is_silent = leader is None
        return leader == mine + b"!"

    def publish(self, document: bytes, *, durable: bool, bundle: bytes = b"") -> ElectedVerdict:
        """Send a published verdict to its peers; return theirs if another leader was faster."""
        own = ElectedVerdict(document, durable, bundle)
        found = self._call_store(
            partial(self._set_verdict, self._store, own), "handing the verdict to all nodes"
        )
        return found if found is not None else own

    def leave(self, store: Any, copies: Mapping[str, bytes]) -> None:
        """Store this node's report and announce that its process exits,
        so that no agent waits for it.
        """
        if not self._arrival_number:
            self._call_store(
                partial(self._report, store, copies, leaving=True), "handing in this node's report"
            )

    def interrupt(self, reason: str) -> None:
        """End `settle` at once, from any thread: the election is pointless."""
        self._results.put(InterruptedError(reason))

    def cancel(self, store: Any) -> ElectedVerdict | None:
        """Publish an empty verdict unless there is one, so that no agent waits;
        return the verdict that counts.

        None: the store is lost.
        """

        def end() -> ElectedVerdict:
            set_once(store, self._key("order"), json.dumps({"leaders": [], "complete": False}))
            return self._set_verdict(store, ElectedVerdict(b"", durable=False))

        return self._call_store(end, "informing all agents that nobody concludes")

    @classmethod
    def forget(cls, store: Any, topic: str) -> None:
        """Delete what an election has left in the store, once no agent needs it any more."""
        election = cls(0, 1, topic)
        for name in ("heard", "reports", "arrived", "arrivals", "order", "leader", "verdict"):
            store.delete_key(election._key(name))

    def has_begun(self, store: Any) -> bool:
        """Whether an agent has reported."""
        return bool(store.check([self._key("arrivals")]))

    def _set_verdict(self, store: Any, verdict: ElectedVerdict) -> ElectedVerdict:
        """Store a verdict unless there is one; return the stored one."""
        return unpack_verdict(set_once(store, self._key("verdict"), pack_verdict(verdict)))

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _call_store(self, call: Callable[[], _T], doing: str) -> _T | None:
        """Return the result of a store operation;
        None on timeout. All agents may call at the same moment.
        """
        return call_with_timeout(call, self._step_seconds, doing)

    def _ask_store(self, call: Callable[[], _T], doing: str) -> _T | None:
        """Do the same with a shorter limit once a shutdown is requested: the answer is optional."""
        hurried, seconds = self._shutdown_requested, time_limits.STORE_TIMEOUT_SECONDS
        return call_with_timeout(call, self._step_seconds, doing, hurried, shutdown_seconds=seconds)

    # --- arriving ---------------------------------------------------------------------------------

    def _report(self, store: Any, copies: Mapping[str, bytes], *, leaving: bool) -> bool:
        store.append(self._key("reports"), frame_report(self._own, self._nodes, copies))
        store.append(self._key("arrived"), f"{self._own}{'!' if leaving else ''} ")
        self._arrival_number = int(store.add(self._key("arrivals"), 1))
        if self._arrival_number == self._nodes:
            self._publish_leaders(store, complete=True)
        return True

    def _wait_for_leaders(
        self, seconds: float, shutdown_requested: threading.Event
    ) -> dict[str, Any] | None:
        """Wait until all live agents have reported;
        check repeatedly whether the missing ones are dead.
        """
        # A dead agent never reports, so somebody must close the arrivals without it: as soon as
        # every agent that acknowledged the failure has reported. Checks are staggered by two
        # seconds in the order of arrival: the first agent's check is enough unless it dies, and
        # 1,000 agents don't read the same keys at once.
        now = time.monotonic()
        deadline = now + seconds
        look_at = min(
            now + time_limits.ACKNOWLEDGMENT_TIMEOUT_SECONDS + 2 * (self._arrival_number - 1),
            deadline,
        )
        pause: float = time_limits.ARRIVALS_POLL_SECONDS
        while True:
            patience, hurried = look_at - time.monotonic(), time_limits.TERMINATED_SETTLE_SECONDS
            found = self._get_next_result("order", patience, shutdown_requested, hurried)
            if found is None:
                # Read here, too: the waiting thread's connection may be silent, and then it never
                # learns of the order.
                is_over = time.monotonic() >= deadline or shutdown_requested.is_set()
                found = self._call_store(
                    partial(self._close_arrivals, is_over), "looking which nodes live"
                )
                if found is None:
                    return None
            if not isinstance(found, bytes):
                return None
            if found:
                order: dict[str, Any] = json.loads(found)
                return order
            look_at = min(time.monotonic() + pause, deadline)
            pause = min(2 * pause, time_limits.MAX_ARRIVALS_POLL_SECONDS)

    def _await_verdict(
        self,
        seconds: float,
        shutdown_requested: threading.Event,
        shutdown_seconds: float,
    ) -> bytes | BaseException | None:
        """Return the verdict, or why the store is lost; None if there is none in time."""
        # Once the store doesn't answer, further questions would delay this node's verdict, each by
        # as long as it may take. If another agent has concluded, its verdict has arrived, or is
        # published where the caller looks.
        seconds = 0.0 if self._is_silent else seconds
        found = self._get_next_result("verdict", seconds, shutdown_requested, shutdown_seconds)
        if found is not None or self._is_silent:
            return found or TimeoutError("the store doesn't answer")
        # as for the order: the waiting connection may be silent
        verdict = self._ask_store(partial(self._read, "verdict"), "looking for a verdict")
        return TimeoutError("the store doesn't answer") if verdict is None else verdict or None

    def _get_next_result(
        self,
        key: str,
        seconds: float,
        shutdown_requested: threading.Event,
        shutdown_seconds: float,
    ) -> bytes | BaseException | None:
        """Return the waiting thread's value of a key; None if none comes in time,
        or soon once a shutdown is requested.

        It is an exception if the store is lost.
        """
        deadline = time.monotonic() + max(seconds, 0)
        hurried = False
        while True:
            if shutdown_requested.is_set() and not hurried:
                hurried = True
                deadline = min(deadline, time.monotonic() + shutdown_seconds)
            left = max(deadline - time.monotonic(), 0)
            try:
                found = self._results.get(
                    timeout=left if hurried else min(left, time_limits.SHUTDOWN_POLL_SECONDS)
                )
            except queue.Empty:
                if time.monotonic() >= deadline:
                    return None
                continue
            if isinstance(found, BaseException):
                return found
            # another key is one that this thread has read itself in the meantime
            if found[0] == key:
                return found[1]

    def _wait_for_leaders_and_verdict(self, waiting: Any) -> None:
        """Put the leader order, then the verdict into the queue; the error if the store is lost."""

        def wait() -> None:
            for key in ("order", "verdict"):
                waiting.wait([self._key(key)], UNBOUNDED_WAIT)
                self._results.put((key, bytes(waiting.get(self._key(key)))))

        _, error = try_call(wait, Exception)
        if error is not None:
            self._results.put(error)
            logger.info("lost the store that the agents share: %s", error)

    def _close_arrivals(self, is_over: bool) -> bytes:
        """Publish the leader order if every live agent has reported, or if the wait is over;
        return it, else b"".
        """
        if order := self._read("order"):
            return order
        store = self._store
        arrived = {group_rank for group_rank, _ in self._read_arrivals(store)}
        key = self._key("heard")
        acknowledged = (
            {int(word) for word in store.get(key).split()} if store.check([key]) else set()
        )
        complete = bool(acknowledged) and acknowledged <= arrived
        if not complete and not is_over:
            return b""
        return self._publish_leaders(store, complete=complete or len(arrived) >= self._nodes)

    # --- concluding -------------------------------------------------------------------------------

    def _take_leadership(
        self, order: dict[str, Any], overdue: bytes
    ) -> CollectedReports | ElectedVerdict | None:
        """Return the reports to conclude from, or another agent's verdict;
        None if another agent has taken over.

        overdue: the value of the leader's key that may be replaced although its agent publishes;
        empty: none.
        """
        store = self._store
        mine = str(self._own).encode()
        # never unset: `_publish_leaders` sets it before the order
        before = self._read_leader()
        is_publishing = before.endswith(b"!") and before != overdue
        if is_publishing or bytes(store.compare_set(self._key("leader"), before, mine)) != mine:
            return None
        if verdict := self._read("verdict"):
            return unpack_verdict(verdict)
        return self._collect_reports(bool(order["complete"]))

    def _collect_reports(self, complete: bool) -> CollectedReports:
        """Return the nodes' reports; for an unreported node,
        what it stored when its workers started.
        """
        store = self._store
        arrivals = self._read_arrivals(store)
        arrived = {group_rank for group_rank, _ in arrivals}
        lost = {group_rank for group_rank, leaves in arrivals if leaves}
        copies: dict[str, bytes] = {}
        if len(arrived) < self._nodes and store.check([JOINED_KEY]):
            for group_rank, files in parse_frames(bytes(store.get(JOINED_KEY))):
                if group_rank not in arrived:
                    copies.update(files)
                    lost |= {group_rank} if complete else set()
        for _, files in parse_frames(bytes(store.get(self._key("reports")))):
            copies.update(files)
        return CollectedReports(copies, complete, frozenset(lost))

    def _read(self, name: str) -> bytes:
        """Return the value of a key; empty if it isn't set."""
        key = self._key(name)
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _read_leader(self) -> bytes:
        return bytes(self._store.get(self._key("leader")))

    def _publish_leaders(self, store: Any, *, complete: bool) -> bytes:
        """Publish the agents that may lead, by group rank:
        rank 0's node also prints what a person sees.

        Return the order that counts.
        """
        # leaving agents come last: their processes may be gone before they have concluded
        candidates = sorted(
            self._read_arrivals(store), key=lambda arrival: (arrival[1], arrival[0])
        )
        leaders = [group_rank for group_rank, _ in candidates[:MAX_LEADERS]]
        store.compare_set(self._key("leader"), "", str(leaders[0]))
        return set_once(
            store, self._key("order"), json.dumps({"leaders": leaders, "complete": complete})
        )

    def _read_arrivals(self, store: Any) -> list[tuple[int, bool]]:
        """Return the group rank of each agent that has reported, and whether its process exits."""
        words = bytes(store.get(self._key("arrived"))).split()
        return [(int(word.rstrip(b"!")), word.endswith(b"!")) for word in words]


def count_joined(store: Any) -> int:
    """Return the number of agents in the round that run firstfault:
    torch's own agents don't join.
    """
    return len(dict(parse_frames(bytes(store.get(JOINED_KEY))))) if store.check([JOINED_KEY]) else 0
