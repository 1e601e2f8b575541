"""Notifies the agents of a round that a node failed, or that all nodes have finished."""

from __future__ import annotations

import datetime as dt
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch.distributed as dist

from firstfault.model import CausedBy
from firstfault_torch import time_limits
from firstfault_torch.guard import call_with_timeout, logger, suppress_internal_errors, try_call
from firstfault_torch.rounds.round_store import connected, is_host_listening, set_once

_OUTCOME = "firstfault/outcome"
"""Set once a round: which node failed, or that all have finished. Every agent waits for it."""
_FATAL = "firstfault/fatal"
"""Set by a node that fails for good, also when `_OUTCOME` already holds a failure after which workers restart."""
_WAIT = dt.timedelta(days=30)
"""Longer than any round: every end of a round sets the outcome, and a lost store ends the wait."""


@dataclass(frozen=True, slots=True)
class FailureNotice:
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

    failure: FailureNotice | None = None
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
        heard: Callable[[Any, FailureNotice], None] = lambda _connection, _failure: None,
    ) -> None:
        self._store = store
        self._acknowledge = heard
        self._group_rank = group_rank
        self._wake = wake
        self.outcome: RoundOutcome | None = None
        """How the round ended; None while it is not known."""
        self._is_known = threading.Event()
        self._ended = threading.Event()
        self._sent: FailureNotice | None = None
        self._connection: Any = None
        """Opened before there is anything to send: a slow name service must not delay a failure notice."""
        self._waiting: Any = None
        """The waiting thread's own."""
        self._thread = threading.Thread(target=self._wait, name="firstfault-outcome", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> FailureNotice | None:
        """Another node's fatal failure; None if there is none."""
        failure = self._received
        return failure if failure and failure.fatal and failure.group_rank != self._group_rank else None

    @property
    def restart_request(self) -> FailureNotice | None:
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
    def first_failure(self) -> FailureNotice | None:
        """The failure that ended the round, another node's or this one's own; None if none is known."""
        known = self._received or self._sent
        return known if known is not None and (known.fatal or known.asks) else None

    @property
    def _received(self) -> FailureNotice | None:
        return self.outcome.failure if self.outcome is not None else None

    def send(self, failure: FailureNotice) -> None:
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

    def accept(self, failure: FailureNotice) -> None:
        """Accept another node's failure from a source other than the store, unless the round's outcome is known."""
        known = self.outcome
        if known is None or known.lost or (known.failure is not None and not known.failure.fatal):
            self.outcome = RoundOutcome(failure=failure)
            self._wake()

    def fatal_failure(self) -> FailureNotice | None:
        """Ask the store for another node's fatal failure, after the round has ended."""

        def ask() -> FailureNotice | None:
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

    def mark_fatal(self, failure: FailureNotice) -> None:
        """Take a failure that asked for fatal: the agents have decided against a restart."""
        self._ended.set()
        self._thread.join(time_limits.STORE_TIMEOUT_SECONDS)
        if not self._is_lost() and not self.is_fatal:
            fatal = replace(failure, fatal=True, asks=False)
            self.outcome = RoundOutcome(failure=fatal)
            call_with_timeout(
                lambda: self._acknowledge(self._connection, fatal),
                time_limits.STORE_TIMEOUT_SECONDS,
                "telling that this node knows",
            )

    def end(self) -> None:
        """End the waiting thread by setting the round's outcome."""
        if not self._thread.is_alive():
            return
        self._ended.set()
        with suppress_internal_errors("ending the wait for the round's outcome"):
            self.send(FailureNotice("the round is over", "", self._group_rank, fatal=False))
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
                        self._acknowledge(self._connection, failure)
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
                self._acknowledge(store, failure)
                return RoundOutcome(failure=failure)
            except (dist.DistNetworkError, dist.DistStoreError) as error:
                # a connection can also break while the host lives; one that dies closes its port a moment later
                if is_host_listening(self._store):
                    time.sleep(time_limits.LOST_STORE_GRACE_SECONDS)
                    if is_host_listening(self._store):
                        continue
                logger.info("lost the store that the agents share: %s", error)
                return RoundOutcome(lost=str(error).splitlines()[0])


def _failure_from(text: bytes) -> FailureNotice | None:
    content = json.loads(text)
    known = {item.name for item in fields(FailureNotice)}
    return (
        None if content.get("finished") else FailureNotice(**{name: content[name] for name in known & content.keys()})
    )
