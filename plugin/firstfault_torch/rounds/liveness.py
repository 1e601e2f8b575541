"""A TCP connection between each agent and the first one: the kernel closes it the moment an agent dies.

A killed agent sends no failure notice, and the store may run on another node. Without this connection its peers would
wait until a collective times out. A connection can also break between two living agents, so both ends try to reconnect
before one reports the other as dead.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from firstfault_torch.guard import guarded, logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Liveness"]

_KEY = "firstfault/lifeline"
_FAREWELL = b"bye\n"
_RECONNECT_S = 1.5
"""Time for an agent to reconnect before it counts as dead."""
_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
"""Longest pause between two looks for the first agent's port, which all agents take."""
_CONNECTING_S = 5.0
_FIRST_AGENT_S = 300.0
"""Longest wait for the first agent to open its port; without firstfault it never does."""
_LONGEST_LINE = 4096
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds, seconds, times: detects within a minute a machine that vanished without closing its connections."""


@dataclass(slots=True)
class _Peer:
    """The other end of a connection."""

    group_rank: int
    node: str


class Liveness:
    """This node's connections of one round. Make it after the workers were forked: they would keep them open.

    Args:
        store: the round's own.
        group_rank: this node's.
        node: its name.
        first_host: host name or address of the first node, MASTER_ADDR.
        on_death: called once for each agent that died, with its group rank and its node's name, from a thread.
    """

    def __init__(
        self, store: Any, group_rank: int, node: str, first_host: str, on_death: Callable[[int, str], None]
    ) -> None:
        self._store = store
        self._own = _Peer(group_rank, node)
        self._first_host = first_host
        self._on_death = on_death
        self._ended = threading.Event()
        self._waker, self._wake = socket.socketpair()
        run = self._serve if group_rank == 0 else self._connect_to_first
        self._thread = threading.Thread(target=self._guarded, args=(run,), name="firstfault-liveness", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Send a farewell, close, and end the thread."""
        if self._ended.is_set():
            return
        self._ended.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(_RECONNECT_S)
        self._wake.close()

    def _guarded(self, run: Callable[[], None]) -> None:
        with guarded("holding the connections between the agents"), self._waker:
            run()

    # --- the first agent's end ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        secret = secrets.token_hex(16)
        with _listening() as listener, selectors.DefaultSelector() as waiting, contextlib.ExitStack() as open_:
            self._store.clone().set(_KEY, json.dumps({"port": listener.getsockname()[1], "secret": secret}))
            waiting.register(listener, selectors.EVENT_READ)
            waiting.register(self._waker, selectors.EVENT_READ)
            missing: dict[int, tuple[float, _Peer]] = {}
            latest: dict[int, Any] = {}
            while not self._ended.is_set():
                for key, _ in waiting.select(_PAUSE_S if missing else None):
                    if key.fileobj is listener:
                        peer, connection = self._accept(listener, waiting, open_, secret)
                        if peer is not None:
                            latest[peer.group_rank] = connection
                            missing.pop(peer.group_rank, None)
                    elif key.data is not None and _is_over(key.fileobj, waiting) == "broken":
                        rank = key.data.group_rank
                        # the old connection's end may be read after the new one was accepted
                        if latest.get(rank) is key.fileobj:
                            missing[rank] = (time.monotonic(), key.data)
                for rank, (since, peer) in list(missing.items()):
                    if time.monotonic() - since > _RECONNECT_S:
                        del missing[rank]
                        self._on_death(rank, peer.node)
            _send_farewell([key.fileobj for key in waiting.get_map().values() if key.data is not None])

    def _accept(
        self, listener: socket.socket, waiting: selectors.BaseSelector, open_: contextlib.ExitStack, secret: str
    ) -> tuple[_Peer | None, Any]:
        try:
            connection, _ = listener.accept()
        except OSError:
            return None, None  # closed before it was accepted
        try:
            connection.settimeout(_RECONNECT_S)
            peer = _parse_greeting(_read_line(connection), secret)
            connection.sendall(json.dumps({"node": self._own.node}).encode() + b"\n")
            _keep_alive(connection)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.debug("dropped a connection that is not an agent's: %s", error)
            connection.close()
            return None, None
        open_.enter_context(connection)
        waiting.register(connection, selectors.EVENT_READ, peer)
        return peer, connection

    # --- every other agent's end --------------------------------------------------------------------------------

    def _connect_to_first(self) -> None:
        try:
            where = self._first_address()
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            logger.debug("cannot ask the store for the first agent's port: %s", error)
            return
        if where is None:
            return
        first = _Peer(0, "")
        connection = self._connect(where, first, _CONNECTING_S)
        if connection is None:
            logger.info("no connection to the first agent; if it is killed, this node detects it late")
            return
        while connection is not None:
            with connection:
                if self._wait_for_end(connection) != "broken":
                    return
            connection = self._connect(where, first, _RECONNECT_S)
        if not self._ended.is_set():
            self._on_death(0, first.node)

    def _first_address(self) -> dict[str, Any] | None:
        store = self._store.clone()
        deadline = time.monotonic() + _FIRST_AGENT_S
        pause = _PAUSE_S
        while not self._ended.is_set() and time.monotonic() < deadline:
            if store.check([_KEY]):
                address: dict[str, Any] = json.loads(store.get(_KEY))
                return address
            self._ended.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return None

    def _connect(self, where: dict[str, Any], first: _Peer, seconds: float) -> socket.socket | None:
        deadline = time.monotonic() + seconds
        greeting = {"secret": where["secret"], "group_rank": self._own.group_rank, "node": self._own.node}
        while not self._ended.is_set() and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
                connection = opened.enter_context(socket.create_connection((self._first_host, where["port"]), left))
                if connection.getsockname() == connection.getpeername():
                    continue  # a TCP self-connection: the kernel chose the freed port for this end
                with contextlib.suppress(ValueError, KeyError):
                    connection.sendall(json.dumps(greeting).encode() + b"\n")
                    first.node = str(json.loads(_read_line(connection))["node"])
                    _keep_alive(connection)
                    opened.pop_all()
                    return connection
            self._ended.wait(_PAUSE_S)
        return None

    def _wait_for_end(self, connection: socket.socket) -> str:
        """Wait until the connection ends; return "farewell", "broken", or "ended" after a call of `end`."""
        with selectors.DefaultSelector() as waiting:
            waiting.register(connection, selectors.EVENT_READ)
            waiting.register(self._waker, selectors.EVENT_READ)
            while not self._ended.is_set():
                for key, _ in waiting.select():
                    over = _is_over(connection, waiting) if key.fileobj is connection else ""
                    if over:
                        return over
        _send_farewell([connection])
        return "ended"


def _listening() -> socket.socket:
    """Listen on all interfaces, as torch's store does: which one the other pods can reach is not known here."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _parse_greeting(line: bytes, secret: str) -> _Peer:
    """Return the agent that a greeting names.

    Raises:
        ValueError: it is not a greeting, or its secret is not the one in the store.
    """
    greeting = json.loads(line)
    if not secrets.compare_digest(str(greeting["secret"]), secret):
        raise ValueError("the secret is wrong")
    return _Peer(int(greeting["group_rank"]), str(greeting["node"]))


def _is_over(connection: Any, waiting: selectors.BaseSelector) -> str:
    """Return "farewell" or "broken" and unregister the connection if it ended; empty if it did not."""
    try:
        data = connection.recv(_LONGEST_LINE)
    except TimeoutError:
        return ""
    except OSError:
        data = b""
    if data and data != _FAREWELL:
        return ""
    waiting.unregister(connection)
    return "farewell" if data else "broken"


def _send_farewell(connections: list[Any]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall(_FAREWELL)


def _read_line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < _LONGEST_LINE:
        part = connection.recv(_LONGEST_LINE)
        if not part:
            break
        data += part
    return data


def _keep_alive(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
