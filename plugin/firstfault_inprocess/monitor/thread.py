"""The thread that interrupts the main thread when an iteration has ended with a fault,
and the call that it may interrupt.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from firstfault_inprocess.exception import RankShouldRestart
from firstfault_inprocess.options import InProcessOptions
from firstfault_inprocess.progress import SharedProgress, find_position
from firstfault_inprocess.store import Iteration, IterationEnd
from firstfault_torch import time_limits
from firstfault_torch.guard import (
    iter_chain,
    logger,
    start_daemon,
    start_in_thread,
    suppress_internal_errors,
)

_MAX_ITERATION_DURATION = dt.timedelta(days=30)
"""Longer than any iteration: each ends with an outcome, or with the store."""
_MAX_JUMPS = 1000
_STUCK_MESSAGE = (
    "in-process restart: this rank is still at %s, after %s; "
    "if it has not left the function within %g s (hard_timeout), its monitor process ends it"
)

_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_exception.restype = ctypes.c_int


class MonitorThread:
    """Waits for the outcome of one iteration.

        waiting     COMPLETED: the thread ends; INTERRUPTED or LOST: `known` is set -> last call
        last call   waits for `last_call_wait`, then for the end of an `atomic` block -> aborting
        aborting    `abort` unblocks the main thread; `aborted` is set -> raising
        raising     RankShouldRestart in the thread that made it, every `monitor_thread_interval`,
                    because its code may catch any exception; `call` ends there -> the thread ends

    The iteration has a connection of this thread only. `progress` gets the time of the
    interruption.
    """

    def __init__(
        self,
        iteration: Iteration,
        progress: SharedProgress,
        abort: Callable[[], Any],
        options: InProcessOptions,
        atomic: threading.RLock,
    ) -> None:
        self._iteration = iteration
        self._progress = progress
        self._abort = abort
        self._last_call_wait = options.seconds("last_call_wait")
        self._interval = options.seconds("monitor_thread_interval")
        self._soft_timeout = options.seconds("soft_timeout")
        self._hard_timeout = options.seconds("hard_timeout")
        self._atomic = atomic
        self._main = threading.get_ident()
        self._lock = threading.Lock()
        self._may_raise = False
        self._has_raised = False
        self._left = threading.Event()
        self.outcome: IterationEnd | None = None
        """How the iteration ended, or None while it runs."""
        self.known = threading.Event()
        """Set when the outcome is known."""
        self.aborted = threading.Event()
        """Set when nothing is left to abort."""
        patience = time_limits.RESOURCE_SHORTAGE_TIMEOUT_SECONDS
        self._thread = start_daemon(self._run, "firstfault-restart", patience)

    def _run(self) -> None:
        with suppress_internal_errors("watching an iteration"):
            try:
                self.outcome = self._iteration.await_outcome(_MAX_ITERATION_DURATION)
            # Without the store this rank can't learn who continues: the main thread raises
            # RestartAbort.
            except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
                logger.warning(
                    "lost the store of the in-process restart: %s", str(error).partition("\n")[0]
                )
                self.outcome = IterationEnd.LOST
            # Before `known`: the main thread reads the time as soon as `known` wakes it.
            if self.outcome is not IterationEnd.COMPLETED:
                self._progress.interrupted = time.monotonic()
            self.known.set()
            if self.outcome is not IterationEnd.COMPLETED:
                self._interrupt()
        # Also after an internal error above: the main thread waits for both events.
        self.known.set()
        self.aborted.set()

    def _interrupt(self) -> None:
        # One cause often makes several ranks raise within milliseconds. After the abort an
        # exception may be its effect, so let these ranks report first.
        time.sleep(self._last_call_wait)
        is_held = False
        # An `atomic` block delays the abort, too, so that its collectives aren't aborted. Short
        # waits: the lock isn't needed once the main thread has left the function.
        while not is_held and not self._left.is_set():
            is_held = self._atomic.acquire(timeout=self._interval)
        try:
            # First the abort, then the exception: Python raises it only when the main thread runs
            # bytecode again, and a collective or a wait for the store keeps that thread in C++.
            with suppress_internal_errors("aborting the collectives"):
                self._abort()
            self.aborted.set()
            late = time.monotonic() + (self._hard_timeout - self._soft_timeout) / 2
            while not self._left.is_set():
                if time.monotonic() > late:
                    late = float("inf")
                    # in a separate thread: the main thread may hold a log's lock
                    start_in_thread(self._log_stuck_main_thread, "reporting that a rank stays")
                # `_stop_raising` clears the flag under the same lock: after that no exception is
                # set any more. The exception is set again in each round, because the program may
                # have caught the last one.
                with self._lock:
                    if self._may_raise:
                        self._has_raised = True
                        _set_exception(self._main, RankShouldRestart)
                self._left.wait(self._interval)
        finally:
            if is_held:
                self._atomic.release()

    def _log_stuck_main_thread(self) -> None:
        """Log where the main thread is: if it doesn't leave,
        the monitor process ends this process from outside.
        """
        position = find_position(self._main)
        faults = "; ".join(map(str, self._iteration.faults()[:3]))
        logger.warning(_STUCK_MESSAGE, position and position.text, faults, self._hard_timeout)

    def call(self, function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Return what the function returns and None, or None and what it raised;
        call it in the main thread. Nothing is raised in this thread afterwards.

        RankShouldRestart may be raised between any two instructions, also of this function.
        """
        value, error, began = None, None, False
        while True:
            try:
                # Set before _begin(): after an interruption between _begin() and the call, the
                # function must not be started.
                if not began:
                    began = True
                    self._begin()
                    try:
                        value = function()
                    except BaseException as raised:  # noqa: BLE001 - judged by the caller
                        error = raised
                # An interruption may also hit here, or inside _stop_raising(), so this repeats
                # until it has returned.
                self._stop_raising()
            except RankShouldRestart as late:
                # The function's own exception counts. It is the context if the interruption came
                # before it was assigned above.
                error = next(one for one in (error, late.__context__, late) if one is not None)
            else:
                return (None, error) if error is not None else (value, None)

    def _begin(self) -> None:
        """Allow the interruption of the main thread; call it there,
        where RankShouldRestart is handled.
        """
        self._may_raise = True

    def _stop_raising(self) -> None:
        """Raise nothing in the main thread from now on; call it there, until it returns."""
        # First without the lock: from here the monitor thread sets at most one more exception, if
        # it has already read the flag.
        self._may_raise = False
        # With the lock: it has left its block. One exception may still be pending in this thread.
        # Python may raise it in any line of this method, so the caller catches it and calls again.
        with self._lock:
            self._may_raise = False
        # Whether the last exception was raised already or is still pending can't be read: so
        # another one replaces it and is caught here.
        if self._has_raised:
            _take_back()
        # Last, after the pending exception is gone: an interruption before this line lets the
        # caller repeat the method.
        self._left.set()

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end. Return False if it still runs."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Hold the connection no longer, if the thread has ended."""
        # A thread that still runs keeps the connection: it may be in a call on it.
        if self.join(time_limits.MONITOR_CLOSE_TIMEOUT_SECONDS):
            self._iteration.drop_connection()
            self._abort = lambda: None


