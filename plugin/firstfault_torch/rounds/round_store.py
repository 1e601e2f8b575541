"""The key-value store that the agents of a round share."""

from __future__ import annotations

import datetime as dt
import socket
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerGroup
from typing_extensions import Self

from firstfault_torch import time_limits
from firstfault_torch.guard import logger


def begin_round(store: Any, group_rank: int | None, fallback: int, counted: int = 0) -> int:
    """Return the number of this round, the same on all nodes; `fallback` if the first node doesn't set one.

    Each rendezvous has its own store, a prefix of the store that all rounds share; the first node counts rounds in the
    shared one. A static rendezvous has one store for all rounds; its nodes start together, and each counts rounds
    (`counted`).
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
        logger.warning("the first node doesn't number the rounds; it probably runs without firstfault")
        return fallback
    return int(store.get(key))


def open_agents_store(group: WorkerGroup, number: int, host: str) -> Any:
    """Return the store of a round on which the agents wait for each other.

    A wait needs a separate connection, which only a server offers; so with files or etcd the first agent starts a
    server at `host`.
    """
    store: Any = group.store
    if hasattr(find_base_store(store), "port"):
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
    """Whether the rounds of a job share one store, as with a static rendezvous."""
    backend = getattr(group.spec.rdzv_handler, "get_backend", None)
    return callable(backend) and backend() == "static"


class RoundStore(dist.PrefixStore):  # type: ignore[name-defined]
    """A round's store that can be cloned: before torch 2.8, stores lack ``clone`` and hide a round's prefix.

    `number` is the round's, the same on all nodes.
    """

    def __init__(self, store: Any, number: int) -> None:
        super().__init__(f"firstfault/round-{number}", find_base_store(store))
        self._number = number

    def clone(self) -> Self:
        """Return the same store on a new connection.

        Raises:
            torch.distributed.DistNetworkError: the store's host doesn't respond.
        """
        shared = self.underlying_store
        connected = dist.TCPStore(  # type: ignore[attr-defined]
            shared.host, shared.port, wait_for_workers=False, timeout=shared.timeout
        )
        return type(self)(connected, self._number)


def find_base_store(store: Any) -> Any:
    """Return the store below all prefixes, which has the host and port."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def set_once(store: Any, key: str, value: str | bytes) -> bytes:
    """Set a key unless it is set, wake the waiting threads, and return its value."""
    # without libuv, the default before torch 2.4, torch's store wakes no thread on compare_set, but does on append
    found = bytes(store.compare_set(key, "", value))
    if found == (value.encode() if isinstance(value, str) else value):
        store.append(key, "")
    return found


def connect_to_store(store: Any) -> Any:
    """Return a new connection to the store; torch would retry for minutes if the store's host is gone.

    Raises:
        torch.distributed.DistNetworkError: no server listens there.
    """
    if not is_host_listening(store):
        raise dist.DistNetworkError("no server listens at the store's address")
    return store.clone()


def is_host_listening(store: Any) -> bool:
    """Whether the store's host accepts connections; cloning the store would retry for minutes."""
    host = find_base_store(store)
    try:
        with socket.create_connection((host.host, host.port), time_limits.STORE_TIMEOUT_SECONDS):
            return True
    except (OSError, AttributeError):
        return False
