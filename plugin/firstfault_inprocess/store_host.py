"""How the ranks of a call find their store: torch elastic's agent hosts it,
or a process that the first rank starts.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from firstfault_inprocess.detached import DetachedProcess, start_detached
from firstfault_inprocess.exception import InternalError, RestartError
from firstfault_inprocess.options import InProcessOptions
from firstfault_inprocess.store import AGENT_STORE_VARIABLE, TCPStore
from firstfault_torch import time_limits
from firstfault_torch.guard import logger, suppress_internal_errors, try_call

_OPERATION_TIMEOUT = dt.timedelta(seconds=time_limits.STORE_OPERATION_TIMEOUT_SECONDS)
"""torch's own default for a store's operations."""
_ENDING_STORE_TIMEOUT = dt.timedelta(seconds=time_limits.ENDING_STORE_TIMEOUT_SECONDS)
"""Longest wait for a store that may be about to end."""
_STALE_STORE_MESSAGE = "the store at {}:{} is that of a job that has ended, or of another job"
_STORE_ERRORS = (dist.DistNetworkError, dist.DistStoreError)
_NO_NEW_CALLS_KEY = "firstfault/inprocess/over"
"""Set in a store when its first rank has ended:
no further call may begin there. A rank that finds it waits.
"""
_QUIET_CHECKS_BEFORE_EXIT = 3
"""Checks in a row without a connection, after which the store's host ends."""
_TCP_ESTABLISHED = "01"
_hosted_addresses: set[tuple[str, int]] = set()
"""Addresses of the stores that processes started by this one host."""


class StoreHost:
    """The store of one call. The first rank hosts it, unless the agent does,
    or another store is at its address.

    A job that has just ended may still have a store at the same address. Each rank counts itself in
    the store; one that was counted before is in another job's, and waits until that store is gone.

    Raises:
        firstfault_inprocess.exception.RestartError: no address is configured, or another job's
            store stays there longer than `barrier_timeout`.
    """

    def __init__(self, options: InProcessOptions, rank: int, prefix: str) -> None:
        self._began = f"{prefix}/began/{rank}"
        self._seconds = options.seconds("barrier_timeout")
        given = dict(options.store_kwargs or {})
        factory = options.store_factory
        self._is_users = factory is not None and factory is not TCPStore
        if factory is not None and self._is_users:
            self.connect: Callable[..., Any] = partial(factory, **given)
            return
        is_agents = os.environ.get(AGENT_STORE_VARIABLE) == "True" and "port" not in given
        host = str(given.pop("host_name", None) or os.environ.get("MASTER_ADDR") or "")
        port = int(given.pop("port", None) or os.environ.get("MASTER_PORT") or 0)
        if not host or not port:
            raise RestartError(
                "set MASTER_ADDR and MASTER_PORT, or host_name and port in store_kwargs"
            )
        self._address = (host, port)
        self._timeout = given.pop("timeout", _OPERATION_TIMEOUT)
        self._open = partial(TCPStore, host, port, **given)
        self.connect = partial(self._open, timeout=self._timeout)
        # Only the first rank hosts. A further call in the same process uses the store of the call
        # before.
        if rank == 0 and not is_agents and self._address not in _hosted_addresses:
            self._host()

    def _host(self) -> None:
        """Start the store's host, if need be when that of an earlier job is gone;
        leave it to another that is there.
        """
        host = _HostProcess(partial(self.connect, is_master=True), self._address[1])
        name = f"the process that hosts the store at port {self._address[1]}"
        deadline = time.monotonic() + self._seconds
        while True:
            # If the port is taken, the host's process reports the error of bind() and ends.
            try:
                start_detached(host.begin, host.serve_until_unused, name, None)
            except InternalError as error:
                # The port is taken. By a live store: use that. By the store of an ended job, which
                # stays as long as it has clients: try again.
                if self._has_live_store():
                    logger.info("%s; using the store that is there", error)
                    return
                if time.monotonic() > deadline:
                    raise RestartError(_STALE_STORE_MESSAGE.format(*self._address)) from error
                time.sleep(time_limits.SIGNAL_HANDLER_INTERVAL_SECONDS)
            else:
                _hosted_addresses.add(self._address)
                return

    def _has_live_store(self) -> bool:
        """Whether a store is there that isn't one of an earlier job."""
        try:
            socket.create_connection(
                self._address, timeout=1
            ).close()  # torch would try again for seconds
            store = self._open(timeout=_ENDING_STORE_TIMEOUT)
            return not store.check([_NO_NEW_CALLS_KEY]) and not store.check([self._began])
        except (OSError, *_STORE_ERRORS):
            return False  # it has ended in between

    def begin(self) -> Any:
        """Return a connection to this job's store."""
        if self._is_users:
            return self.connect()
        deadline = time.monotonic() + self._seconds
        while True:
            left = dt.timedelta(
                seconds=max(deadline - time.monotonic(), _ENDING_STORE_TIMEOUT.total_seconds())
            )
            try:
                store = self._open(timeout=min(left, self._timeout))
                # No new calls: its host's worker has ended. A count above 1: a rank with this
                # number began the same call before, so the store is another job's; both jobs use
                # the same keys.
                if not store.check([_NO_NEW_CALLS_KEY]) and store.add(self._began, 1) == 1:
                    store.set_timeout(self._timeout)
                    return store
                del store
                # The connection must not stay open during the pause: the old host stays as long as
                # it has clients.
                error: Exception = RestartError(_STALE_STORE_MESSAGE.format(*self._address))
            except _STORE_ERRORS as lost:
                error = lost  # it has ended in between, or isn't there yet
            if time.monotonic() > deadline:
                raise error
            time.sleep(time_limits.SIGNAL_HANDLER_INTERVAL_SECONDS)


