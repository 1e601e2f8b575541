"""What the ranks of an in-process restart agree on, in one store.

The store outlives any worker: torch elastic's agent hosts it, or the monitor process of the first
rank. Each iteration uses a separate prefix in it, so no iteration needs its own port.
"""

from __future__ import annotations

import datetime as dt
import enum
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from firstfault_inprocess.exception import RestartError
from firstfault_inprocess.exception import TimeoutError as RestartTimeoutError
from firstfault_inprocess.hooks import call_in_thread
from firstfault_torch.node_context import NodeContext

AGENT_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torch's agent: its store listens at MASTER_ADDR and MASTER_PORT."""
_OUTCOME_KEY = "outcome"
_OUTCOME_SET_KEY = "ended"
_FAULTS_KEY = "faults"
_GONE_KEY = "gone"
_ARRIVED_KEY = "arrived"
_BARRIER_OPEN_KEY = "all"
_AGREED_KEY = "agreed"
_COMPLETED_KEY = "completed"
_BEAT_KEY_PREFIX = "beat/"
_INITIAL_RANK_KEY_PREFIX = "initial/"
_POSITION_KEY_PREFIX = "position/"


class BarrierTimeout(RestartError):  # noqa: N818 - NVRx's name
    """Not all ranks arrived at a barrier in time."""


def round_prefix(round_: str | None = None) -> str:
    """Return the prefix of all keys of one round of the agents, by default this worker's round.

    Under an agent without firstfault its number is torch's restart count.
    """
    node_context = NodeContext.from_environment() if round_ is None else None
    own = (
        str(node_context.round)
        if node_context is not None
        else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    )
    return f"firstfault/inprocess/{round_ or own}"


def recovered_key(initial_rank: int, round_: str | None = None) -> str:
    """Return the key set when the ranks continue without this one;
    its value is the interrupted iteration.
    """
    return f"{round_prefix(round_)}/recovered/{initial_rank}"


class TCPStore(dist.TCPStore):  # type: ignore[name-defined]
    """A connection to the store of an in-process restart, or its host;
    takes torch's other arguments, too.
    """

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        *,
        is_master: bool = False,
        timeout: dt.timedelta = dt.timedelta(seconds=300),
        **more: Any,
    ) -> None:
        super().__init__(
            host_name=os.environ["MASTER_ADDR"] if host_name is None else host_name,
            port=int(os.environ["MASTER_PORT"]) if port is None else port,
            is_master=is_master,
            timeout=timeout,
            **{**more, "wait_for_workers": False},
        )


class IterationEnd(enum.Enum):
    """How an iteration ended; the first one that is set counts."""

    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    LOST = "lost"
    """The store can't be reached, so this value is never written there."""


class FaultKind(enum.Enum):
    """What happened to a rank."""

    EXCEPTION = "exception"
    """The function raised."""
    LEFT = "left"
    """The function raised what no restart handles, such as SystemExit, or the rank wasn't healthy.
    """
    SOFT_TIMEOUT = "soft timeout"
    """It made no progress; it continues if it can be interrupted."""
    HARD_TIMEOUT = "hard timeout"
    """It could not be interrupted, and was killed."""
    PROCESS_EXITED = "terminated"
    """Its process ended."""
    UNRESPONSIVE = "unresponsive"
    """Neither the rank nor its monitor process sends heartbeats."""


GONE = frozenset(
    {FaultKind.LEFT, FaultKind.HARD_TIMEOUT, FaultKind.PROCESS_EXITED, FaultKind.UNRESPONSIVE}
)
"""After these a rank takes no further part."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of an iteration, as the remaining ranks learn of it."""

    rank: int
    """As of the iteration."""
    kind: FaultKind
    what: str
    """One line."""
    wall_ns: int
    """Nanoseconds since the Unix epoch, by the rank's clock."""
    initial_rank: int = -1
    waits: bool = False
    """Whether the rank waited in a collective, and so perhaps for another rank."""
    begun: int | None = None
    """How many collectives the rank had begun, or None if that is unknown."""

    def __str__(self) -> str:
        return f"rank {self.initial_rank}: {self.kind.value}{f', {self.what}' if self.what else ''}"


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank's main thread is when a hang is interrupted:
    the rank that hangs is in no collective.
    """

    text: str
    """The innermost line of the user's code, and what it calls."""
    waits: bool
    """Whether it is inside a collective, and so may wait for another rank."""
    begun: int | None = None
    """Collectives begun by this rank in this iteration, or None if torch doesn't count them."""


