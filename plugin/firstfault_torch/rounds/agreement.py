"""What the agents of a round agree on in the store they share: the round's number, and that all have finished."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from firstfault.model import Phase
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault_torch.budgets import BARRIER_LOG_S, BARRIER_LOOK_S, NUMBERING_S, STORE_S
from firstfault_torch.compat.torch_agent import BARRIER_LAST, BARRIER_MEMBERS
from firstfault_torch.guard import NonBlocking, bounded, logger

if TYPE_CHECKING:
    import threading

    from firstfault_torch.context import Recording
    from firstfault_torch.rounds.failure_broadcast import FailureBroadcast


def begin_round(store: Any, group_rank: int | None, fallback: int) -> int:
    """Return the number of this rendezvous, the same on all nodes.

    Each rendezvous has its own store on top of one that all rounds share, in which the first node counts the rounds.

    Args:
        store: the round's own.
        group_rank: this node's.
        fallback: the number if the first node does not set one.
    """
    shared = getattr(store, "underlying_store", store)
    if group_rank == 0:
        number = int(shared.add("firstfault/rounds", 1)) - 1
        store.set("firstfault/round", str(number))
        return number
    try:
        store.wait(["firstfault/round"], dt.timedelta(seconds=NUMBERING_S))
    except dist.DistStoreError:
        logger.warning("the first node does not number the rounds; it seems to run without firstfault")
        return fallback
    return int(store.get("firstfault/round"))


def await_all(store: Any, nodes: int, outcome: FailureBroadcast, wake: threading.Event, recording: Recording) -> bool:
    """Wait until the workers of all nodes have succeeded; False if the round ended in another way.

    The calling thread waits in Python, so that signals and `wake` reach it. The wait has no limit: this node has to
    stay while the others train.

    Raises:
        RendezvousConnectionError: the node that hosts the store is gone before all nodes have finished.
    """
    bounded(lambda: _enter_barrier(store, nodes), STORE_S, "entering the exit barrier")
    is_complete = NonBlocking(lambda: _is_complete(store), default=False)
    waited = 0.0
    while True:
        ended = outcome.outcome
        if ended is not None and ended.lost:
            return _all_succeeded(recording, nodes, ended.lost)
        if ended is not None:
            return ended.finished
        if is_complete():
            outcome.send_finished()
            return True
        wake.wait(BARRIER_LOOK_S)
        wake.clear()
        waited += BARRIER_LOOK_S
        if waited % BARRIER_LOG_S < BARRIER_LOOK_S:
            logger.info("this node's workers have finished; waiting for the other nodes'")


def _enter_barrier(store: Any, nodes: int) -> None:
    if store.add(BARRIER_MEMBERS, 1) == nodes:
        store.set(BARRIER_LAST, "<val_ignored>")


def _is_complete(store: Any) -> bool:
    try:
        return bool(store.check([BARRIER_LAST]))
    except (dist.DistNetworkError, dist.DistStoreError):
        return False  # the broadcast reports the lost store


def _all_succeeded(recording: Recording, nodes: int, why: str) -> bool:
    """Whether all nodes had finished before the store was lost, according to the roster."""
    roster = MultiErrorFileOutputReader(recording.output_prefix).job().roster
    done = {entry.place.group_rank for entry in roster if entry.phase is Phase.SUCCEEDED}
    if len(done) >= nodes:
        return True
    raise RendezvousConnectionError(f"the node that hosts the store is gone, and not all nodes have finished: {why}")