def _take_back() -> None:
    """Leave no exception of another thread pending in this one.

    A new one takes the pending one's place and is caught here. To set none instead would remove the
    exception, but not Python's sign that there is one: with a debugger, a profiler or coverage,
    Python 3.11 would wait for it for ever.
    """
    with contextlib.suppress(RankShouldRestart):
        # CPython keeps one pending exception per thread: a second call replaces the first.
        _set_exception(threading.get_ident(), RankShouldRestart)
        for _ in range(_MAX_JUMPS):  # Python raises it at one of the next jumps
            pass


def find_own_error(error: BaseException | None, *, is_interrupted: bool) -> BaseException | None:
    """Return the function's own exception, or None if it was only interrupted.

    Code on the way out may make another exception of the interruption: asyncio's task groups an
    ExceptionGroup, a framework's ``except BaseException`` a SystemExit.
    """
    if isinstance(error, RankShouldRestart) or error is None:
        return None
    if isinstance(error, Exception):
        return error
    if isinstance(getattr(error, "exceptions", None), tuple):
        interruptions, others = error.split(RankShouldRestart)  # type: ignore[attr-defined]
        if interruptions is None:
            return error
        return None if is_interrupted else others
    return (
        None
        if is_interrupted and any(isinstance(one, RankShouldRestart) for one in iter_chain(error))
        else error
    )
