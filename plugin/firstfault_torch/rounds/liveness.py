"""How an agent detects a failure without a notice: by its connection to another agent, and in the roster.

The kernel closes the connection between an agent and the first one the moment either dies. It can also break between
two living agents, so both ends try to reconnect before one reports the other as dead. The roster tells of failures if
the store's host is frozen or gone. Two runs may share one output prefix: containers that were restarted within an
attempt, or a program that was run again. Their rounds have the same numbers, so a failure of the earlier run must not
end the later one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from firstfault.errors import FirstFaultError
from firstfault.layout import RosterKey
from firstfault.model import Phase
from firstfault.recorder import NodeFolder, Recorder
from firstfault.recorder.budgets import ROSTER_ANSWER_S
from firstfault.text import parse_json
from firstfault_torch.budgets import (
    CONNECT_PAUSE_S,
    CONNECTING_S,
    FIRST_AGENT_S,
    FULL_S,
    LONGEST_CONNECT_PAUSE_S,
    RECONNECT_S,
    ROSTER_JOIN_S,
    ROSTER_POLL_S,
)
from firstfault_torch.guard import guarded, logger

if TYPE_CHECKING:
    from typing_extensions import Self

    from firstfault_torch.context import Recording

_KEY = "firstfault/lifeline"
_FAREWELL = b"bye\n"
_LONGEST_LINE = 4096
_MOST_GREETINGS = 1024
"""Connections that have not introduced themselves yet; of more, the oldest are closed, and an agent tries again."""
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors of accept(2) after which the connection still waits to be accepted."""
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds, seconds, times: detects within a minute a machine that vanished without closing its connections."""
_POLLS_PER_SECOND = 3.0
"""Of all nodes of a job together: the nodes of a large job poll less often."""


@dataclass(slots=True)
class _Peer:
    """The other end of a connection."""

    group_rank: int
    node: str


@dataclass(slots=True)
class _Greeting:
    """The first line of a new connection; a stranger may send it slowly, or never."""

    since: float
    line: bytes = b""

    def read(self, connection: socket.socket) -> bool:
        """Read what is there; return whether nothing more is to come."""
        try:
            part = connection.recv(_LONGEST_LINE - len(self.line))
        except BlockingIOError:
            return False
        except OSError:
            part = b""
        self.line += part
        return not part or self.line.endswith(b"\n") or len(self.line) >= _LONGEST_LINE


class _Clients:
    """The connections of all other agents, and of strangers that have not introduced themselves yet."""

    def __init__(self, listener: socket.socket, secret: str, node: str, on_death: Callable[[int, str], None]) -> None:
        self._listener = listener
        self._secret = secret
        self._node = node
        self._on_death = on_death
        self._greeting: dict[socket.socket, _Greeting] = {}
        self._peers: dict[socket.socket, _Peer] = {}
        self._latest: dict[int, socket.socket] = {}
        self._missing: dict[int, tuple[float, _Peer]] = {}
        self._full_since: float | None = None
        """When no connection could be taken for want of a descriptor; None: the listener is served."""
        self._has_warned = False
        self.waiting = selectors.DefaultSelector()
        self.waiting.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.waiting.close()
        for connection in (*self._greeting, *self._peers):
            connection.close()

    @property
    def hurry(self) -> bool:
        """Whether something has a limit of time."""
        return bool(self._greeting or self._missing or self._full_since is not None)

    def accept(self) -> None:
        """Take a new connection, whose owner is not known yet."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._pause(error)
            return  # else closed before it was accepted
        connection.settimeout(0)
        if len(self._greeting) >= _MOST_GREETINGS:
            self._drop(next(iter(self._greeting)))
        self._greeting[connection] = _Greeting(time.monotonic())
        self.waiting.register(connection, selectors.EVENT_READ)

    def _pause(self, error: OSError) -> None:
        """Take no connection for a while: the listener stays readable, and each attempt would fail like this one."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the first agent cannot take the connection of another agent (%s); it tries again every %g s. "
                "Raise the limit of open files (ulimit -n): the agent needs one for each node",
                error,
                FULL_S,
            )
        self.waiting.unregister(self._listener)
        self._full_since = time.monotonic()

    def read(self, connection: socket.socket) -> None:
        """Read from a connection."""
        greeting = self._greeting.get(connection)
        if greeting is not None:
            if greeting.read(connection):
                del self._greeting[connection]
                self._welcome(connection, greeting.line)
        elif connection in self._peers and (over := _is_over(connection, self.waiting)):
            peer = self._peers.pop(connection)
            connection.close()
            # the old connection's end may be read after the new one was accepted
            if over == "broken" and self._latest.get(peer.group_rank) is connection:
                self._missing[peer.group_rank] = (time.monotonic(), peer)

    def _welcome(self, connection: socket.socket, line: bytes) -> None:
        """Answer an agent's greeting, which has the secret from the store; close a stranger's connection."""
        try:
            greeting = parse_json(line)
            if not secrets.compare_digest(greeting["secret"], self._secret):
                raise ValueError("the secret is wrong")  # noqa: TRY301 - one way to refuse
            peer = _Peer(int(greeting["group_rank"]), str(greeting["node"]))
            connection.settimeout(RECONNECT_S)
            connection.sendall(json.dumps({"node": self._node}).encode() + b"\n")
            _keep_alive(connection)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.debug("dropped a connection that is not an agent's: %s", error)
            self._drop(connection)
            return
        self._peers[connection] = peer
        self._latest[peer.group_rank] = connection
        self._missing.pop(peer.group_rank, None)

    def _drop(self, connection: socket.socket) -> None:
        self._greeting.pop(connection, None)
        self.waiting.unregister(connection)
        connection.close()

    def look_at_the_clock(self) -> None:
        """Drop connections that stay silent, report agents that did not come back, and take connections again."""
        if self._full_since is not None and time.monotonic() - self._full_since > FULL_S:
            self._full_since = None
            self.waiting.register(self._listener, selectors.EVENT_READ)
        late = time.monotonic() - RECONNECT_S
        for connection in [one for one, greeting in self._greeting.items() if greeting.since < late]:
            self._drop(connection)
        for rank, (since, peer) in list(self._missing.items()):
            if since < late:
                del self._missing[rank]
                self._on_death(rank, peer.node)

    def say_farewell(self) -> None:
        """Tell all agents that this one ends."""
        for connection in self._peers:
            with contextlib.suppress(OSError):
                connection.sendall(_FAREWELL)


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
        self.lost_first = ""
        """The node of the first agent, while that agent's connection is broken; empty: it is not, or this is it."""
        self._ended = threading.Event()
        self._waker, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="firstfault-liveness", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Send a farewell, close, and end the thread."""
        if self._ended.is_set():
            return
        self._ended.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(RECONNECT_S)
        self._wake.close()

    def _run(self) -> None:
        with guarded("holding the connections between the agents"), self._waker:
            if self._own.group_rank == 0:
                self._serve()
            else:
                self._connect_to_first()

    def _serve(self) -> None:
        """Be the first agent, to which the others connect."""
        secret = secrets.token_hex(16)
        with _listening() as listener, _Clients(listener, secret, self._own.node, self._on_death) as clients:
            self._store.clone().set(_KEY, json.dumps({"port": listener.getsockname()[1], "secret": secret}))
            clients.waiting.register(self._waker, selectors.EVENT_READ)
            while not self._ended.is_set():
                for key, _ in clients.waiting.select(CONNECT_PAUSE_S if clients.hurry else None):
                    if key.fileobj is listener:
                        clients.accept()
                    elif key.fileobj is not self._waker:
                        clients.read(cast("socket.socket", key.fileobj))
                clients.look_at_the_clock()
            clients.say_farewell()

    def _connect_to_first(self) -> None:
        """Be one of the other agents."""
        try:
            where = self._first_address()
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            logger.debug("cannot ask the store for the first agent's port: %s", error)
            return
        if where is None:
            return
        first = _Peer(0, "")
        connection = self._connect(where, first, CONNECTING_S)
        if connection is None:
            logger.info("no connection to the first agent; if it is killed, this node detects it late")
            return
        while connection is not None:
            self.lost_first = ""
            with connection:
                if self._wait_for_end(connection) != "broken":
                    return
            self.lost_first = first.node
            connection = self._connect(where, first, RECONNECT_S)
        if not self._ended.is_set():
            self._on_death(0, first.node)

    def _first_address(self) -> dict[str, Any] | None:
        store = self._store.clone()
        deadline = time.monotonic() + FIRST_AGENT_S
        pause: float = CONNECT_PAUSE_S
        while not self._ended.is_set() and time.monotonic() < deadline:
            if store.check([_KEY]):
                address: dict[str, Any] = json.loads(store.get(_KEY))
                return address
            self._ended.wait(pause)
            pause = min(2 * pause, LONGEST_CONNECT_PAUSE_S)
        return None

    def _connect(self, where: dict[str, Any], first: _Peer, seconds: float) -> socket.socket | None:
        deadline = time.monotonic() + seconds
        greeting = {"secret": where["secret"], "group_rank": self._own.group_rank, "node": self._own.node}
        while not self._ended.is_set() and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
                connection = opened.enter_context(socket.create_connection((self._first_host, where["port"]), left))
                if connection.getsockname() == connection.getpeername():
                    continue  # a TCP self-connection: the kernel chose the freed port for this end
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    connection.sendall(json.dumps(greeting).encode() + b"\n")
                    first.node = str(parse_json(_read_line(connection))["node"])
                    _keep_alive(connection)
                    opened.pop_all()
                    return connection
            self._ended.wait(CONNECT_PAUSE_S)
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
        with contextlib.suppress(OSError):
            connection.sendall(_FAREWELL)
        return "ended"


class RosterPoll:
    """Polls the roster every few seconds. Make it after the workers were forked.

    Args:
        recording: with the round to look for.
        files: the node's.
        group_rank: this node's.
        nodes: of the round.
        patience_seconds: how long a failure must be in the roster before `on_failure` is called.
        on_failure: called once, with a group rank, from a thread.
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        recording: Recording,
        files: NodeFolder,
        *,
        group_rank: int,
        nodes: int,
        patience_seconds: float,
        on_failure: Callable[[int], None],
    ) -> None:
        self._recorder = Recorder(files)
        self._round = recording.round
        self._incarnation = recording.incarnation
        self._before: frozenset[RosterKey] | None = None
        self._own = group_rank
        self._every_s = max(ROSTER_POLL_S, nodes / _POLLS_PER_SECOND)
        self._patience_s = patience_seconds
        self._on_failure = on_failure
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="firstfault-roster", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop polling, and end the thread unless it waits for the storage."""
        self._ended.set()
        self._thread.join(ROSTER_JOIN_S)

    def _poll(self) -> None:
        with guarded("polling the roster"):
            seen: dict[int, float] = {}
            while not self._ended.wait(self._every_s):
                now = time.monotonic()
                for group_rank in self._failed():
                    since = seen.setdefault(group_rank, now)
                    if now - since >= self._patience_s and since < now:
                        self._on_failure(group_rank)
                        return

    def _failed(self) -> list[int]:
        try:
            names = self._recorder.roster(ROSTER_ANSWER_S)
        except FirstFaultError as error:
            logger.debug("the roster could not be listed: %s", error)
            return []
        parsed = map(RosterKey.parse, names)
        keys = [key for key in parsed if key is not None and key.round == self._round]
        failed = {key.group_rank for key in self._of_this_run(keys) if key.phase is Phase.FAILED}
        return sorted(group_rank for group_rank in failed if group_rank is not None and group_rank != self._own)

    def _of_this_run(self, keys: Sequence[RosterKey]) -> list[RosterKey]:
        """Return the keys without those of an earlier run in the same output prefix.

        A newer incarnation of the same group rank tells them, except if the nodes' clocks differ and the group ranks
        are now those of other nodes. So if this node finds another incarnation in its own place, it also leaves out
        what the first listing has.
        """
        newest: dict[int | None, int] = {}
        for key in keys:
            newest[key.group_rank] = max(newest.get(key.group_rank, 0), key.incarnation)
        if self._before is None:
            is_shared = any(key.group_rank == self._own and key.incarnation != self._incarnation for key in keys)
            self._before = frozenset(keys) if is_shared else frozenset()
        return [key for key in keys if key.incarnation >= newest[key.group_rank] and key not in self._before]


def _listening() -> socket.socket:
    """Listen on all interfaces, as torch's store does: which one the other pods can reach is not known here."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


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
