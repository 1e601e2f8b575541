"""The store that the agents of a round share, and how it tells them that a node failed or that all have finished.

The first node that fails for good sets a key in the round's store, and every other agent has a thread that waits for
that key on its own connection. The wait ends within milliseconds, whatever the main thread is doing.
"""

from __future__ import annotations

import datetime as dt
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerGroup
from typing_extensions import Self

from firstfault.model import CausedBy
from firstfault_torch import time_limits
from firstfault_torch.compat.torch_agent import forget_shared_store
from firstfault_torch.guard import BackgroundCall, call_with_timeout, logger, suppress_internal_errors, try_call


class Rendezvous:
    """torch's rendezvous handler, or another one, without two faults.

    It never blocks the agent's main loop. After each look at its workers torch's agent asks the store's host how many
    nodes wait to join. If that machine is frozen, the question blocks for minutes. Here the answer is 0 until then.

    It gives the workers of each round a store of their own. torch 2.6 to 2.13 keep that of the first round, so that
    workers who are started again find the addresses of those before them, and gloo and NCCL cannot connect
    (pytorch#135712).
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self.num_nodes_waiting = BackgroundCall[int](handler.num_nodes_waiting, 0)

    def next_rendezvous(self) -> Any:
        """Return torch's answer; see `torch.distributed.elastic.rendezvous.RendezvousHandler`."""
        forget_shared_store(self._handler)
        return self._handler.next_rendezvous()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)


def begin_round(store: Any, group_rank: int | None, fallback: int, counted: int = 0) -> int:
    """Return the number of this rendezvous, the same on all nodes; `fallback` if the first node does not set one.

    Each rendezvous has its own store on top of one that all rounds share, in which the first node counts the rounds.
    A static rendezvous has one store for all rounds: there the nodes, which began together, count by themselves.
    """
    key = f"firstfault/round/{counted}" if counted else "firstfault/round"
    if group_rank == 0:
        shared = getattr(store, "underlying_store", store)
        number = int(shared.add("firstfault/rounds", 1)) - 1
        store.set(key, str(number))
        return number
    try:
        store.wait([key], dt.timedelta(seconds=time_limits.ROUND_NUMBER_TIMEOUT_SECONDS))
    except dist.DistStoreError:
        logger.warning("the first node does not number the rounds; it seems to run without firstfault")
        return fallback
    return int(store.get(key))


