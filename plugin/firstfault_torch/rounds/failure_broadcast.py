"""Notifies the agents of a round that a node failed, or that all nodes have finished."""

from __future__ import annotations

import datetime as dt
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from firstfault.model import CausedBy
from firstfault_torch import time_limits
from firstfault_torch.guard import (
    call_with_timeout,
    logger,
    start_late,
    suppress_internal_errors,
    try_call,
)
from firstfault_torch.protocol.election import LEAVING_KEY, LOST_KEY
from firstfault_torch.rounds.round_store import connect_to_store, is_host_listening, set_once

OUTCOME_KEY = "firstfault/outcome"
"""Set once per round: which node failed, or that all have finished. Every agent waits for it."""
FATAL_KEY = "firstfault/fatal"
"""Set by a node that can't restart, even if `OUTCOME_KEY` already has a failure after
which workers restart.
"""
GRACE_KEY = "firstfault/stop-seconds"
"""Set by a node whose healthy workers are stopped, after a signal or for a new rendezvous. Their
peers lose their connections, and fail; the siblings of those failures are healthy, and have the
same time.
"""
MAX_ROUND_DURATION = dt.timedelta(days=30)
"""Longer than any round: every round ends by setting the outcome, and a lost store ends the wait.
"""


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


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The end of a round, as this agent learned it."""

    failure: FailureNotice | None = None
    finished: bool = False
    """All nodes' workers have succeeded."""
    lost: str = ""
    """Why the store can't be reached; empty if it is reachable."""


