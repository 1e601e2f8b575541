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
from firstfault_torch.guard import call_with_timeout, logger, try_call
from firstfault_torch.rounds.report_packing import ElectedVerdict, _framed, _frames, _packed, _unpacked
from firstfault_torch.rounds.round_store import set_once

_T = TypeVar("_T")
_JOINED = "firstfault/joined"
"""What each agent handed in when its workers started: frames, one behind the other."""
_MAX_TURNS = 4
_FOREVER = dt.timedelta(days=30)


@dataclass(frozen=True, slots=True)
class CollectedReports:
    """What the agents handed in."""

    copies: dict[str, bytes] = field(default_factory=dict)
    """Documents and roster entries of all nodes, by path below the output prefix."""
    complete: bool = True
    """Every agent that lives has reported."""
    lost: frozenset[int] = frozenset()
    """Group ranks of the agents that leave, and of those that had joined and are dead."""


class VerdictElection:
    """One agent's part in the settlement of a round, on the verdict or on another topic, one after the other."""

    def __init__(self, group_rank: int, nodes: int, topic: str = "") -> None:
        self._own = group_rank
        self._nodes = nodes
        self._prefix = f"firstfault/{topic}/" if topic else "firstfault/"
        self._store: Any = None
        """The connection of `settle`."""
        self._results: queue.SimpleQueue[bytes | BaseException] = queue.SimpleQueue()
        self._arrived_as = 0
        """How many had arrived when this one had; 0: it has not."""

    def join(self, store: Any, copies: Mapping[str, bytes]) -> None:
        """Hand in what this node knows when its workers start; the others need it if the node dies."""
        store.append(_JOINED, _framed(self._own, self._nodes, copies))

    def heard(self, store: Any) -> None:
        """Tell the others that this node knows of a fatal failure: its agent lives."""
        store.append(self._key("heard"), f"{self._own} ")

    def settle(
        self,
        connections: tuple[Any, Any],
        copies: Mapping[str, bytes],
        seconds: float,
        shutdown_requested: threading.Event,
    ) -> Iterator[CollectedReports | ElectedVerdict]:
        """Yield the nodes' reports when it is this agent's turn to conclude; the verdict of another agent as the last.

        In its turn the caller concludes, calls `claim`, publishes the verdict, and calls `hand_over`. If it cannot, it
        takes the next value. The values end without a verdict if the store or too many agents are lost.

        Of the two connections to the store the second one only waits, at most `seconds` for the other nodes' reports.
        `shutdown_requested`, once set, shortens the waits; if it is set already, this process was terminated, and other
        nodes conclude.
        """
        self._store, waiting = connections
        arrive = partial(self._arrive, self._store, copies, leaving=shutdown_requested.is_set())
        if not self._bounded(arrive, "handing in this node's report"):
            return
        wait = partial(self._wait_for_both, waiting)
        threading.Thread(target=wait, name="firstfault-settlement", daemon=True).start()
        order = self._await_order(seconds, shutdown_requested) or {"sealers": []}
        for group_rank in order["sealers"]:
            if group_rank == self._own:
                turn = self._bounded(partial(self._begin_turn, order), "collecting the nodes' reports")
                if turn is not None:
                    yield turn
                if isinstance(turn, ElectedVerdict):
                    return
            patience = time_limits.LEADER_TIMEOUT_SECONDS + time_limits.LEADER_TIMEOUT_SECONDS_PER_NODE * self._nodes
            found = self._next_result(patience, shutdown_requested, time_limits.TERMINATED_PEER_VERDICT_TIMEOUT_SECONDS)
            sealer = b"" if found is not None else self._bounded(self._sealer, "asking whose turn it is")
            if sealer and sealer.endswith(b"!"):
                found = self._next_result(
                    time_limits.LEADER_PUBLISH_TIMEOUT_SECONDS,
                    shutdown_requested,
                    time_limits.TERMINATED_PEER_PUBLISH_TIMEOUT_SECONDS,
                )
            if isinstance(found, bytes):
                yield _unpacked(found)
            if found is not None or shutdown_requested.is_set():
                return

    def claim(self) -> bool:
        """Announce that this agent publishes what it has concluded; False if another agent has taken over."""
        mine = str(self._own).encode()
        claim = partial(self._store.compare_set, self._key("sealer"), mine, mine + b"!")
        return self._bounded(claim, "announcing that this node publishes") in {None, mine + b"!"}

    def hand_over(self, document: bytes, *, durable: bool, bundle: bytes = b"") -> ElectedVerdict:
        """Hand a published verdict to the other agents; return theirs if another agent has been faster."""
        settled = ElectedVerdict(document, durable, bundle)
        value = _packed(settled)
        found = self._bounded(
            lambda: _unpacked(set_once(self._store, self._key("seal"), value)), "handing the verdict to the other nodes"
        )
        return found if found is not None else settled

    def leave(self, store: Any, copies: Mapping[str, bytes]) -> None:
        """Hand in this node's report and announce that it leaves, so that the others do not wait for it."""
        if not self._arrived_as:
            self._bounded(partial(self._arrive, store, copies, leaving=True), "handing in this node's report")

    def interrupt(self, reason: str) -> None:
        """End `settle` at once, from any thread: there is nothing left to settle on."""
        self._results.put(InterruptedError(reason))

    def abandon(self, store: Any) -> ElectedVerdict | None:
        """Publish an empty document, unless there is one, so that no agent waits any longer; return what counts.

        None: the store is lost.
        """

        def end() -> ElectedVerdict:
            set_once(store, self._key("order"), json.dumps({"sealers": [], "complete": False}))
            return _unpacked(set_once(store, self._key("seal"), _packed(ElectedVerdict(b"", durable=False))))

        return self._bounded(end, "telling the other agents that there is no conclusion")

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _bounded(self, call: Callable[[], _T], doing: str) -> _T | None:
        """Return what the store answers; None if it does not in time: all agents may ask at the same moment."""
        return call_with_timeout(
            call,
            time_limits.ELECTION_STEP_TIMEOUT_SECONDS
            + time_limits.ELECTION_STEP_TIMEOUT_SECONDS_PER_NODE * self._nodes,
            doing,
        )

    # --- arriving -----------------------------------------------------------------------------------------------

    def _arrive(self, store: Any, copies: Mapping[str, bytes], *, leaving: bool) -> bool:
        store.append(self._key("reports"), _framed(self._own, self._nodes, copies))
        store.append(self._key("arrived"), f"{self._own}{'!' if leaving else ''} ")
        self._arrived_as = int(store.add(self._key("arrivals"), 1))
        if self._arrived_as == self._nodes:
            self._set_order(store, complete=True)
        return True

    def _await_order(self, seconds: float, shutdown_requested: threading.Event) -> dict[str, Any] | None:
        """Wait until all agents that live have arrived; look now and then whether those who have not are dead.

        The agents look one after the other, each two seconds after the one that arrived before it: the first one is
        enough, unless it dies.
        """
        now = time.monotonic()
        deadline = now + seconds
        look_at = min(now + time_limits.ACKNOWLEDGMENT_TIMEOUT_SECONDS + 2 * (self._arrived_as - 1), deadline)
        pause: float = time_limits.ARRIVALS_POLL_SECONDS
        while True:
            found = self._next_result(
                look_at - time.monotonic(), shutdown_requested, time_limits.TERMINATED_SETTLE_SECONDS
            )
            if found is not None:
                return json.loads(found) if isinstance(found, bytes) else None
            is_over = time.monotonic() >= deadline or shutdown_requested.is_set()
            if self._bounded(partial(self._close, is_over), "looking which nodes live") is None:
                return None
            if is_over:
                deadline = look_at = (
                    time.monotonic()
                    + time_limits.ELECTION_STEP_TIMEOUT_SECONDS
                    + time_limits.ELECTION_STEP_TIMEOUT_SECONDS_PER_NODE * self._nodes
                )
                continue
            look_at = min(time.monotonic() + pause, deadline)
            pause = min(2 * pause, time_limits.MAX_ARRIVALS_POLL_SECONDS)

    def _next_result(
        self, seconds: float, shutdown_requested: threading.Event, shutdown_seconds: float
    ) -> bytes | BaseException | None:
        """Return the waiting thread's next result; None if none comes in time, or soon once a shutdown is requested."""
        deadline = time.monotonic() + max(seconds, 0)
        hurried = False
        while True:
            if shutdown_requested.is_set() and not hurried:
                hurried, deadline = True, min(deadline, time.monotonic() + shutdown_seconds)
            left = max(deadline - time.monotonic(), 0)
            try:
                return self._results.get(timeout=left if hurried else min(left, time_limits.SHUTDOWN_POLL_SECONDS))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    return None

    def _wait_for_both(self, waiting: Any) -> None:
        """Put the order, then the verdict into the queue; the error if the store is lost."""

        def wait() -> None:
            for key in (self._key("order"), self._key("seal")):
                waiting.wait([key], _FOREVER)
                self._results.put(bytes(waiting.get(key)))

        _, error = try_call(wait, Exception)
        if error is not None:
            self._results.put(error)
            logger.info("lost the store that the agents share: %s", error)

    def _close(self, is_over: bool) -> bool:
        """Set the order if every agent that lives has arrived, or if the wait is over."""
        store = self._store
        arrived = {group_rank for group_rank, _ in self._arrivals(store)}
        key = self._key("heard")
        heard = {int(word) for word in store.get(key).split()} if store.check([key]) else set()
        complete = bool(heard) and heard <= arrived
        if complete or is_over:
            self._set_order(store, complete=complete or len(arrived) >= self._nodes)
        return True

    # --- concluding ---------------------------------------------------------------------------------------------

    def _begin_turn(self, order: dict[str, Any]) -> CollectedReports | ElectedVerdict | None:
        """Return what to conclude from, or another agent's verdict; None if another agent has taken over."""
        store, mine = self._store, str(self._own).encode()
        # set before the order was
        before = self._sealer()
        if before.endswith(b"!") or bytes(store.compare_set(self._key("sealer"), before, mine)) != mine:
            return None
        if store.check([self._key("seal")]):
            return _unpacked(bytes(store.get(self._key("seal"))))
        return self._reports(bool(order["complete"]))

    def _reports(self, complete: bool) -> CollectedReports:
        """Return the nodes' reports; of a node that has not reported, what it handed in when its workers started."""
        store = self._store
        arrivals = self._arrivals(store)
        arrived = {group_rank for group_rank, _ in arrivals}
        lost = {group_rank for group_rank, leaves in arrivals if leaves}
        copies: dict[str, bytes] = {}
        if len(arrived) < self._nodes and store.check([_JOINED]):
            for group_rank, files in _frames(bytes(store.get(_JOINED))):
                if group_rank not in arrived:
                    copies.update(files)
                    lost |= {group_rank} if complete else set()
        for _, files in _frames(bytes(store.get(self._key("reports")))):
            copies.update(files)
        return CollectedReports(copies, complete, frozenset(lost))

    def _sealer(self) -> bytes:
        return bytes(self._store.get(self._key("sealer")))

    def _set_order(self, store: Any, *, complete: bool) -> None:
        """Name the agents that conclude: by group rank, as rank 0's node also writes what a person sees."""
        candidates = sorted(self._arrivals(store), key=lambda arrival: (arrival[1], arrival[0]))
        sealers = [group_rank for group_rank, _ in candidates[:_MAX_TURNS]]
        store.compare_set(self._key("sealer"), "", str(sealers[0]))
        set_once(store, self._key("order"), json.dumps({"sealers": sealers, "complete": complete}))

    def _arrivals(self, store: Any) -> list[tuple[int, bool]]:
        """Return the group rank of each agent that has arrived, and whether it leaves."""
        words = bytes(store.get(self._key("arrived"))).split()
        return [(int(word.rstrip(b"!")), word.endswith(b"!")) for word in words]


def have_joined(store: Any) -> int:
    """Return how many agents of a round have called `VerdictElection.join`: torch's own do not."""
    return len(dict(_frames(bytes(store.get(_JOINED))))) if store.check([_JOINED]) else 0
