"""The rendezvous of a round, the round's number, and the store that its agents share."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from firstfault_torch.budgets import CONNECTING_S, NUMBERING_S
from firstfault_torch.compat.torch_agent import forget_shared_store
from firstfault_torch.guard import NonBlocking, logger

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerGroup
    from typing_extensions import Self


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
        self.num_nodes_waiting = NonBlocking[int](handler.num_nodes_waiting, 0)

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
        store.wait([key], dt.timedelta(seconds=NUMBERING_S))
    except dist.DistStoreError:
        logger.warning("the first node does not number the rounds; it seems to run without firstfault")
        return fallback
    return int(store.get(key))


def store_of_agents(group: WorkerGroup, number: int, host: str) -> Any:
    """Return the store of a round on which the agents wait for each other.

    Only a connection to a server can wait beside others, so with files or etcd the first agent serves a store.

    Args:
        group: the workers, with the round's store.
        number: of the round.
        host: of the first agent, as the others reach it.
    """
    store: Any = group.store
    if hasattr(lowest(store), "port"):
        return round_store(store, number, is_shared=has_shared_store(group))
    key, limit = f"firstfault/server/{number}", dt.timedelta(seconds=CONNECTING_S)
    is_first = not group.group_rank
    if not is_first:
        store.wait([key], limit)
    port = 0 if is_first else int(store.get(key))
    server: Any = dist.TCPStore(host, port, is_master=is_first, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
    if is_first:
        store.set(key, str(server.port))
    return RoundStore(server, number)


def round_store(store: Any, number: int, *, is_shared: bool = False) -> Any:
    """Return the store of a round of which another connection can be opened: torch's own, or one beside it.

    `is_shared`: torch's own is that of all rounds, as with a static rendezvous.
    """
    if hasattr(store, "clone"):
        return dist.PrefixStore(f"firstfault/{number}", store) if is_shared else store  # type: ignore[attr-defined]
    return RoundStore(store, number)


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
