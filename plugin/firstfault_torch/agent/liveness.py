"""A connection between each agent and the first one, which the kernel closes the moment an agent dies.

An agent that is killed tells nobody, and the store the agents share lives on with another of them: without this its
peers would train, or sleep, until a collective times out. A connection may also break without a death, so both ends
try to meet again before one takes the other for dead.
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
_AGAIN_S = 1.5
"""How long after a connection broke an agent may still come back."""
_PAUSE_S = 0.1
_CONNECTING_S = 5.0
_MEETING_S = 300.0
"""Longest wait for the first agent to open its end; one without firstfault never does."""
_LONGEST_LINE = 4096
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds, seconds, times: a machine that vanishes closes nothing, and is missed after a minute."""


@dataclass(slots=True)
class _Peer:
    """The other end of a connection."""

    group_rank: int
    node: str


class Liveness:
    """This node's connections of one round. Begin it after the workers have been forked: they would hold them open.

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
        run = self._serve if group_rank == 0 else self._hold
        self._thread = threading.Thread(target=self._guarded, args=(run,), name="firstfault-lifelines", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Say farewell and close; leaves no thread behind."""
        if self._ended.is_set():
            return
        self._ended.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(_AGAIN_S)
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
                        # the end of a connection may be heard after the next one has been taken
                        if latest.get(rank) is key.fileobj:
                            missing[rank] = (time.monotonic(), key.data)
                for rank, (since, peer) in list(missing.items()):
                    if time.monotonic() - since > _AGAIN_S:
                        del missing[rank]
                        self._on_death(rank, peer.node)
            _say_farewell([key.fileobj for key in waiting.get_map().values() if key.data is not None])

    def _accept(
        self, listener: socket.socket, waiting: selectors.BaseSelector, open_: contextlib.ExitStack, secret: str
    ) -> tuple[_Peer | None, Any]:
        try:
            connection, _ = listener.accept()
        except OSError:
            return None, None  # gone before it was taken
        try:
            connection.settimeout(_AGAIN_S)
            peer = _greeted(_line(connection), secret)
            connection.sendall(json.dumps({"node": self._own.node}).encode() + b"\n")
            _keep_alive(connection)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.debug("somebody who is no agent connected: %s", error)
            connection.close()
            return None, None
        open_.enter_context(connection)
        waiting.register(connection, selectors.EVENT_READ, peer)
        return peer, connection

    # --- every other agent's end --------------------------------------------------------------------------------

    def _hold(self) -> None:
        try:
            where = self._first_address()
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            logger.debug("the first agent opens no connection: %s", error)
            return
        if where is None:
            return
        first = _Peer(0, "")
        connection = self._connect(where, first, _CONNECTING_S)
        if connection is None:
            logger.info("no connection to the first agent; its sudden death will be noticed late")
            return
        while connection is not None:
            with connection:
                if self._waits(connection) != "broken":
                    return
            connection = self._connect(where, first, _AGAIN_S)
        if not self._ended.is_set():
            self._on_death(0, first.node)

    def _first_address(self) -> dict[str, Any] | None:
        store = self._store.clone()
        deadline = time.monotonic() + _MEETING_S
        while not self._ended.is_set() and time.monotonic() < deadline:
            if store.check([_KEY]):
                address: dict[str, Any] = json.loads(store.get(_KEY))
                return address
            self._ended.wait(_PAUSE_S)
        return None

    def _connect(self, where: dict[str, Any], first: _Peer, seconds: float) -> socket.socket | None:
        deadline = time.monotonic() + seconds
        greeting = {"secret": where["secret"], "group_rank": self._own.group_rank, "node": self._own.node}
        while not self._ended.is_set() and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
                connection = opened.enter_context(socket.create_connection((self._first_host, where["port"]), left))
                if connection.getsockname() == connection.getpeername():
                    continue  # on one machine a port that nobody listens at any more may be drawn for this end
                with contextlib.suppress(ValueError, KeyError):
                    connection.sendall(json.dumps(greeting).encode() + b"\n")
                    first.node = str(json.loads(_line(connection))["node"])
                    _keep_alive(connection)
                    opened.pop_all()
                    return connection
            self._ended.wait(_PAUSE_S)
        return None

    def _waits(self, connection: socket.socket) -> str:
        """Wait until the connection is over; return "farewell", "broken", or "ended" if this end is to end."""
        with selectors.DefaultSelector() as waiting:
            waiting.register(connection, selectors.EVENT_READ)
            waiting.register(self._waker, selectors.EVENT_READ)
            while not self._ended.is_set():
                for key, _ in waiting.select():
                    over = _is_over(connection, waiting) if key.fileobj is connection else ""
                    if over:
                        return over
        _say_farewell([connection])
        return "ended"


def _listening() -> socket.socket:
    """On all interfaces, as torch's own store: which of them the other pods can reach is not known here."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _greeted(line: bytes, secret: str) -> _Peer:
    """Return who says so.

    Raises:
        ValueError: it is no greeting, or its secret is not the one in the store.
    """
    said = json.loads(line)
    if not secrets.compare_digest(str(said["secret"]), secret):
        raise ValueError("the secret is wrong")
    return _Peer(int(said["group_rank"]), str(said["node"]))


def _is_over(connection: Any, waiting: selectors.BaseSelector) -> str:
    """Return "farewell" or "broken" and forget the connection if it is over; empty if it is not."""
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


def _say_farewell(connections: list[Any]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall(_FAREWELL)


def _line(connection: socket.socket) -> bytes:
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
