"""Lets the agents of a failed round settle on one verdict: one of them concludes for all, the others take what it says.

Each agent hands its report to the round's store and counts its arrival there, so nobody polls the storage. When all
agents that live have arrived, one of them names an order in which agents conclude: the first does it; if it does not
deliver in time, the next one does. An agent sends about ten requests to the store, however many agents there are.
"""

from __future__ import annotations

import datetime as dt
import json
import queue
import struct
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from firstfault.errors import BadDocumentError
from firstfault.wire.bundle import pack, unpack
from firstfault_torch.guard import bounded, caught, logger
from firstfault_torch.rounds.round_store import set_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["Reports", "SettledDocument", "Settlement"]

_JOINED = "firstfault/joined"
"""What each agent said when its workers started: frames, one behind the other."""


class _Keys:
    """The names in the store of one settlement.

    Args:
        topic: what the agents settle on. A round may settle on several things, one after the other.
    """

    def __init__(self, topic: str) -> None:
        prefix = f"firstfault/{topic}/" if topic else "firstfault/"
        self.heard = f"{prefix}heard"
        """Group ranks of the agents that know of the failure, each followed by a space."""
        self.reports = f"{prefix}reports"
        """What each agent says after the failure: frames, one behind the other."""
        self.arrived = f"{prefix}arrived"
        """Group ranks of the agents that have handed in their report, each followed by a space; ``!`` marks one that
        leaves."""
        self.arrivals = f"{prefix}arrivals"
        """Their number."""
        self.order = f"{prefix}order"
        """Set once, when all expected agents have arrived: who concludes, in turn."""
        self.sealer = f"{prefix}sealer"
        """Whose turn it is to conclude; ``!`` behind it: that one publishes, and is not replaced meanwhile."""
        self.seal = f"{prefix}seal"
        """The verdict."""


_DOCUMENT = "error.pb"
_DURABLE = "durable"
_FRAME = struct.Struct(">II")
"""Group rank and length, before each bundle."""
_MAX_REPORT = 256 * 1024
"""Bytes of one node's bundle. What does not fit is read from the storage."""
_MAX_TURNS = 4
_TURN_S = 2.0
"""How long an agent may take to conclude before the next one does it, seconds."""
_TURN_FOR_NODE_S = 0.002
"""More of it for each node: reading takes longer."""
_NO_ANSWER_S = 3.0
"""An agent that has not acknowledged the failure so long after another's report counts as dead."""
_LOOK_S = 0.5
"""Seconds between two looks at who lives; doubled each time, up to `_LONGEST_LOOK_S`."""
_LONGEST_LOOK_S = 2.0
_STEP_S = 5.0
"""Longest wait for the store to take or give values, seconds."""
_STEP_FOR_NODE_S = 0.01
"""More of it for each node: all of them hand in their reports at the same moment."""
_PUBLISHING_S = 11.0
"""How long publishing may take: the verdict, what a person sees, and copies."""
_HURRIED_S = 1.5
"""Longest wait for the other nodes' reports after this process received SIGTERM."""
_LEAVING_S = 5.0
"""The same for the verdict."""
_PUBLISHED_S = 2.0
"""The same for a verdict that another node is publishing."""
_FOREVER = dt.timedelta(days=30)


class SettledDocument(NamedTuple):
    """The sealed verdict, as its agent hands it to the others."""

    document: bytes
    """The ``error.pb``."""
    durable: bool
    """Whether it is in the storage."""


@dataclass(frozen=True, slots=True)
class Reports:
    """What the agents handed in."""

    copies: dict[str, bytes] = field(default_factory=dict)
    """Documents and roster entries of all nodes, by path below the output prefix."""
    complete: bool = True
    """Every agent that lives has reported."""
    lost: frozenset[int] = frozenset()
    """Group ranks of the agents that leave, and of those that had joined and are dead."""


