"""What all agents of a round learn from the store they share: that a node failed, or that all have finished.

torch's agents do not talk about failure. Here the first node that fails for good writes so into the round's store, and
every other agent has a thread that waits for that one key on a connection of its own: it costs nothing while the
training runs, and answers within milliseconds whatever the main thread is doing.
"""

from __future__ import annotations

import datetime as dt
import json
import socket
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from firstfault.model import CausedBy
from firstfault_torch.guard import bounded, guarded, logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FailureBroadcast", "FirstFailure", "RoundOutcome"]

_OUTCOME = "firstfault/outcome"
"""Set once a round: who failed, or that all have finished. Every agent waits for it."""
_FATAL = "firstfault/fatal"
"""Set beside it by a node that failed for good after another one had only restarted."""
_HEARD = "firstfault/heard"
"""Prefix; each agent sets one when it has heard of a failure: it lives."""
_WAIT = dt.timedelta(days=30)
"""A round's outcome always comes: each way in which a round ends sets it, and a lost store ends the wait."""
_LOOK_S = 0.5
"""How often a node whose peer starts its workers again looks for a fatal failure, seconds."""
_STORE_S = 2.0
"""Longest wait for the store to take or give a value."""


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

    @property
    def reason(self) -> str:
        """Why another node's workers are stopped."""
        who = f"rank {self.rank} on {self.node}" if self.rank is not None else f"the agent of {self.node}"
        return f"{who} failed: {self.what}"

    @property
    def cause(self) -> CausedBy:
        """Whose failure it is, as documents have it."""
        return CausedBy(self.rank, self.node, self.document)


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """How a round ended."""

    failure: FirstFailure | None = None
    finished: bool = False
    """All nodes' workers have succeeded."""
    lost: str = ""
    """Why the store cannot be asked any more; empty if it can."""