class Iteration:
    """One iteration's part of the store, over a connection that no other thread
    uses at the same time.

        running       `complete` by every rank -> COMPLETED; `interrupt` by any rank or monitor
                      process -> INTERRUPTED
        INTERRUPTED   each rank arrives once; the last arrival writes who is gone -> agreed
        agreed        all ranks read the same list; they meet again in the next iteration

    A monitor process acts for its dead rank; if it is gone, too, the preceding rank's monitor
    process does:

        outcome, ended   by the last rank that completes, or the first that reports a fault
        faults           appended by a rank that raised, or by the monitor process of one that hangs
                         or died
        gone, arrived    by a rank that leaves, else by the monitor process: `leave`, then `arrive`
        agreed, all      by the last arrival; if it dies before, by the monitor process that arrives
                         for it
        completed, beat/ counters; nobody writes them for a dead rank

    The call has the prefix; `world_size` counts the ranks that take part, reserves included.
    """

    def __init__(self, store: Any, prefix: str, number: int, world_size: int) -> None:
        self.number = number
        self.world_size = world_size
        self._base = store
        self._prefix = f"{prefix}/{number}"
        self._store: Any = dist.PrefixStore(self._prefix, store)  # type: ignore[attr-defined]
        self._exchanges = 0

    def with_connection(self, connection: Any) -> Iteration:
        """Return the same iteration over another connection."""
        return Iteration(connection, self._prefix.rpartition("/")[0], self.number, self.world_size)

    def drop_connection(self) -> None:
        """Drop the connection. No other method may be called afterwards."""
        self._store = self._base = None

    # --- outcome ----------------------------------------------------------------------------------

    def report(self, fault: Fault) -> None:
        """Record a fault; the iteration continues, or has ended."""
        # The server appends: two ranks that fail at the same time both stay on record, in the order
        # of arrival.
        self._store.append(
            _FAULTS_KEY, json.dumps({**asdict(fault), "kind": fault.kind.value}) + "\n"
        )

    def interrupt(self, fault: Fault) -> IterationEnd:
        """Record a fault and end the iteration; return how it has ended."""
        self.report(fault)
        return self._end(IterationEnd.INTERRUPTED)

    def complete(self) -> None:
        """Count this rank as completed; the last one completes the iteration."""
        # If the last rank dies after add(), its monitor process interrupts the iteration instead.
        if self._store.add(_COMPLETED_KEY, 1) >= self.world_size:
            self._end(IterationEnd.COMPLETED)

    def _end(self, outcome: IterationEnd) -> IterationEnd:
        # The last rank may complete while a monitor process reports a fault: the first outcome
        # stays, and compare_set returns it to both. torch sets a missing key if the expected value
        # is empty.
        ended = IterationEnd(self._store.compare_set(_OUTCOME_KEY, "", outcome.value).decode())
        # Every caller wakes them: if the first one died before this line, the next report does.
        self.wake_peers()
        return ended

    def wake_peers(self) -> None:
        """Wake the ranks that wait for the outcome, which is set."""
        # They wait for another key: without libuv, torch's store doesn't wake them after a
        # compare-and-set.
        self._store.set(_OUTCOME_SET_KEY, "1")

    def outcome(self) -> IterationEnd | None:
        """Return how the iteration has ended, or None while it runs."""
        return (
            IterationEnd(self._store.get(_OUTCOME_KEY).decode())
            if self._store.check([_OUTCOME_KEY])
            else None
        )

    def await_outcome(self, timeout: dt.timedelta) -> IterationEnd:
        """Wait in C++ until the iteration has ended.

        Raises:
            torch.distributed.DistStoreError: after `timeout`.
        """
        self._store.wait([_OUTCOME_SET_KEY], timeout)
        return IterationEnd(self._store.get(_OUTCOME_KEY).decode())

    def faults(self) -> list[Fault]:
        """Return the faults so far, in the order in which they were reported."""
        # get() waits for a missing key until the store's timeout; appending nothing creates it.
        self._store.append(_FAULTS_KEY, "")
        lines = map(json.loads, self._store.get(_FAULTS_KEY).decode().splitlines())
        return [Fault(**{**line, "kind": FaultKind(line["kind"])}) for line in lines]

    def put_position(self, rank: int, position: Position) -> None:
        """Write a rank's position. Call this before the rank arrives."""
        self._store.set(f"{_POSITION_KEY_PREFIX}{rank}", json.dumps(asdict(position)))

    def add_positions(self, faults: Sequence[Fault]) -> tuple[Fault, ...]:
        """Return the faults, with the positions that ranks without progress have written."""
        located = []
        for fault in faults:
            key = f"{_POSITION_KEY_PREFIX}{fault.rank}"
            if fault.kind is FaultKind.SOFT_TIMEOUT and self._store.check([key]):
                position = Position(**json.loads(self._store.get(key)))
                what = f"{fault.what}, at {position.text}"
                fault = replace(fault, what=what, waits=position.waits, begun=position.begun)  # noqa: PLW2901
            located.append(fault)
        return tuple(located)

    # --- who continues ----------------------------------------------------------------------------

    def leave(self, rank: int) -> None:
        """Record that a rank doesn't take part in the next iteration, unless that is decided."""
        self._store.append(_GONE_KEY, f"{rank},")

    def arrive(self) -> None:
        """Count one rank as having ended the iteration; the last one opens the barrier."""
        # Not ==: if the last rank dies after add(), its monitor process counts once more and opens
        # the barrier.
        if self._store.add(_ARRIVED_KEY, 1) >= self.world_size:
            # Compare-and-set: of two arrivals beyond the world size, each may have read another
            # list, and all ranks must get the same one. The barrier opens second: a rank that wakes
            # reads the agreed list at once.
            self._store.compare_set(_AGREED_KEY, "", json.dumps(sorted(self.gone())))
            self._store.set(_BARRIER_OPEN_KEY, "1")

    def await_all(self, timeout: dt.timedelta) -> frozenset[int]:
        """Wait for all ranks; return those that don't take part in the next iteration,
        the same for every rank.

        Raises:
            BarrierTimeout: some didn't arrive.
        """
        if not self._await([_BARRIER_OPEN_KEY], timeout):
            arrived = self._store.add(_ARRIVED_KEY, 0)
            raise BarrierTimeout(
                f"only {arrived} of {self.world_size} ranks ended iteration {self.number} within "
                f"{timeout.total_seconds():g} s (barrier_timeout)"
            )
        return frozenset(json.loads(self._store.get(_AGREED_KEY)))

    def agreed(self) -> frozenset[int] | None:
        """Return the ranks that don't continue, or None until that is decided."""
        return (
            frozenset(json.loads(self._store.get(_AGREED_KEY)))
            if self._store.check([_AGREED_KEY])
            else None
        )

    def gone(self) -> set[int]:
        """Return the ranks that are known so far not to continue."""
        # As in `faults`: get() would wait for a missing key.
        self._store.append(_GONE_KEY, "")
        return {int(rank) for rank in self._store.get(_GONE_KEY).decode().split(",") if rank}

    def exchange(
        self,
        timeout: dt.timedelta,
        rank: int,
        value: str,
        ranks: Collection[int],
    ) -> dict[int, str]:
        """Exchange a short text with the remaining ranks, and return theirs by rank. All ranks have
        to call this equally often.

        Raises:
            BarrierTimeout: one of them gave none.
        """
        # All ranks make the same exchanges in the same order, so equal numbers mean the same
        # exchange.
        name = f"exchange/{self._exchanges}"
        self._exchanges += 1
        self._store.set(f"{name}/{rank}", value)
        keys = [f"{name}/{other}" for other in ranks]
        if not self._await(keys, timeout):
            raise BarrierTimeout(
                f"not all ranks took part in {name} within {timeout.total_seconds():g} s"
            )
        return {
            other: value.decode()
            for other, value in zip(ranks, self._store.multi_get(keys), strict=True)
        }

    def _await(self, keys: list[str], timeout: dt.timedelta) -> bool:
        """Wait for keys in a thread, so that signal handlers run in this one;
        False after `timeout`.

        Raises:
            torch.distributed.DistNetworkError: the store is gone.
        """
        try:
            # The limit also holds outside of C++, where a frozen store may block for longer: the
            # thread is left behind.
            call_in_thread(partial(self._store.wait, keys, timeout), timeout, lambda: "the wait")
        except (dist.DistStoreError, RestartTimeoutError):
            return False
        return True

    # --- monitor processes ------------------------------------------------------------------------

    def beat(self, rank: int, initial_rank: int) -> None:
        """Count one more heartbeat of a rank's monitor process."""
        if self._store.add(f"{_BEAT_KEY_PREFIX}{rank}", 1) == 1:
            self._store.set(f"{_INITIAL_RANK_KEY_PREFIX}{rank}", str(initial_rank))

    def initial_rank(self, rank: int) -> int:
        """Return the initial rank that a monitor process has written for a rank, or -1 if none."""
        key = f"{_INITIAL_RANK_KEY_PREFIX}{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else -1

    def beats(self, rank: int) -> int:
        """Return how many heartbeats a rank's monitor process has sent in this iteration."""
        return int(self._store.add(f"{_BEAT_KEY_PREFIX}{rank}", 0))

    def open_substore(self, name: str) -> Any:
        """Return a store for one purpose within this iteration,
        such as that of its process groups.
        """
        return dist.PrefixStore(f"{self._prefix}/{name}", self._base)  # type: ignore[attr-defined]