class Settlement:
    """One agent's part in the settlement of a round.

    Args:
        group_rank: this node's.
        nodes: of the round.
        topic: what the agents settle on; empty: on the verdict on the attempt.
    """

    def __init__(self, group_rank: int, nodes: int, topic: str = "") -> None:
        self._own = group_rank
        self._nodes = nodes
        self._keys = _Keys(topic)
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._arrived_as = 0
        """How many had arrived when this one had; 0: it has not."""

    def join(self, store: Any, copies: Mapping[str, bytes]) -> None:
        """Hand in what this node says when its workers start; the others need it if the node dies."""
        store.append(_JOINED, _framed(self._own, copies))

    def heard(self, store: Any) -> None:
        """Tell that this node knows of a fatal failure, which shows that its agent lives."""
        store.append(self._keys.heard, f"{self._own} ")

    def settle(  # noqa: PLR0913 - keywords
        self,
        connections: tuple[Any, Any],
        copies: Mapping[str, bytes],
        conclude: Callable[[Reports], bytes | None],
        publish: Callable[[], bool],
        *,
        seconds: float,
        leaving: bool = False,
        give_up: threading.Event | None = None,
    ) -> SettledDocument | None:
        """Return the verdict on which the agents settled; None if they could not: the store or too many are lost.

        Args:
            connections: two connections to the store; the second one only waits.
            copies: this node's documents and roster entries.
            conclude: called if it is this node's turn; returns the ``error.pb``, None if it cannot be made.
            publish: called after `conclude`; makes the ``error.pb`` durable, and returns whether it is.
            seconds: longest wait for the other nodes' reports.
            leaving: this process was terminated; others conclude, if there are others.
            give_up: once set, shortens the waits.
        """
        store, waiting = connections
        arrived = bounded(
            partial(self._arrive, store, copies, leaving=leaving), self._step_s, "handing in this node's report"
        )
        if not arrived:
            return None
        results = self._results
        threading.Thread(
            target=_wait_for_both, args=(waiting, self._keys, results), name="firstfault-settlement", daemon=True
        ).start()
        order = self._await_order(store, results, seconds, give_up)
        if order is None:
            return None
        for group_rank in order["sealers"]:
            if group_rank == self._own:
                document = self._concluded(store, order, conclude)
                if isinstance(document, SettledDocument):
                    return document
                if document is not None:
                    return self._published(store, document, publish)
            found = _next_from(results, self._turn_seconds, give_up, _LEAVING_S)
            if found is None and bounded(partial(self._is_publishing, store), self._step_s, "asking whose turn it is"):
                found = _next_from(results, _PUBLISHING_S, give_up, _PUBLISHED_S)
            if isinstance(found, bytes):
                return _unpacked(found)
            if isinstance(found, Exception) or (give_up is not None and give_up.is_set()):
                return None
        return None

    def leave(self, store: Any, copies: Mapping[str, bytes]) -> None:
        """Hand in this node's report and say that it leaves, so that the others do not wait for it."""
        if not self._arrived_as:
            bounded(partial(self._arrive, store, copies, leaving=True), self._step_s, "handing in this node's report")

    def interrupt(self, reason: str) -> None:
        """End `settle` at once, from any thread: there is nothing to settle on any more."""
        self._results.put(InterruptedError(reason))

    def abandon(self, store: Any) -> SettledDocument | None:
        """Publish an empty document, unless there is one, so that no agent waits any longer; return what counts.

        None: the store is lost.
        """

        def end() -> SettledDocument:
            set_once(store, self._keys.order, json.dumps({"sealers": [], "complete": False}))
            return _unpacked(set_once(store, self._keys.seal, _packed(SettledDocument(b"", durable=False))))

        return bounded(end, self._step_s, "telling the other agents that there is no conclusion")

    @property
    def _turn_seconds(self) -> float:
        return _TURN_S + _TURN_FOR_NODE_S * self._nodes

    @property
    def _step_s(self) -> float:
        return _STEP_S + _STEP_FOR_NODE_S * self._nodes

    # --- arriving -----------------------------------------------------------------------------------------------

    def _arrive(self, store: Any, copies: Mapping[str, bytes], *, leaving: bool) -> bool:
        store.append(self._keys.reports, _framed(self._own, copies))
        store.append(self._keys.arrived, f"{self._own}{'!' if leaving else ''} ")
        self._arrived_as = int(store.add(self._keys.arrivals, 1))
        if self._arrived_as == self._nodes:
            self._set_order(store, complete=True)
        return True

    def _await_order(
        self, store: Any, results: queue.SimpleQueue[Any], seconds: float, give_up: threading.Event | None
    ) -> dict[str, Any] | None:
        """Wait until nobody else is waited for; look now and then whether those who have not arrived are dead.

        The agents look one after the other, each two seconds after the one that arrived before it: the first one is
        enough, unless it dies.
        """
        now = time.monotonic()
        deadline = now + seconds
        look_at = min(now + _NO_ANSWER_S + 2 * (self._arrived_as - 1), deadline)
        pause = _LOOK_S
        while True:
            found = _next_from(results, look_at - time.monotonic(), give_up, _HURRIED_S)
            if isinstance(found, bytes):
                order: dict[str, Any] = json.loads(found)
                return order
            if isinstance(found, Exception):
                return None
            is_over = time.monotonic() >= deadline or (give_up is not None and give_up.is_set())
            if bounded(partial(self._close, store, is_over), self._step_s, "looking which nodes live") is None:
                return None
            if is_over:
                deadline = look_at = time.monotonic() + self._step_s
                continue
            look_at = min(time.monotonic() + pause, deadline)
            pause = min(2 * pause, _LONGEST_LOOK_S)

    def _close(self, store: Any, is_over: bool) -> bool:
        """Set the order if every agent that lives has arrived, or if the wait is over."""
        arrived = {group_rank for group_rank, _ in self._arrivals(store)}
        key = self._keys.heard
        heard = {int(word) for word in store.get(key).split()} if store.check([key]) else set()
        complete = bool(heard) and heard <= arrived
        if complete or is_over:
            self._set_order(store, complete=complete or len(arrived) >= self._nodes)
        return True

    # --- concluding ---------------------------------------------------------------------------------------------

    def _concluded(
        self, store: Any, order: dict[str, Any], conclude: Callable[[Reports], bytes | None]
    ) -> bytes | SettledDocument | None:
        """Return the ``error.pb`` to publish, another agent's verdict, or None if another agent has taken over."""
        mine = str(self._own).encode()

        def begin() -> Reports | SettledDocument | None:
            # set before the order was
            before = bytes(store.get(self._keys.sealer))
            if before.endswith(b"!") or bytes(store.compare_set(self._keys.sealer, before, mine)) != mine:
                return None
            if store.check([self._keys.seal]):
                return _unpacked(bytes(store.get(self._keys.seal)))
            return self._reports(store, bool(order["complete"]))

        def claim() -> bool:
            return bytes(store.compare_set(self._keys.sealer, mine, mine + b"!")) == mine + b"!"

        found = bounded(begin, self._step_s, "collecting the nodes' reports")
        if not isinstance(found, Reports):
            return found
        document = conclude(found)
        if document is None or bounded(claim, self._step_s, "announcing that this node publishes") is False:
            return None
        return document

    def _reports(self, store: Any, complete: bool) -> Reports:
        """Return what the nodes handed in; of a node that has not reported, what it said when its workers started."""
        arrivals = self._arrivals(store)
        arrived = {group_rank for group_rank, _ in arrivals}
        lost = {group_rank for group_rank, leaves in arrivals if leaves}
        copies: dict[str, bytes] = {}
        if len(arrived) < self._nodes and store.check([_JOINED]):
            for group_rank, files in _frames(bytes(store.get(_JOINED))):
                if group_rank not in arrived:
                    copies.update(files)
                    lost |= {group_rank} if complete else set()
        for _, files in _frames(bytes(store.get(self._keys.reports))):
            copies.update(files)
        return Reports(copies, complete, frozenset(lost))

    def _published(self, store: Any, document: bytes, publish: Callable[[], bool]) -> SettledDocument:
        """Make the verdict durable, then tell the others; return theirs if another agent has been faster."""
        settled = SettledDocument(document, publish())
        value = _packed(settled)
        told = bounded(
            lambda: _unpacked(set_once(store, self._keys.seal, value)),
            self._step_s,
            "handing the verdict to the other nodes",
        )
        return told if told is not None else settled

    def _is_publishing(self, store: Any) -> bool:
        return bytes(store.get(self._keys.sealer)).endswith(b"!")

    def _set_order(self, store: Any, *, complete: bool) -> None:
        """Name the agents that conclude: by group rank, as rank 0's node also writes what a person sees."""
        candidates = sorted(self._arrivals(store), key=lambda arrival: (arrival[1], arrival[0]))
        sealers = [group_rank for group_rank, _ in candidates[:_MAX_TURNS]]
        store.compare_set(self._keys.sealer, "", str(sealers[0]))
        set_once(store, self._keys.order, json.dumps({"sealers": sealers, "complete": complete}))

    def _arrivals(self, store: Any) -> list[tuple[int, bool]]:
        """Return the group rank of each agent that has arrived, and whether it leaves."""
        words = bytes(store.get(self._keys.arrived)).split()
        return [(int(word.rstrip(b"!")), word.endswith(b"!")) for word in words]