def store_of_agents(group: WorkerGroup, number: int, host: str) -> Any:
    """Return the store of a round on which the agents wait for each other.

    Only a connection to a server can wait beside others, so with files or etcd the first agent serves one, at `host`.
    """
    store: Any = group.store
    if hasattr(lowest(store), "port"):
        if not hasattr(store, "clone"):
            return RoundStore(store, number)
        return dist.PrefixStore(f"firstfault/{number}", store) if has_shared_store(group) else store  # type: ignore[attr-defined]
    key, limit = f"firstfault/server/{number}", dt.timedelta(seconds=time_limits.PEER_CONNECT_TIMEOUT_SECONDS)
    is_first = not group.group_rank
    if not is_first:
        store.wait([key], limit)
    port = 0 if is_first else int(store.get(key))
    server: Any = dist.TCPStore(host, port, is_master=is_first, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
    if is_first:
        store.set(key, str(server.port))
    return RoundStore(server, number)


def has_shared_store(group: WorkerGroup) -> bool:
    """Whether the rounds of a job share one store, as a static rendezvous lets them."""
    backend = getattr(group.spec.rdzv_handler, "get_backend", None)
    return callable(backend) and backend() == "static"


class RoundStore(dist.PrefixStore):  # type: ignore[name-defined]
    """The store of one round, of which another connection can be opened; its number is the same on all nodes.

    The stores of torch before 2.8 have no ``clone``, and cannot tell under which prefix they keep a round.
    """

    def __init__(self, store: Any, number: int) -> None:
        super().__init__(f"firstfault/round-{number}", lowest(store))
        self._number = number

    def clone(self) -> Self:
        """Return the same store on a connection of its own.

        Raises:
            torch.distributed.DistNetworkError: the store's host does not answer.
        """
        shared = self.underlying_store
        connected = dist.TCPStore(  # type: ignore[attr-defined]
            shared.host, shared.port, wait_for_workers=False, timeout=shared.timeout
        )
        return type(self)(connected, self._number)


def lowest(store: Any) -> Any:
    """Return the store below all prefixes, which knows its host."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def set_once(store: Any, key: str, value: str | bytes) -> bytes:
    """Set a key unless it is set, wake those who wait for it, and return its value.

    torch's store without libuv, the default before torch 2.4, wakes no waiting thread at a ``compare_set``.
    """
    found = bytes(store.compare_set(key, "", value))
    if found == (value.encode() if isinstance(value, str) else value):
        store.append(key, "")
    return found


# --- failure notices --------------------------------------------------------------------------------------------------

_OUTCOME = "firstfault/outcome"
"""Set once a round: which node failed, or that all have finished. Every agent waits for it."""
_FATAL = "firstfault/fatal"
"""Set by a node that fails for good, also when `_OUTCOME` already holds a failure after which workers restart."""
_WAIT = dt.timedelta(days=30)
"""Longer than any round: every end of a round sets the outcome, and a lost store ends the wait."""


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """What a node tells the others about its failure."""

    what: str
    """One line."""
    node: str
    group_rank: int | None = None
    rank: int | None = None
    """The worker's global rank, None if it was the agent."""
    document: str = ""
    """Name of the error document, empty if there is none yet."""
    fatal: bool = True
    """False: the node starts its workers again."""
    asks: bool = False
    """The agents decide together whether it does; until then all of them stop their workers and report."""

    @property
    def reason(self) -> str:
        """The reason for stopping another node's workers; it may name a victim."""
        who = f"rank {self.rank} on {self.node}" if self.rank is not None else f"the agent of {self.node}"
        return f"{who} failed: {self.what}"

    @property
    def cause(self) -> CausedBy:
        """The rank and node that failed, as documents name them."""
        return CausedBy(self.rank, self.node, self.document)


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """How a round ended."""

    failure: FirstFailure | None = None
    finished: bool = False
    """All nodes' workers have succeeded."""
    lost: str = ""
    """Why the store cannot be reached; empty if it can."""


class FailureBroadcast:
    """Waits for a round's outcome, and sends one.

    The round's store is cloned, so that a wait here does not block the agent's own use of it. The waiting thread calls
    `wake` when the outcome is known, and `heard` with a connection to the store and a failure that is fatal or that
    restarts the workers.
    """

    def __init__(
        self,
        store: Any,
        group_rank: int,
        wake: Callable[[], None],
        heard: Callable[[Any, FirstFailure], None] = lambda _connection, _failure: None,
    ) -> None:
        self._store = store
        self._heard = heard
        self._group_rank = group_rank
        self._wake = wake
        self.outcome: RoundOutcome | None = None
        """How the round ended; None while it is not known."""
        self._is_known = threading.Event()
        self._ended = threading.Event()
        self._sent: FirstFailure | None = None
        self._connection: Any = None
        """Opened before there is anything to send: a slow name service must not delay a failure notice."""
        self._waiting: Any = None
        """The waiting thread's own."""
        self._thread = threading.Thread(target=self._wait, name="firstfault-outcome", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> FirstFailure | None:
        """Another node's fatal failure; None if there is none."""
        failure = self._received
        return failure if failure and failure.fatal and failure.group_rank != self._group_rank else None

    @property
    def asking(self) -> FirstFailure | None:
        """Another node's failure after which the agents decide whether to restart; None if there is none."""
        failure = self._received
        if failure is None or failure.fatal or not failure.asks or failure.group_rank == self._group_rank:
            return None
        return failure

    @property
    def is_fatal(self) -> bool:
        """Whether a node, also this one, has failed for good."""
        failure = self._received
        return failure is not None and failure.fatal

    @property
    def first_failure(self) -> FirstFailure | None:
        """The failure that ended the round, another node's or this one's own; None if none is known."""
        known = self._received or self._sent
        return known if known is not None and (known.fatal or known.asks) else None

    @property
    def _received(self) -> FirstFailure | None:
        return self.outcome.failure if self.outcome is not None else None

    def send(self, failure: FirstFailure) -> None:
        """Tell the other agents; the first failure counts, but a restart never hides a fatal one."""
        if self._sent is not None and (self._sent.fatal or not failure.fatal):
            return
        self._sent = failure
        self._set_outcome(json.dumps(asdict(failure)), fatal=failure.fatal)

    def send_finished(self) -> None:
        """Tell the other agents that every node's workers have succeeded."""
        self._set_outcome(json.dumps({"finished": True}), fatal=False)

    def _set_outcome(self, text: str, *, fatal: bool) -> None:
        def put() -> None:
            store = self._connection or connected(self._store)
            if fatal:
                store.compare_set(_FATAL, "", text)
            set_once(store, _OUTCOME, text)

        # a lost store is what `_next_outcome` reports
        call_with_timeout(
            lambda: try_call(put, dist.DistError), time_limits.STORE_TIMEOUT_SECONDS, "telling the other agents"
        )

    def accept(self, failure: FirstFailure) -> None:
        """Accept another node's failure from a source other than the store, unless the round's outcome is known."""
        known = self.outcome
        if known is None or known.lost or (known.failure is not None and not known.failure.fatal):
            self.outcome = RoundOutcome(failure=failure)
            self._wake()

    def fatal_failure(self) -> FirstFailure | None:
        """Ask the store for another node's fatal failure, after the round has ended."""

        def ask() -> FirstFailure | None:
            store = self._connection or connected(self._store)
            return _failure_from(store.get(_FATAL)) if store.check([_FATAL]) else None

        failure = self.failure
        if failure is None and not self._is_lost():
            failure = call_with_timeout(ask, time_limits.STORE_TIMEOUT_SECONDS, "asking which node failed")
        return None if failure is None or failure.group_rank == self._group_rank else failure

    def connections(self, *, to_agree: bool = False) -> tuple[Any, Any] | None:
        """Return two connections to the store after a failure: one to use, one to wait with; None if it is lost.

        If the failure asks, it is `to_agree`: None also if a node failed for good.
        """
        if to_agree:
            self._is_known.wait(time_limits.STORE_TIMEOUT_SECONDS)
            is_usable = self.outcome is not None and not self.is_fatal
        else:
            self._thread.join(time_limits.STORE_TIMEOUT_SECONDS)
            is_usable = not self._thread.is_alive()
        if not is_usable or self._is_lost() or self._waiting is None or self._connection is None:
            return None
        return self._connection, self._waiting

    def end_for_good(self, failure: FirstFailure) -> None:
        """Take a failure that asked for fatal: the agents have decided against a restart."""
        self._ended.set()
        self._thread.join(time_limits.STORE_TIMEOUT_SECONDS)
        if not self._is_lost() and not self.is_fatal:
            fatal = replace(failure, fatal=True, asks=False)
            self.outcome = RoundOutcome(failure=fatal)
            call_with_timeout(
                lambda: self._heard(self._connection, fatal),
                time_limits.STORE_TIMEOUT_SECONDS,
                "telling that this node knows",
            )

    def end(self) -> None:
        """End the waiting thread by setting the round's outcome."""
        if not self._thread.is_alive():
            return
        self._ended.set()
        with suppress_internal_errors("ending the wait for the round's outcome"):
            self.send(FirstFailure("the round is over", "", self._group_rank, fatal=False))
            self._thread.join(time_limits.STORE_TIMEOUT_SECONDS)

    def _is_lost(self) -> bool:
        return self.outcome is not None and bool(self.outcome.lost)

    def _wait(self) -> None:
        with suppress_internal_errors("waiting for the round's outcome"):
            outcome = self._next_outcome()
            # `accept` may have set it meanwhile
            self.outcome = self.outcome or outcome
            self._is_known.set()
            self._wake()
            failure = self.outcome.failure
            if failure is not None and not failure.fatal:
                self._await_a_fatal_failure()
        self._wake()

    def _await_a_fatal_failure(self) -> None:
        """Look for the failure of a third node, before this one enters the next round."""
        try:
            while not self._ended.wait(time_limits.FATAL_FAILURE_POLL_SECONDS):
                if self._connection.check([_FATAL]):
                    failure = _failure_from(self._connection.get(_FATAL))
                    self.outcome = RoundOutcome(failure=failure)
                    if failure is not None:
                        self._heard(self._connection, failure)
                    return
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            self.outcome = RoundOutcome(lost=str(error).splitlines()[0])

    def _next_outcome(self) -> RoundOutcome:
        while True:
            try:
                self._connection = connected(self._store)
                self._waiting = store = connected(self._store)
                store.wait([_OUTCOME], _WAIT)
                failure = _failure_from(store.get(_OUTCOME))
                if failure is None:
                    return RoundOutcome(finished=True)
                self._heard(store, failure)
                return RoundOutcome(failure=failure)
            except (dist.DistNetworkError, dist.DistStoreError) as error:
                # a connection can also break while the host lives; one that dies closes its port a moment later
                if _listens(self._store):
                    time.sleep(time_limits.LOST_STORE_GRACE_SECONDS)
                    if _listens(self._store):
                        continue
                logger.info("lost the store that the agents share: %s", error)
                return RoundOutcome(lost=str(error).splitlines()[0])


def connected(store: Any) -> Any:
    """Return a new connection to the store; torch would retry for minutes if the store's host is gone.

    Raises:
        torch.distributed.DistNetworkError: no server listens there.
    """
    if not _listens(store):
        raise dist.DistNetworkError("no server listens at the store's address")
    return store.clone()


def _listens(store: Any) -> bool:
    """Whether the store's host accepts connections; cloning the store would retry for minutes."""
    host = lowest(store)
    try:
        with socket.create_connection((host.host, host.port), time_limits.STORE_TIMEOUT_SECONDS):
            return True
    except (OSError, AttributeError):
        return False


def _failure_from(text: bytes) -> FirstFailure | None:
    content = json.loads(text)
    known = {item.name for item in fields(FirstFailure)}
    return None if content.get("finished") else FirstFailure(**{name: content[name] for name in known & content.keys()})