class FailureBroadcast:
    """Sends a round's outcome to its peers, and waits for theirs.

        waiting     a thread blocks in the store until OUTCOME_KEY is set
        finished    all nodes succeeded: the thread ends
        restart     a node failed but can restart: `on_failure` and `wake` are called; the thread
                    now polls FATAL_KEY, because a third node may fail permanently while the first
                    two vote on a restart
        fatal       a node can't restart: `on_failure` and `wake` are called, and the thread ends
        lost        the store is gone: `outcome.lost` has the reason

    A restart must not hide a fatal failure: OUTCOME_KEY is set only once, so a fatal failure has a
    separate key. The thread uses its own connection to the store, so that its wait doesn't block
    the agent.
    """

    def __init__(
        self,
        store: Any,
        group_rank: int,
        wake: Callable[[], None],
        on_failure: Callable[[Any, FailureNotice], None] = lambda _connection, _failure: None,
    ) -> None:
        self._store = store
        self._acknowledge = on_failure
        self._group_rank = group_rank
        self._wake = wake
        self.outcome: RoundOutcome | None = None
        """How the round ended, or None if not yet known."""
        self._is_known = threading.Event()
        self._ended = threading.Event()
        self._sent: FailureNotice | None = None
        self._known_at = time.monotonic()
        self._connection: Any = None
        """Opened in advance: a slow name service must not delay a failure notice."""
        self._waiting: Any = None
        """The waiting thread's connection."""
        self.thread = threading.Thread(
            target=self._wait_for_outcome, name="firstfault-outcome", daemon=True
        )
        start_late(self.thread)

    @property
    def failure(self) -> FailureNotice | None:
        """Another node's fatal failure, if any."""
        failure = self._received_failure
        return (
            failure
            if failure and failure.fatal and failure.group_rank != self._group_rank
            else None
        )

    @property
    def restart_request(self) -> FailureNotice | None:
        """Another node's failure that the agents must vote on, if any."""
        failure = self._received_failure
        if (
            failure is None
            or failure.fatal
            or not failure.asks
            or failure.group_rank == self._group_rank
        ):
            return None
        return failure

    @property
    def is_fatal(self) -> bool:
        """Whether a node, perhaps this one, failed and can't restart."""
        failure = self._received_failure
        return failure is not None and failure.fatal

    @property
    def first_failure(self) -> FailureNotice | None:
        """The failure that ended the round, on this or another node, or None if unknown."""
        known = self._received_failure or self._sent
        return known if known is not None and (known.fatal or known.asks) else None

    @property
    def _received_failure(self) -> FailureNotice | None:
        return self.outcome.failure if self.outcome is not None else None

    def send(self, failure: FailureNotice) -> None:
        """Broadcast a failure. Only the first counts,
        except that a fatal one replaces a restart.
        """
        if self._sent is not None and (self._sent.fatal or not failure.fatal):
            return
        self._sent = failure
        self._store_outcome(json.dumps(asdict(failure)), fatal=failure.fatal)

    def _store_outcome(self, text: str, *, fatal: bool) -> None:
        def put(connection: Any) -> None:
            store = connection or connect_to_store(self._store)
            if fatal:
                store.compare_set(FATAL_KEY, "", text)
            set_once(store, OUTCOME_KEY, text)

        # errors are ignored: `_receive_outcome` reports a lost store
        inform = partial(try_call, partial(put, self._connection), dist.DistError)
        doing = "informing the peer agents"
        sent = call_with_timeout(inform, time_limits.STORE_TIMEOUT_SECONDS, doing)
        if self._connection is not None and (sent is None or sent[1] is not None):
            # A firewall may have forgotten a connection that was idle for the round, or it broke.
            # Peers that don't hear of the failure wait without end. Sending it twice does no harm;
            # this node's workers must not wait for it.
            again = partial(try_call, partial(put, None), dist.DistError)
            call_with_timeout(again, 0, doing)

    def mark_lost(self, group_rank: int) -> None:
        """Record that the connection to an agent broke; don't wait."""
        self._append_rank(LOST_KEY, group_rank, "informing the peer agents of a lost one")

    def mark_leaving(self) -> None:
        """Record that this process has to end; don't wait."""
        self._append_rank(LEAVING_KEY, self._group_rank, "informing the peer agents of the end")

    def _append_rank(self, key: str, group_rank: int, doing: str) -> None:
        def put() -> None:
            store = self._connection or connect_to_store(self._store)
            store.append(key, f"{group_rank} ")

        call_with_timeout(partial(try_call, put, dist.DistError), 0, doing)

    def announce_grace(self, seconds: float) -> None:
        """Let the peers' healthy workers have `seconds` to end,
        whatever notice they get or have got; don't wait.
        """

        def put() -> None:
            store = self._connection or connect_to_store(self._store)
            store.set(GRACE_KEY, str(seconds))

        call_with_timeout(
            partial(try_call, put, dist.DistError), 0, "informing the peer agents of a signal"
        )

    def has_grace(self) -> bool:
        """Whether a node has announced time for healthy workers, as far as the store answers."""

        def ask() -> bool:
            store = self._connection or connect_to_store(self._store)
            return bool(store.check([GRACE_KEY]))

        inform = partial(try_call, ask, dist.DistError)
        found = call_with_timeout(
            inform, time_limits.STORE_TIMEOUT_SECONDS, "asking whether a node got a signal"
        )
        return found is not None and bool(found[0])

    @property
    def grace_left(self) -> float:
        """Seconds for which workers of other nodes may still be saving their state after a
        signal to one of them.
        """
        failure = self._received_failure
        return (
            max(self._known_at + failure.stop_seconds - time.monotonic(), 0.0)
            if failure is not None
            else 0.0
        )

    def poll(self) -> None:
        """Read the round's outcome here, too: the waiting thread's connection may be silent,
        and never learn of it.
        """
        store = self._connection
        if self.outcome is None and store is not None and store.check([OUTCOME_KEY]):
            failure = parse_notice(store.get(OUTCOME_KEY))
            if self.outcome is None:  # the waiting thread may have been faster
                self._learn(RoundOutcome(failure=failure, finished=failure is None))
            if failure is not None:
                self._acknowledge(store, failure)
            self._wake()

    def accept(self, failure: FailureNotice) -> None:
        """Accept another node's failure from the roster or a vote,
        unless the outcome is already known.
        """
        known = self.outcome
        if known is None or known.lost or (known.failure is not None and not known.failure.fatal):
            self._learn(RoundOutcome(failure=failure))
            self._wake()

    def _learn(self, outcome: RoundOutcome) -> None:
        """Accept an outcome as the round's, and start the time limit that it sets for workers."""
        # The time first: whoever sees the outcome computes with it.
        self._known_at = time.monotonic()
        self.outcome = outcome
        self._is_known.set()

    def find_fatal_failure(self) -> FailureNotice | None:
        """Read another node's fatal failure from the store, after the round has ended."""

        def ask() -> FailureNotice | None:
            store = self._connection or connect_to_store(self._store)
            return parse_notice(store.get(FATAL_KEY)) if store.check([FATAL_KEY]) else None

        failure = self.failure
        if failure is None and not self._is_lost():
            failure = call_with_timeout(
                ask, time_limits.STORE_TIMEOUT_SECONDS, "asking which node failed"
            )
        return None if failure is None or failure.group_rank == self._group_rank else failure

    def connections(self, *, to_agree: bool = False) -> tuple[Any, Any] | None:
        """Return two connections to the store after a failure, one to use and one to wait with, or
        None if the store is lost.

        `to_agree`: for a vote on a restart; then None also after a fatal failure.
        """
        if to_agree:
            self._is_known.wait(time_limits.STORE_TIMEOUT_SECONDS)
            is_usable = self.outcome is not None and not self.is_fatal
        else:
            self.thread.join(time_limits.STORE_TIMEOUT_SECONDS)
            is_usable = not self.thread.is_alive()
        if not is_usable or self._is_lost() or self._waiting is None or self._connection is None:
            return None
        return self._connection, self._waiting

    def mark_fatal(self, failure: FailureNotice) -> None:
        """Treat a failure as fatal because the agents have voted against a restart."""
        self._ended.set()
        self.thread.join(time_limits.STORE_TIMEOUT_SECONDS)
        if not self._is_lost() and not self.is_fatal:
            fatal = replace(failure, fatal=True, asks=False)
            self.outcome = RoundOutcome(failure=fatal)
            acknowledge = partial(self._acknowledge, self._connection, fatal)
            call_with_timeout(
                acknowledge, time_limits.STORE_TIMEOUT_SECONDS, "acknowledging a notice"
            )

    def end(self) -> None:
        """End the waiting thread by setting the round's outcome."""
        if not self.thread.is_alive():
            return
        self._ended.set()
        with suppress_internal_errors("ending the wait for the round's outcome"):
            self.send(FailureNotice("the round is over", "", self._group_rank, fatal=False))
            self.thread.join(time_limits.STORE_TIMEOUT_SECONDS)

    def end_waiting(self) -> None:
        """Let the waiting thread end when its connection breaks, instead of connecting again."""
        self._ended.set()

    def _is_lost(self) -> bool:
        return self.outcome is not None and bool(self.outcome.lost)

    def _wait_for_outcome(self) -> None:
        with suppress_internal_errors("waiting for the round's outcome"):
            outcome = self._receive_outcome()
            # `accept` may have set the outcome while this thread was waiting
            if self.outcome is None:
                self._learn(outcome)
            self._wake()
            failure = (self.outcome or outcome).failure
            if failure is not None and not failure.fatal:
                self._wait_for_fatal_failure()
        self._wake()

    def _wait_for_fatal_failure(self) -> None:
        """Poll for the fatal failure of a third node until this node enters the next round."""
        try:
            while not self._ended.wait(time_limits.FATAL_FAILURE_POLL_SECONDS):
                if self._connection.check([FATAL_KEY]):
                    failure = parse_notice(self._connection.get(FATAL_KEY))
                    self._learn(RoundOutcome(failure=failure))
                    if failure is not None:
                        self._acknowledge(self._connection, failure)
                    return
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            self.outcome = RoundOutcome(lost=str(error).splitlines()[0])

    def _receive_outcome(self) -> RoundOutcome:
        while True:
            try:
                self._connection = connect_to_store(self._store)
                self._waiting = store = connect_to_store(self._store)
                store.wait([OUTCOME_KEY], MAX_ROUND_DURATION)
                failure = parse_notice(store.get(OUTCOME_KEY))
                if failure is None:
                    return RoundOutcome(finished=True)
                self._acknowledge(store, failure)
                return RoundOutcome(failure=failure)
            except (dist.DistNetworkError, dist.DistStoreError) as error:
                # A connection may break although the host is alive, so reconnect. But a dying host
                # closes its port only a moment after its connections: check the port twice before
                # concluding that the host is alive.
                if not self._ended.is_set() and is_host_listening(self._store):
                    time.sleep(time_limits.LOST_STORE_GRACE_SECONDS)
                    if is_host_listening(self._store):
                        continue
                logger.info("lost the store that the agents share: %s", error)
                return RoundOutcome(lost=str(error).splitlines()[0])


def parse_notice(text: bytes) -> FailureNotice | None:
    """Return the failure in a round's outcome, None if all nodes have finished."""
    content = json.loads(text)
    if content.get("finished"):
        return None
    known = {item.name for item in fields(FailureNotice)}
    return FailureNotice(**{name: content[name] for name in known & content.keys()})
