"""Connections between agents: a broken one reports a dead agent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch.distributed as dist

from firstfault.errors import UsageError
from firstfault.utils.text import parse_json
from firstfault_torch import time_limits
from firstfault_torch.guard import logger, start_late, suppress_internal_errors, try_call
from firstfault_torch.options import PORT_VARIABLE, parse_port
from firstfault_torch.rounds.round_store import clone_store

ADDRESS_KEY = "firstfault/lifeline"
GOODBYE = b"bye\n"
STATE_REQUEST = b"how far\n"
MAX_LINE_BYTES = 4096
LISTEN_BACKLOG = 1024
KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds idle, seconds between probes, probes:
detects within a minute a machine that vanished silently.
"""
USER_TIMEOUT_MS = 1000 * (
    KEEPALIVE_OPTIONS["TCP_KEEPIDLE"]
    + KEEPALIVE_OPTIONS["TCP_KEEPINTVL"] * KEEPALIVE_OPTIONS["TCP_KEEPCNT"]
)
"""The same limit while sent data isn't acknowledged: the kernel then sends that again and again,
and no probes.
"""


def _listen(family: int, *, is_dual: bool) -> socket.socket:
    """Return a socket that listens on the user's port; on any port if there is none,
    or it's in use.
    """
    port, error = try_call(partial(parse_port, os.environ.get(PORT_VARIABLE, "")), UsageError)
    if port:
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
        except OSError as refused:  # such as the port of another job on this machine
            error = refused
    if error is not None:
        logger.warning("%s isn't used (%s); the agent listens on a free port", PORT_VARIABLE, error)
    return socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual)


