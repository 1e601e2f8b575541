"""How the ranks of a call find their store: torch elastic's agent hosts it, or a process beside the first rank does."""

from __future__ import annotations

import datetime as dt
import os
import socket
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from firstfault_torch.budgets import MEETING_END_S, MEETING_S, OUTCOME_LOOK_S
from firstfault_torch.guard import logger
from firstfault_torch.inprocess.exception import InternalError, RestartError
from firstfault_torch.inprocess.monitor.process import OVER, host_store
from firstfault_torch.inprocess.store import AGENT_STORE, TCPStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from firstfault_torch.inprocess.options import InProcessRestart

__all__ = ["Meeting"]

_TIMEOUT = dt.timedelta(seconds=MEETING_S)
"""Of a store's operations, as torch has it."""
_SHORT = dt.timedelta(seconds=MEETING_END_S)
"""Longest wait for a store that may be about to end."""
_ENDED = "the store at {} is that of a job that has ended, or of another job"
_LOST = (dist.DistNetworkError, dist.DistStoreError)


class Meeting:
    """The store of one call. The first rank hosts it, unless the agent does, or another store is at its address.

    A job that has just ended may still have a store at the same address. Each rank counts itself in the store; one that
    was counted before is in another job's, and waits until that store is gone.

    Args:
        options: of the restart.
        rank: this one's.
        prefix: of the call.

    Raises:
        firstfault_torch.inprocess.exception.RestartError: it is not said where to meet, or another job's store stays
            there longer than `barrier_timeout`.
    """

    def __init__(self, options: InProcessRestart, rank: int, prefix: str) -> None:
        self._began = f"{prefix}/began/{rank}"
        self._seconds = options.seconds("barrier_timeout")
        self._is_users = options.store_factory is not None
        if options.store_factory is not None:
            self.connect: Callable[..., Any] = partial(options.store_factory, **options.store_kwargs)
            return
        given = dict(options.store_kwargs)
        host = str(given.pop("host_name", None) or os.environ.get("MASTER_ADDR") or "")
        port = int(given.pop("port", None) or os.environ.get("MASTER_PORT") or 0)
        if not host or not port:
            raise RestartError(
                "MASTER_ADDR and MASTER_PORT, or host_name and port in store_kwargs, must say where to meet"
            )
        self._address = (host, port)
        self._timeout = given.pop("timeout", _TIMEOUT)
        self._open = partial(TCPStore, host, port, **given)
        self.connect = partial(self._open, timeout=self._timeout)
        is_agents = os.environ.get(AGENT_STORE) == "True" and "port" not in options.store_kwargs
        if rank == 0 and not is_agents:
            self._host()

    def _host(self) -> None:
        """Host the store, if need be when that of an earlier job is gone; leave it to another that is there."""
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                host_store(partial(self.connect, is_master=True), self._address)
            except InternalError as error:
                if self._is_other_there():
                    logger.info("%s; using the store that is there", error)
                    return
                if time.monotonic() > deadline:
                    raise RestartError(_ENDED.format(self._name())) from error
                time.sleep(OUTCOME_LOOK_S)
            else:
                return

    def _is_other_there(self) -> bool:
        """Whether a store is there that is not one of an earlier job."""
        try:
            socket.create_connection(self._address, timeout=1).close()  # torch would try again for seconds
            store = self._open(timeout=_SHORT)
            return not store.check([OVER]) and not store.check([self._began])
        except (OSError, *_LOST):
            return False  # it has ended in between

    def begin(self) -> Any:
        """Return a connection to this job's store."""
        if self._is_users:
            return self.connect()
        deadline = time.monotonic() + self._seconds
        while True:
            left = dt.timedelta(seconds=max(deadline - time.monotonic(), _SHORT.total_seconds()))
            try:
                store = self._open(timeout=min(left, self._timeout))
                if not store.check([OVER]) and store.add(self._began, 1) == 1:
                    store.set_timeout(self._timeout)
                    return store
                del store
                error: Exception | None = None
            except _LOST as lost:
                error = lost  # it has ended in between, or is not there yet
            if time.monotonic() > deadline:
                if error is not None:
                    raise error
                raise RestartError(_ENDED.format(self._name()))
            time.sleep(OUTCOME_LOOK_S)

    def _name(self) -> str:
        return "{}:{}".format(*self._address)
