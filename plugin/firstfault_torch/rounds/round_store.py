"""The key-value store that the agents of a round share."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import socket
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerGroup
from typing_extensions import Self

from firstfault_torch import time_limits
from firstfault_torch.guard import logger
from firstfault_torch.protocol.messages import Append, Operation, Read, SetOnce


def begin_round(store: Any, group_rank: int | None, fallback: int, counted: int = 0) -> int:
    """Return the number of this round, the same on all nodes;
    `fallback` if the first node doesn't set one.

    Each rendezvous has its own store, a prefix of the store that all rounds share; the first node
    counts rounds in the shared one. A static rendezvous has one store for all rounds; its nodes
    start together, and each counts rounds (`counted`).
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
        logger.warning(
            "the first node doesn't number the rounds; it probably runs without firstfault"
        )
        return fallback
    return int(store.get(key))


def open_agents_store(group: WorkerGroup, number: int, host: str) -> Any:
    """Return the store of a round on which the agents wait for each other.

    A wait needs a separate connection, which only a server offers; so with files or etcd the first
    agent starts a server at `host`.
    """
    store: Any = group.store
    if hasattr(find_base_store(store), "port"):
        if not hasattr(store, "clone"):
            return RoundStore(store, number)
        return dist.PrefixStore(f"firstfault/{number}", store) if has_shared_store(group) else store  # type: ignore[attr-defined]
    key = f"firstfault/server/{number}"
    limit = dt.timedelta(seconds=time_limits.PEER_CONNECT_TIMEOUT_SECONDS)
    is_first = not group.group_rank
    if not is_first:
        store.wait([key], limit)
    port = 0 if is_first else int(store.get(key))
    server: Any = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=is_first,
        wait_for_workers=False,
        timeout=limit,
    )
    if is_first:
        store.set(key, str(server.port))
    return RoundStore(server, number)


def has_shared_store(group: WorkerGroup) -> bool:
    """Whether the rounds of a job share one store, as with a static rendezvous."""
    backend = getattr(group.spec.rdzv_handler, "get_backend", None)
    return callable(backend) and backend() == "static"


class RoundStore(dist.PrefixStore):  # type: ignore[name-defined]
    """A round's store that can be cloned: before torch 2.8,
    stores lack ``clone`` and hide a round's prefix.

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
            shared.host,
            shared.port,
            wait_for_workers=False,
            timeout=shared.timeout,
        )
        return type(self)(connected, self._number)


def find_base_store(store: Any) -> Any:
    """Return the store below all prefixes, which has the host and port."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def set_once(store: Any, key: str, value: str | bytes) -> bytes:
    """Set a key unless it is set, wake the waiting threads, and return its value."""
    # without libuv, the default before torch 2.4, torch's store wakes no thread on compare_set, but
    # does on append
    found = bytes(store.compare_set(key, "", value))
    if found == (value.encode() if isinstance(value, str) else value):
        store.append(key, "")
    return found


def carry_out(store: Any, operations: Sequence[Operation]) -> tuple[bytes, ...]:
    """Carry out operations in their order, and return the answer to each.

    Raises:
        torch.distributed.DistError: the connection broke; some may have been carried out.
    """
    values: list[bytes] = []
    is_set: set[str] = set()
    for operation in operations:
        if isinstance(operation, Read):
            exists = operation.key in is_set or store.check([operation.key])
            values.append(bytes(store.get(operation.key)) if exists else b"")
            continue
        if isinstance(operation, Append):
            store.append(operation.key, operation.value)
            values.append(b"")
            is_set.add(operation.key)
        elif isinstance(operation, SetOnce):
            values.append(set_once(store, operation.key, operation.value))
            is_set.add(operation.key)
        else:
            found = store.compare_set(operation.key, operation.before, operation.value)
            values.append(bytes(found))
    return tuple(values)


def connect_to_store(store: Any) -> Any:
    """Return a new connection to the store; torch would retry for minutes if
    the store's host is gone.

    Raises:
        torch.distributed.DistNetworkError: no server listens there.
    """
    if not is_host_listening(store):
        raise dist.DistNetworkError("no server listens at the store's address")
    return clone_store(store)


def clone_store(store: Any) -> Any:
    """Return a new connection to the store, which `interrupt_connections` can end;
    it may take minutes.
    """
    # torch doesn't expose the descriptor of a connection. It is the one socket with the store's
    # port at its other end that is new; if there are several, none is touched.
    # a frozen host may block another thread
    is_alone = _connecting.acquire(timeout=time_limits.STORE_TIMEOUT_SECONDS)
    try:
        before = _list_sockets()
        connection = store.clone()
        new = _list_sockets().items() - before.items() if is_alone else set()
    finally:
        if is_alone:
            _connecting.release()
    address = _get_address(store)
    found = [item for item in new if address is not None and _get_peer_port(item) == address[1]]
    if len(found) == 1 and address is not None:
        _connections.setdefault(address, set()).update(found)
    return connection


def interrupt_connections(store: Any) -> None:
    """Break the connections of `clone_store` to this store,
    so that threads which wait there raise and end.
    """
    for item in _connections.pop(_get_address(store), ()):
        with contextlib.suppress(OSError), _open_socket(item) as connection:
            connection.shutdown(socket.SHUT_RDWR)


_connecting = threading.Lock()
_connections: dict[tuple[str, int] | None, set[tuple[int, int]]] = {}
"""Descriptors and inodes of connections, by the store's host and port."""


def _list_sockets() -> dict[int, int]:
    """Return the sockets of this process: their inodes by descriptor."""
    found = {}
    with contextlib.suppress(OSError):  # a sandbox without /proc
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # it was the descriptor of this very folder
                status = os.fstat(int(path.name))
                if stat.S_ISSOCK(status.st_mode):
                    found[int(path.name)] = status.st_ino
    return found


def is_hosted_here(store: Any) -> bool:
    """Whether this process serves the store: it listens on its port."""
    address = _get_address(store)
    if address is None:
        return False
    for item in _list_sockets().items():
        with contextlib.suppress(OSError), _open_socket(item) as listener:
            is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            name = listener.getsockname() if is_listening else ()
            if isinstance(name, tuple) and name[1:2] == address[1:]:
                return True
    return False


def _get_address(store: Any) -> tuple[str, int] | None:
    host = find_base_store(store)
    return (host.host, host.port) if hasattr(host, "port") else None


def _get_peer_port(item: tuple[int, int]) -> int:
    with contextlib.suppress(OSError), _open_socket(item) as connection:
        peer = connection.getpeername()
        return int(peer[1]) if isinstance(peer, tuple) else 0
    return 0


def _open_socket(item: tuple[int, int]) -> socket.socket:
    """Return a copy of a descriptor.

    Raises:
        OSError: the descriptor isn't that socket any more.
    """
    descriptor, inode = item
    copied = os.dup(descriptor)
    # Only now, because the number could be reused between a check and the copy.
    if os.fstat(copied).st_ino != inode:
        os.close(copied)
        raise OSError("the descriptor has been closed")
    return socket.socket(fileno=copied)


def is_host_listening(store: Any) -> bool:
    """Whether the store's host accepts connections; cloning the store would retry for minutes."""
    host = find_base_store(store)
    try:
        with socket.create_connection((host.host, host.port), time_limits.STORE_TIMEOUT_SECONDS):
            return True
    except (OSError, AttributeError):
        return False