def _wait_for_both(waiting: Any, keys: _Keys, results: queue.SimpleQueue[Any]) -> None:
    """Put the order, then the verdict into the queue; the error if the store is lost."""

    def wait() -> None:
        for key in (keys.order, keys.seal):
            waiting.wait([key], _FOREVER)
            results.put(bytes(waiting.get(key)))

    _, error = caught(wait, Exception)
    if error is not None:
        results.put(error)
        logger.info("lost the store that the agents share: %s", error)


def _next_from(
    results: queue.SimpleQueue[Any], seconds: float, give_up: threading.Event | None, hurried_seconds: float
) -> Any:
    """Return the queue's next value; None if none comes in time, or within `hurried_seconds` once `give_up` is set."""
    deadline = time.monotonic() + max(seconds, 0)
    hurried = False
    while True:
        left = deadline - time.monotonic()
        if give_up is not None and give_up.is_set() and not hurried:
            hurried, deadline = True, min(deadline, time.monotonic() + hurried_seconds)
            continue
        try:
            return results.get(timeout=min(max(left, 0), 0.1 if give_up is not None and not hurried else max(left, 0)))
        except queue.Empty:
            if time.monotonic() >= deadline:
                return None


def _framed(group_rank: int, copies: Mapping[str, bytes]) -> bytes:
    """Return one node's files, without the largest ones if they are too large together."""
    chosen = dict(copies)
    bundle = pack(chosen)
    while len(bundle) > _MAX_REPORT and chosen:
        del chosen[max(chosen, key=lambda path: len(chosen[path]))]
        bundle = pack(chosen)
    return _FRAME.pack(group_rank, len(bundle)) + bundle


def _frames(value: bytes) -> Iterator[tuple[int, dict[str, bytes]]]:
    """Yield each node's files."""
    start = 0
    while start + _FRAME.size <= len(value):
        group_rank, length = _FRAME.unpack_from(value, start)
        start += _FRAME.size
        try:
            yield group_rank, unpack(value[start : start + length])
        except BadDocumentError as error:
            logger.warning("the report of node %d cannot be read: %s", group_rank, error)
        start += length


def _packed(settled: SettledDocument) -> bytes:
    return pack({_DOCUMENT: settled.document, _DURABLE: b"1" if settled.durable else b""})


def _unpacked(value: bytes) -> SettledDocument:
    files = unpack(value)
    return SettledDocument(files[_DOCUMENT], bool(files[_DURABLE]))
