"""The calls of a monitor process to the store, which may be slow, frozen or lost."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from firstfault_inprocess.detached import log_error
from firstfault_torch import time_limits
from firstfault_torch.guard import try_call


class StoreCalls:
    """Calls to the store, one after another, each within a time limit.

    A store that is lost or frozen must not keep the worker from being killed, so a thread makes the
    calls. The store's thread is also slow, because it resolves the address of each client: torch's
    libuv store waits for the name service then. `connect` returns a connection to the store.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._connection: Any = None
        self._thread: _StoreThread | None = None
        self._limits = 0.0

    def take_limits(self) -> float:
        """Return how many seconds the calls since the last question may have taken."""
        limits, self._limits = self._limits, 0.0
        return limits

    @property
    def connection(self) -> Any:
        """The connection to the store, opened if there is none; only for a call in progress."""
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def forget(self) -> None:
        """Use neither connection nor thread: after a fork they are the parent's."""
        self._connection = self._thread = None

    def make(self, call: Callable[[], None], *, patient: bool = False) -> bool:
        """Make a call that needs the store; return whether it succeeded, or may still succeed.

        If `patient`, wait for the call before, which may take long.
        """
        usual, long = (
            time_limits.MONITOR_STORE_TIMEOUT_SECONDS,
            time_limits.MONITOR_REPORT_TIMEOUT_SECONDS,
        )
        self._limits += long if patient else usual
        # An earlier call may still be in C++ on this connection, which only one thread may use at a
        # time.
        if self._thread is not None and not self._thread.idle.wait(long if patient else 0):
            if not patient:
                return False
            self._connection = None  # it may wait for ever on that one
            self._thread.end()
            self._thread = None
        # One thread for all calls, not one for each: heartbeats continue while the system allows no
        # further thread.
        if self._thread is None:
            with contextlib.suppress(RuntimeError, MemoryError):
                self._thread = _StoreThread()
        # Set by the thread. If the wait below times out first, a call that fails later has counted
        # as a success.
        failed = threading.Event()

        def run() -> None:
            _, error = try_call(call, Exception)
            if error is not None:  # the worker notices a lost store without help
                failed.set()
                self._connection = None
                log_error(error)

        if self._thread is None:
            # There was never a thread. A store that blocks then delays the end of a worker that
            # hangs, which does less harm than no heartbeats.
            run()
        else:
            self._thread.begin(run)
            self._thread.idle.wait(long if patient else usual)
        return not failed.is_set()


class _StoreThread:
    """A thread of the monitor process that makes one call after another.

    Raises:
        RuntimeError, MemoryError: the system allows no further thread.
    """

    def __init__(self) -> None:
        self.idle = threading.Event()
        """Set while no call is in progress."""
        self.idle.set()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="firstfault-store", daemon=True).start()

    def begin(self, call: Callable[[], None]) -> None:
        """Begin a call, which must not raise; the one before must have ended."""
        self.idle.clear()
        self._calls.put(call)

    def end(self) -> None:
        """Let the thread end, after a call in progress."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self.idle.set()
