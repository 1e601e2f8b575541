"""Connections between agents: a broken one reports a dead agent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch.distributed as dist

from firstfault.utils.text import parse_json
from firstfault_torch import time_limits
from firstfault_torch.guard import logger, suppress_internal_errors

_KEY = "firstfault/lifeline"
_FAREWELL = b"bye\n"
_QUESTION = b"how far\n"
_LONGEST_LINE = 4096
_BACKLOG = 1024
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds, seconds, times: detects within a minute a machine that vanished without closing its connections."""


class PeerConnections:
    """This node's connections of one round. Make it after the workers were forked: they would keep them open.

    `store` is the round's own; `first_host` the host name or address of the first node, MASTER_ADDR. A thread calls
    `on_death` once for each agent that died, with its group rank and its node's name.
    """

    def __init__(
        self, store: Any, group_rank: int, node: str, first_host: str, on_death: Callable[[int, str], None]
    ) -> None:
        self._store = store
        self._group_rank = group_rank
        self._node = node
        self._first_host = first_host
        self._on_death = on_death
        self.lost_first = ""
        """The node of the first agent, while that agent's connection is broken; empty: it is not, or this is it."""
        self._secret = secrets.token_hex(16)
        """Of the first agent: others read it from the store."""
        self._latest: dict[int, asyncio.StreamWriter] = {}
        """The newest connection of each other agent, by group rank."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.state: Callable[[], bytes] = bytes
        """Returns a line about this node's progress: what it answers to the first agent."""
        self.told: dict[int, bytes] = {}
        """What the other agents have answered last, by group rank; of the first agent."""
        self._has_warned = False
        self._ended = Future[None]()
        self._thread = threading.Thread(target=self._run, name="firstfault-liveness", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Send a farewell, close, and end the thread."""
        if not self._ended.done():
            self._ended.set_result(None)
            self._thread.join(time_limits.RECONNECT_TIMEOUT_SECONDS)

    def ask(self) -> None:
        """Ask the other agents for their states, as the first one; answers come into `told`."""

        def write() -> None:
            for writer in self._latest.values():
                if not writer.is_closing():
                    writer.write(_QUESTION)

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(write)

    def _run(self) -> None:
        with suppress_internal_errors("holding the connections between the agents"):
            asyncio.run(self._until_ended())

    async def _until_ended(self) -> None:
        """Hold the connections; those that are open at the end are cancelled by `asyncio.run`, and say farewell."""
        holding = asyncio.create_task(self._hold())
        await asyncio.wrap_future(self._ended)
        holding.cancel()

    async def _hold(self) -> None:
        with suppress_internal_errors("holding the connections between the agents", through=(asyncio.CancelledError,)):
            await (self._connect_to_first() if self._group_rank else self._serve())

    async def _line(self, reader: asyncio.StreamReader, seconds: float) -> bytes:
        line = await asyncio.wait_for(reader.readline(), seconds)
        if self._ended.done():  # before Python 3.12, `wait_for` drops a cancellation that comes with the line
            raise asyncio.CancelledError
        return line

    # --- the first agent ----------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Be the first agent, to which the others connect."""
        self._loop = asyncio.get_running_loop()
        asyncio.get_running_loop().set_exception_handler(self._warn_once)
        # all interfaces, as torch's store: which one the other pods can reach is not known here
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual)
        # asyncio tries to accept as many connections at once as the backlog has room for, also after a refusal
        server = await asyncio.start_server(self._welcome, sock=listener, limit=_LONGEST_LINE, backlog=1)
        listener.listen(_BACKLOG)
        try:
            where = {"port": listener.getsockname()[1], "secret": self._secret}
            self._store.clone().set(_KEY, json.dumps(where))
            await asyncio.Event().wait()
        finally:
            server.close()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hold the connection of an agent, whose greeting has the secret from the store; close a stranger's."""
        answer = json.dumps({"node": self._node}).encode() + b"\n"
        with contextlib.closing(writer):
            try:
                greeting = parse_json(await self._line(reader, time_limits.RECONNECT_TIMEOUT_SECONDS))
                if not secrets.compare_digest(greeting["secret"], self._secret):
                    raise ValueError("the secret is wrong")  # noqa: TRY301 - one way to refuse
                group_rank, node = int(greeting["group_rank"]), str(greeting["node"])
                writer.write(answer)
            except asyncio.CancelledError:
                writer.write(answer + _FAREWELL)  # an agent that connects again would take this end for dead
                raise
            except (OSError, asyncio.TimeoutError, ValueError, KeyError, TypeError) as error:
                logger.debug("dropped a connection that is not an agent's: %s", error)
                return
            self._latest[group_rank] = writer
            if await _breaks(reader, writer, partial(self.told.__setitem__, group_rank)):
                await asyncio.sleep(time_limits.RECONNECT_TIMEOUT_SECONDS)
                # the old connection's end may be read after the new one was accepted
                if self._latest[group_rank] is writer:
                    self._on_death(group_rank, node)

    def _warn_once(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log that the system refuses a connection, once: asyncio tries again every second."""
        error = context.get("exception")
        if self._ended.done():
            return  # asyncio's next try finds the listener closed
        if not isinstance(error, OSError):
            loop.default_exception_handler(context)
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the first agent cannot take the connection of another agent (%s); it tries again every second. "
                "Raise the limit of open files (ulimit -n): the agent needs one for each node",
                error,
            )

    # --- the other agents ---------------------------------------------------------------------------------------

    async def _connect_to_first(self) -> None:
        """Be one of the other agents."""
        try:
            where = await self._first_address()
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            logger.debug("cannot ask the store for the first agent's port: %s", error)
            return
        if where is None:
            return
        first = ""
        deadline = time.monotonic() + time_limits.FIRST_AGENT_PORT_TIMEOUT_SECONDS
        while True:
            connected = await self._connect(
                where, time_limits.RECONNECT_TIMEOUT_SECONDS if first else time_limits.PEER_CONNECT_TIMEOUT_SECONDS
            )
            if connected is not None:
                reader, writer, first = connected
                self.lost_first = ""
                if not await _breaks(reader, writer, partial(self._answer, writer)):
                    return
                self.lost_first = first
            elif first or time.monotonic() > deadline:
                break
            else:
                await asyncio.sleep(
                    time_limits.PEER_CONNECT_TIMEOUT_SECONDS
                )  # a thousand nodes may wait for one that is frozen
        if first:
            self._on_death(0, first)
        else:
            logger.info("no connection to the first agent; if it is killed, this node detects it late")

    def _answer(self, writer: asyncio.StreamWriter, line: bytes) -> None:
        if line == _QUESTION:
            writer.write(self.state()[: _LONGEST_LINE // 2] + b"\n")

    async def _first_address(self) -> dict[str, Any] | None:
        store = self._store.clone()
        deadline = time.monotonic() + time_limits.FIRST_AGENT_PORT_TIMEOUT_SECONDS
        pause: float = time_limits.CONNECT_BACKOFF_SECONDS
        while time.monotonic() < deadline:
            if store.check([_KEY]):
                address: dict[str, Any] = json.loads(store.get(_KEY))
                return address
            await asyncio.sleep(pause)
            pause = min(2 * pause, time_limits.MAX_CONNECT_BACKOFF_SECONDS)
        return None

    async def _connect(
        self, where: dict[str, Any], seconds: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str] | None:
        """Return a connection to the first agent, and the name of its node; None if there is none in time."""
        deadline = time.monotonic() + seconds
        pause: float = time_limits.CONNECT_BACKOFF_SECONDS
        greeting = {"secret": where["secret"], "group_rank": self._group_rank, "node": self._node}
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(OSError, asyncio.TimeoutError, ValueError, KeyError, TypeError):
                # it blocks this thread, which has nothing else to do; asyncio would ask the name service in another one
                connection = socket.create_connection((self._first_host, where["port"]), left)
                if connection.getsockname() == connection.getpeername():
                    connection.close()
                    continue  # a TCP self-connection: the kernel chose the freed port for this end
                reader, writer = await asyncio.open_connection(sock=connection, limit=_LONGEST_LINE)
                try:
                    writer.write(json.dumps(greeting).encode() + b"\n")
                    node = str(parse_json(await self._line(reader, left))["node"])
                except BaseException:
                    # the first agent may know this one already, or read the greeting when it is no longer frozen
                    writer.write(_FAREWELL)
                    writer.close()
                    raise
                return reader, writer, node
            await asyncio.sleep(pause)
            pause *= 2
        return None


async def _breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hear: Callable[[bytes], None]) -> bool:
    """Wait for the end of a connection, and pass on its lines; return whether it broke without a farewell."""
    connection = writer.get_extra_info("socket")
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        while line := await reader.readline():
            if line == _FAREWELL:
                return False
            hear(line)
    except asyncio.CancelledError:
        writer.write(_FAREWELL)  # this end leaves
        raise
    except (OSError, ValueError):
        pass  # ValueError: the line is too long
    finally:
        writer.close()
    return True