class PeerConnections:
    """Connections between the first agent and every other agent of a round:
    a broken one means a dead agent.

    Create this after forking the workers: they would inherit the sockets and keep them open after
    the agent's death. `store` is the round's; `first_host` is the first node's host name or
    address, MASTER_ADDR. A thread calls `on_death` once for each dead agent, with its group rank
    and node name.

    The first agent publishes its port and a secret in the store. A peer connects, sends the secret,
    and both wait for the end of the connection: after GOODBYE it is a regular exit, otherwise the
    peer has `RECONNECT_TIMEOUT_SECONDS` to connect again.
    """

    def __init__(
        self,
        store: Any,
        group_rank: int,
        node: str,
        first_host: str,
        on_death: Callable[[int, str], None],
    ) -> None:
        self._store = store
        self._group_rank = group_rank
        self._node = node
        self._first_host = first_host
        self._on_death = on_death
        self.lost_first = ""
        """Node of the first agent while the connection to it is broken; otherwise,
        and in the first agent, empty.
        """
        self._secret = secrets.token_hex(16)
        """The first agent's; peers read it from the store."""
        self._latest: dict[int, asyncio.StreamWriter] = {}
        """The newest connection of each peer, by group rank."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.state: Callable[[], bytes] = bytes
        """Returns a line about this node's progress, the answer to STATE_REQUEST."""
        self.states: dict[int, bytes] = {}
        """In the first agent: the latest answer of each peer, by group rank."""
        self._has_warned = False
        self._ended = Future[None]()
        self.thread = threading.Thread(target=self._run, name="firstfault-liveness", daemon=True)
        start_late(self.thread)

    def end(self) -> None:
        """Send GOODBYE, close the connections, and join the thread."""
        if not self._ended.done():
            self._ended.set_result(None)
            self.thread.join(time_limits.RECONNECT_TIMEOUT_SECONDS)

    def request_states(self) -> None:
        """As the first agent, request the peers' states; answers arrive in `states`."""

        def write() -> None:
            for writer in self._latest.values():
                if not writer.is_closing():
                    writer.write(STATE_REQUEST)

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(write)

    def _run(self) -> None:
        with suppress_internal_errors("holding the connections between the agents"):
            asyncio.run(self._until_ended())

    async def _until_ended(self) -> None:
        """Maintain the connections; at the end `asyncio.run` cancels the open ones,
        which then send GOODBYE.
        """
        holding = asyncio.create_task(self._maintain())
        await asyncio.wrap_future(self._ended)
        holding.cancel()

    async def _maintain(self) -> None:
        with suppress_internal_errors(
            "holding the connections between the agents", through=(asyncio.CancelledError,)
        ):
            await (self._connect_to_first() if self._group_rank else self._serve())

    async def _read_line(self, reader: asyncio.StreamReader, seconds: float) -> bytes:
        line = await asyncio.wait_for(reader.readline(), seconds)
        # before Python 3.12, `wait_for` loses a cancellation that coincides with the line
        if self._ended.done():
            raise asyncio.CancelledError
        return line

    # --- the first agent --------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Act as the first agent, to which all peers connect."""
        self._loop = asyncio.get_running_loop()
        asyncio.get_running_loop().set_exception_handler(self._warn_once)
        # on all interfaces, like torch's store: this process can't know which one is reachable from
        # other pods
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        listener = _listen(family, is_dual=is_dual)
        # With a large backlog asyncio accepts that many connections at once, and logs an error for
        # each one when the system refuses sockets. So asyncio gets a backlog of 1, and the kernel a
        # large one.
        server = await asyncio.start_server(
            self._accept_peer,
            sock=listener,
            limit=MAX_LINE_BYTES,
            backlog=1,
        )
        listener.listen(LISTEN_BACKLOG)
        try:
            address = {"port": listener.getsockname()[1], "secret": self._secret}
            clone_store(self._store).set(ADDRESS_KEY, json.dumps(address))
            await asyncio.Event().wait()
        finally:
            server.close()

    async def _accept_peer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Watch the connection of a peer; close it unless its greeting has the
        secret from the store.
        """
        answer = json.dumps({"node": self._node}).encode() + b"\n"
        with contextlib.closing(writer):
            try:
                greeting = parse_json(
                    await self._read_line(reader, time_limits.RECONNECT_TIMEOUT_SECONDS)
                )
                if not secrets.compare_digest(greeting["secret"], self._secret):
                    # rejected like a malformed greeting
                    raise ValueError("the secret is wrong")  # noqa: TRY301
                group_rank = int(greeting["group_rank"])
                node = str(greeting["node"])
                writer.write(answer)
            except asyncio.CancelledError:
                # a reconnecting peer would otherwise consider this agent dead
                writer.write(answer + GOODBYE)
                raise
            except (OSError, asyncio.TimeoutError, ValueError, KeyError, TypeError) as error:
                logger.debug("dropped a connection that is not an agent's: %s", error)
                return
            self._latest[group_rank] = writer
            if await _watch_connection(
                reader, writer, partial(self.states.__setitem__, group_rank)
            ):
                await asyncio.sleep(time_limits.RECONNECT_TIMEOUT_SECONDS)
                # the peer may have reconnected before this task read the end of its old connection
                if self._latest[group_rank] is writer:
                    self._on_death(group_rank, node)

    def _warn_once(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log once that the system refuses a connection: asyncio retries every second."""
        error = context.get("exception")
        if self._ended.done():
            return  # asyncio's next attempt finds the listener closed
        if not isinstance(error, OSError):
            loop.default_exception_handler(context)
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "can't accept another agent's connection (%s); retrying every second. "
                "Raise the limit of open files (ulimit -n): the first agent needs one per node",
                error,
            )

    # --- the peers --------------------------------------------------------------------------------

    async def _connect_to_first(self) -> None:
        """Act as a peer: connect to the first agent, and reconnect after an interruption."""
        try:
            address = await self._wait_for_first_address()
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            logger.debug("cannot ask the store for the first agent's port: %s", error)
            return
        if address is None:
            return
        first_node, patience = "", time_limits.PEER_CONNECT_TIMEOUT_SECONDS
        deadline = time.monotonic() + time_limits.FIRST_AGENT_PORT_TIMEOUT_SECONDS
        while True:
            connected = await self._connect(
                address, time_limits.RECONNECT_TIMEOUT_SECONDS if first_node else patience
            )
            if connected is not None:
                reader, writer, first_node = connected
                self.lost_first = ""
                if not await _watch_connection(reader, writer, partial(self._answer, writer)):
                    return
                self.lost_first = first_node
            elif first_node or time.monotonic() > deadline:
                break
            else:
                # the first agent may be frozen with 1,000 peers waiting
                await asyncio.sleep(patience)
        if first_node:
            self._on_death(0, first_node)
        else:
            logger.info("no connection to the first agent; this node will notice its death late")

    def _answer(self, writer: asyncio.StreamWriter, line: bytes) -> None:
        if line == STATE_REQUEST:
            writer.write(self.state()[: MAX_LINE_BYTES // 2] + b"\n")

    async def _wait_for_first_address(self) -> dict[str, Any] | None:
        store = clone_store(self._store)
        deadline = time.monotonic() + time_limits.FIRST_AGENT_PORT_TIMEOUT_SECONDS
        pause: float = time_limits.CONNECT_BACKOFF_SECONDS
        while time.monotonic() < deadline:
            if store.check([ADDRESS_KEY]):
                address: dict[str, Any] = json.loads(store.get(ADDRESS_KEY))
                return address
            await asyncio.sleep(pause)
            pause = min(2 * pause, time_limits.MAX_CONNECT_BACKOFF_SECONDS)
        return None

    async def _connect(
        self, address: dict[str, Any], seconds: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str] | None:
        """Return a connection to the first agent and its node's name, or None on timeout."""
        deadline = time.monotonic() + seconds
        pause: float = time_limits.CONNECT_BACKOFF_SECONDS
        greeting = {"secret": address["secret"], "group_rank": self._group_rank, "node": self._node}
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(
                OSError,
                asyncio.TimeoutError,
                ValueError,
                KeyError,
                TypeError,
            ):
                # Blocks this thread, which has nothing else to do; asyncio would start another
                # thread for the name service, which may hang.
                connection = socket.create_connection((self._first_host, address["port"]), left)
                if connection.getsockname() == connection.getpeername():
                    connection.close()
                    continue  # TCP self-connection: the kernel assigned the freed port to this end
                reader, writer = await asyncio.open_connection(
                    sock=connection, limit=MAX_LINE_BYTES
                )
                try:
                    writer.write(json.dumps(greeting).encode() + b"\n")
                    node = str(parse_json(await self._read_line(reader, left))["node"])
                except BaseException:
                    # the first agent may have accepted this peer, or be frozen and read the
                    # greeting later
                    writer.write(GOODBYE)
                    writer.close()
                    raise
                return reader, writer, node
            await asyncio.sleep(pause)
            pause *= 2
        return None


async def _watch_connection(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_line: Callable[[bytes], None]
) -> bool:
    """Pass on a connection's lines until it ends; return whether it ended without GOODBYE."""
    connection = writer.get_extra_info("socket")
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (*KEEPALIVE_OPTIONS.items(), ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        while line := await reader.readline():
            if line == GOODBYE:
                return False
            on_line(line)
    except asyncio.CancelledError:
        writer.write(GOODBYE)  # this agent exits
        raise
    except (OSError, ValueError):
        pass  # ValueError: the line is too long
    finally:
        writer.close()
    return True