class FailureBroadcast:
    """Waits for a round's outcome, tells one, and says who has heard it.

    Args:
        store: the round's own; it is cloned, so that a wait here does not block the agent's own use of it.
        group_rank: this node's.
        wake: called from the waiting thread when the outcome is known.
    """

    def __init__(self, store: Any, group_rank: int, wake: Callable[[], None]) -> None:
        self._store = store
        self._group_rank = group_rank
        self._wake = wake
        self._outcome: RoundOutcome | None = None
        self._ended = threading.Event()
        self._told: FirstFailure | None = None
        self._speaker: Any = None
        """A connection that is open when there is something to tell: a slow name service may not delay that."""
        self._thread = threading.Thread(target=self._wait, name="firstfault-outcome", daemon=True)
        self._thread.start()

    @property
    def outcome(self) -> RoundOutcome | None:
        """How the round ended, None as long as nobody has said."""
        return self._outcome

    @property
    def failure(self) -> FirstFailure | None:
        """Another node's fatal failure, None if there is none."""
        outcome = self._outcome
        failure = outcome.failure if outcome is not None else None
        if failure is None or not failure.fatal or failure.group_rank == self._group_rank:
            return None
        return failure

    @property
    def first_failure(self) -> FirstFailure | None:
        """The failure that ended the round, another node's or this one's own; None if nobody has told of one."""
        heard = self._outcome.failure if self._outcome is not None else None
        known = heard or self._told
        return known if known is not None and known.fatal else None

    def tell(self, failure: FirstFailure) -> None:
        """Tell the other agents; the first to do so counts, but a fatal failure is never hidden by a restart."""
        if self._told is not None and (self._told.fatal or not failure.fatal):
            return
        self._told = failure
        text = json.dumps(asdict(failure))

        def put() -> None:
            store = self._speaker or _connected(self._store)
            if failure.fatal:
                store.compare_set(_FATAL, "", text)
            store.compare_set(_OUTCOME, "", text)

        bounded(put, _STORE_S, "telling the other agents")

    def tell_finished(self) -> None:
        """Tell the other agents that every node's workers have succeeded."""
        text = json.dumps({"finished": True})
        bounded(
            lambda: (self._speaker or _connected(self._store)).compare_set(_OUTCOME, "", text),
            _STORE_S,
            "telling the other agents",
        )

    def hear(self, failure: FirstFailure) -> None:
        """Take another node's failure from somebody else than the store; nothing if the round's outcome is known."""
        known = self._outcome
        if known is None or known.lost or (known.failure is not None and not known.failure.fatal):
            self._outcome = RoundOutcome(failure=failure)
            self._wake()

    def fatal_failure(self) -> FirstFailure | None:
        """Ask for another node's fatal failure; for an agent that knows the round to be over already."""

        def ask() -> FirstFailure | None:
            store = self._speaker or _connected(self._store)
            return _failure_from(store.get(_FATAL)) if store.check([_FATAL]) else None

        failure = self.failure
        if failure is None and not self._is_lost():
            failure = bounded(ask, _STORE_S, "asking who failed")
        return None if failure is None or failure.group_rank == self._group_rank else failure

    def heard_by(self, nodes: int, give_up: threading.Event | None = None) -> set[int] | None:
        """Return the group ranks of the agents that have heard of the failure; None if the store cannot be asked.

        Args:
            nodes: of the round.
            give_up: once set, there is no time left to ask.
        """

        def ask() -> set[int]:
            store = self._speaker or _connected(self._store)
            return {rank for rank in range(nodes) if store.check([f"{_HEARD}/{rank}"])}

        return None if self._is_lost() else bounded(ask, _STORE_S, "asking who has heard", give_up)

    def end(self) -> None:
        """Stop listening: the waiting thread ends when the round's outcome is told, or with the process."""
        if not self._thread.is_alive():
            return
        self._ended.set()
        with guarded("ending the wait for the round's outcome"):
            self.tell(FirstFailure("the round is over", "", self._group_rank, fatal=False))
            self._thread.join(_STORE_S)

    def _is_lost(self) -> bool:
        return self._outcome is not None and bool(self._outcome.lost)

    def _wait(self) -> None:
        with guarded("waiting for the round's outcome"):
            outcome = self._next_outcome()
            # somebody else may have told meanwhile
            self._outcome = self._outcome or outcome
            self._wake()
            failure = self._outcome.failure
            if failure is not None and not failure.fatal:
                # a third node may still fail for good, and this one need not be on its way into the next round
                self._await_a_fatal_failure()
        self._wake()

    def _await_a_fatal_failure(self) -> None:
        try:
            while not self._ended.wait(_LOOK_S):
                if self._speaker.check([_FATAL]):
                    self._outcome = RoundOutcome(failure=_failure_from(self._speaker.get(_FATAL)))
                    self._speaker.set(f"{_HEARD}/{self._group_rank}", "1")
                    return
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            self._outcome = RoundOutcome(lost=str(error).splitlines()[0])

    def _next_outcome(self) -> RoundOutcome:
        while True:
            try:
                self._speaker = _connected(self._store)
                store = _connected(self._store)
                store.wait([_OUTCOME], _WAIT)
                failure = _failure_from(store.get(_OUTCOME))
                if failure is None:
                    return RoundOutcome(finished=True)
                store.set(f"{_HEARD}/{self._group_rank}", "1")
                return RoundOutcome(failure=failure)
            except (dist.DistNetworkError, dist.DistStoreError) as error:
                # a connection can break without the death of whoever was at its other end
                if not _listens(self._store):
                    logger.info("the store that the agents share is gone: %s", error)
                    return RoundOutcome(lost=str(error).splitlines()[0])


def _connected(store: Any) -> Any:
    """A connection of our own to the store; torch would go on trying one whose host is gone for minutes.

    Raises:
        torch.distributed.DistNetworkError: nobody listens there.
    """
    if not _listens(store):
        raise dist.DistNetworkError("nobody listens at the store's address")
    return store.clone()


def _listens(store: Any) -> bool:
    """Whether the store's host takes connections; a clone of the store would try that for minutes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    try:
        with socket.create_connection((store.host, store.port), _STORE_S):
            return True
    except (OSError, AttributeError):
        return False


def _failure_from(text: bytes) -> FirstFailure | None:
    content = json.loads(text)
    return None if content.get("finished") else FirstFailure(**content)
