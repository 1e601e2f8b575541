"""Unblocks a rank whose collectives wait for ranks that are gone."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from firstfault_torch.budgets import NCCL_ABORT_S
from firstfault_torch.compat.gloo_connections import shut_down_gloo_connections
from firstfault_torch.compat.torch_worker import backends_that_abort, forget_process_groups
from firstfault_torch.guard import bounded, guarded
from firstfault_torch.inprocess.compose import Hook
from firstfault_torch.inprocess.exception import TimeoutError  # noqa: A004 - NVRx's name

if TYPE_CHECKING:
    from collections.abc import Callable

    from firstfault_torch.inprocess.state import State


class Abort(Hook):
    """What a thread of every rank does when the iteration is interrupted, while the main thread may be blocked."""


class AbortTorchDistributed(Abort):
    """Makes the collectives of all process groups fail.

    NCCL's communicators are aborted. gloo has no call for that, so its connections to other ranks are shut down, never
    the socket on which it listens.
    """

    def __call__(self, state: State) -> State:
        """Abort; the main thread destroys the groups when it has left the function."""
        if dist.is_available() and dist.is_initialized():
            aborts = [threading.Thread(target=_quietly, args=(abort,), daemon=True) for abort in backends_that_abort()]
            for thread in aborts:
                thread.start()
            with guarded("shutting down gloo's connections"):
                shut_down_gloo_connections()
            deadline = time.monotonic() + NCCL_ABORT_S
            for thread in aborts:
                thread.join(max(deadline - time.monotonic(), 0))
        return state


def _quietly(abort: Callable[[], None]) -> None:
    with guarded("aborting NCCL's communicators"):
        abort()


class Connections:
    """Connections to a store, each with the socket that torch does not show, so that a wait on it can be ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[tuple[int, int]] = []

    def open(self, connect: Callable[[], Any], port: int | None) -> Any:
        """Return what `connect` returns, and remember the sockets that it opened.

        Args:
            connect: makes the connection.
            port: of the store; sockets of other threads lead elsewhere. None: not known.
        """
        with self._lock:
            before = open_sockets()
            connection = connect()
            self._sockets += [item for item in open_sockets() - before if port is None or _leads_to(item[0], port)]
        return connection

    def shut_down(self) -> None:
        """End all connections: whatever waits on one of them raises."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        open_now = open_sockets()
        for number, inode in sockets:
            if (number, inode) in open_now:
                with guarded("ending a wait for the store"), socket.socket(fileno=os.dup(number)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


def _leads_to(number: int, port: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(number)) as connection:
            return bool(connection.getpeername()[1] == port)
    except (OSError, IndexError):
        return False


def open_sockets() -> set[tuple[int, int]]:
    """Return file descriptor and inode of each socket of this process."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        try:
            target = str(file.readlink())
        except OSError:
            continue  # closed since, or the listing's own
        if target.startswith("socket:["):
            found.add((int(file.name), int(target[8:-1])))
    return found


def destroy_process_groups(seconds: float) -> None:
    """Destroy all process groups.

    Raises:
        firstfault_torch.inprocess.exception.TimeoutError: that took longer than `seconds`.
    """
    if not dist.is_available():
        return
    if dist.is_initialized():
        bounded(dist.destroy_process_group, seconds, "destroying the process groups")
        if dist.is_initialized():
            raise TimeoutError(f"the process groups could not be destroyed within {seconds:g} s (soft_timeout)")
    with guarded("forgetting process groups"):
        forget_process_groups()