class _HostProcess:
    """A process that hosts a store, and outlives the one that started it as long as
    anything is connected to it.
    """

    def __init__(self, create: Callable[[], Any], port: int) -> None:
        self._worker = os.getpid()
        self._create = create
        self._port = port

    def begin(self) -> None:
        """Host the store."""
        self._process = DetachedProcess(self._worker)
        # torch's store resolves the address of each client in the thread that serves all others
        os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
        # In the detached process: the store ends with it, not with the worker that started it.
        self._server = self._create()

    def serve_until_unused(self) -> None:
        """Stay while the worker lives, and then while others are connected."""
        while not self._process.await_death(time_limits.MONITOR_LINGER_SECONDS):
            pass
        # Before looking for clients: a rank of the next job that connects from now on doesn't begin
        # its call here.
        self._server.set(_NO_NEW_CALLS_KEY, "1")
        before: set[str] = set()
        quiet = 0
        # Ranks of this job may still settle who continues. A connection counts if two checks
        # in a row see it, so the first check always counts as quiet, and several are needed.
        while quiet < _QUIET_CHECKS_BEFORE_EXIT:
            # If they can't be listed, such as for want of a descriptor, they may still exist.
            now, _ = try_call(self._list_client_ports, Exception)
            # ranks of the next job connect again and again, and leave
            is_quiet = now is not None and not now & before
            quiet = quiet + 1 if is_quiet else 0
            before = now or set()
            time.sleep(time_limits.SIGNAL_HANDLER_INTERVAL_SECONDS)

    def _list_client_ports(self) -> set[str]:
        """Return the ports of other processes' connections to the store;
        torch's store connects to itself.
        """
        wanted = f"{self._port:04X}"
        served: set[str] = set()
        own: set[str] = set()
        # On one host both ends of a connection are listed. torch's server also has a client: its
        # port is found by the inode of this process's sockets.
        inodes = {str(inode) for _, inode in list_open_sockets()}
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                    _, local, remote, state, _, _, _, _, _, inode, *_ = line.split()
                    here = local.rpartition(":")[2]
                    there = remote.rpartition(":")[2]
                    if state == _TCP_ESTABLISHED and here == wanted:
                        served.add(there)
                    elif there == wanted and inode in inodes:
                        own.add(here)
        return served - own


class StoreConnections:
    """Connections to a store, each with the socket that torch doesn't show,
    so that a wait on it can be ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[tuple[int, int]] = []

    def open(self, connect: Callable[[], Any], port: int | None) -> Any:
        """Return what `connect` returns, and remember the sockets that it opened.

        Sockets that other threads open in the same moment lead to another port than the store's, if
        that is known.
        """
        with self._lock:
            # torch keeps its sockets in C++ without an accessor, so they are found as the
            # difference of two listings.
            before = list_open_sockets()
            connection = connect()
            for item in list_open_sockets() - before:
                # A duplicate: closing torch's own descriptor here would let the kernel reuse the
                # number while torch writes to it.
                with (
                    contextlib.suppress(OSError, IndexError),
                    socket.socket(fileno=os.dup(item[0])) as opened,
                ):
                    if port is None or opened.getpeername()[1] == port:
                        self._sockets.append(item)
        return connection

    def shut_down(self) -> None:
        """End all connections: whatever waits on one of them raises."""
        with self._lock:
            # Called by the monitor thread and by the main thread: each socket is shut down once.
            sockets, self._sockets = self._sockets, []
        open_now = list_open_sockets()
        for number, inode in sockets:
            # The number may belong to another file since: the inode identifies the socket.
            if (number, inode) in open_now:
                doing = "ending a wait for the store"
                with (
                    suppress_internal_errors(doing),
                    socket.socket(fileno=os.dup(number)) as connection,
                ):
                    # shutdown() acts on the connection itself, so torch's blocked read on the
                    # original descriptor ends, too.
                    connection.shutdown(socket.SHUT_RDWR)


def list_open_sockets() -> set[tuple[int, int]]:
    """Return file descriptor and inode of each socket of this process."""
    sockets = set()
    for file in Path("/proc/self/fd").iterdir():
        try:
            target = str(file.readlink())
        except OSError:
            continue  # closed since, or the listing's own
        if target.startswith("socket:["):
            sockets.add((int(file.name), int(target[8:-1])))
    return sockets
