"""The two threads beside each rank's main thread: one notes its progress, one interrupts it in the function.

`MonitorThread` waits for the end of the iteration, then interrupts. It also reports where the main thread is: the
positions of all ranks show which one hangs.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from firstfault_torch.budgets import MONITOR_CLOSING_S
from firstfault_torch.guard import guarded, logger
from firstfault_torch.inprocess.exception import RankShouldRestart
from firstfault_torch.inprocess.store import Iteration, Outcome, Position

if TYPE_CHECKING:
    from types import FrameType

    from firstfault_torch.inprocess.monitor_process import Progress
    from firstfault_torch.inprocess.options import InProcessOptions

_FOREVER = dt.timedelta(days=30)
"""Longer than any iteration: each ends with an outcome, or with the store."""
_COLLECTIVES = "torch.distributed"
_INSTALLED = ("/site-packages/", "/dist-packages/", sysconfig.get_path("stdlib"), "<frozen")
_LENGTH = 200
_kept: list[object] = []
"""Memory into which a call that Python has not made yet may still write; a few dozen bytes each."""
_SEMAPHORE_SIZE = 64
"""Bytes, at least those of a ``sem_t``: 32 on 64-bit Linux."""

_libc = ctypes.CDLL(None)
_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_add_pending_call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_add_pending_call.restype = ctypes.c_int
_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_exception.restype = ctypes.c_int


class MonitorThread:
    """Waits for the outcome of one iteration.

    When the iteration is interrupted it waits for `last_call_wait`, aborts the collectives, and raises
    RankShouldRestart in the thread that made it, again and again until that has left the function.

    Args:
        iteration: over a connection of its own.
        progress: it writes there when it learned of the interruption.
        abort: unblocks the main thread.
        options: of the restart; it waits `last_call_wait` before it aborts, and `monitor_thread_interval` between two
            tries to get the main thread out of the function, whose code may catch everything.
        atomic: held while the program must not be interrupted.
    """

    def __init__(
        self,
        iteration: Iteration,
        progress: Progress,
        abort: Callable[[], Any],
        options: InProcessOptions,
        atomic: threading.RLock,
    ) -> None:
        self._iteration = iteration
        self._progress = progress
        self._abort = abort
        self._last_call_wait = options.seconds("last_call_wait")
        self._interval = options.seconds("monitor_thread_interval")
        self._atomic = atomic
        self._main = threading.get_ident()
        self._lock = threading.Lock()
        self._may_raise = False
        self._left = threading.Event()
        self.outcome: Outcome | None = None
        """How the iteration ended; None while it has not."""
        self.known = threading.Event()
        """Set when the outcome is known."""
        self.aborted = threading.Event()
        """Set when nothing is left to abort."""
        self._thread = threading.Thread(target=self._run, name="firstfault-restart", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with guarded("watching an iteration"):
            try:
                self.outcome = self._iteration.await_outcome(_FOREVER)
            except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
                logger.warning("lost the store of the in-process restart: %s", str(error).partition("\n")[0])
                self.outcome = Outcome.LOST
            if self.outcome is not Outcome.COMPLETED:
                self._progress.interrupted = time.monotonic()
            self.known.set()
            if self.outcome is not Outcome.COMPLETED:
                self._interrupt()
        self.known.set()
        self.aborted.set()

    def _interrupt(self) -> None:
        time.sleep(self._last_call_wait)
        is_held = False
        while not is_held and not self._left.is_set():
            is_held = self._atomic.acquire(timeout=self._interval)
        try:
            with guarded("aborting the collectives"):
                self._abort()
            self.aborted.set()
            while not self._left.is_set():
                with self._lock:
                    if self._may_raise:
                        _set_exception(self._main, RankShouldRestart)
                self._left.wait(self._interval)
        finally:
            if is_held:
                self._atomic.release()

    def begin(self) -> None:
        """Allow the interruption of the main thread; call it there, where RankShouldRestart is handled."""
        self._may_raise = True

    def let_go(self) -> None:
        """Raise nothing in the main thread from now on; call it there, until it returns."""
        self._may_raise = False
        with self._lock:
            self._may_raise = False
            _set_exception(self._main, ctypes.py_object())
        self._left.set()

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end; False if it still runs."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Hold the connection no longer, if the thread has ended."""
        if self.join(MONITOR_CLOSING_S):
            self._iteration.close()
            self._abort = lambda: None


class Stamping:
    """A thread that finds out, now and then, whether the main thread executes Python code.

    It asks Python to make a call of C in the main thread, between two instructions of the program: ``sem_post``, which
    returns 0 as Python wants it. A main thread that is inside one call of C, such as a collective or a sleep, makes
    none.
    """

    def __init__(self, progress: Progress, interval: float) -> None:
        self._progress = progress
        self._interval = interval
        self._semaphore = ctypes.create_string_buffer(_SEMAPHORE_SIZE)
        _kept.append(self._semaphore)
        _libc.sem_init(self._semaphore, 0, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="firstfault-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        is_asked = False
        while not self._ended.wait(self._interval):
            if is_asked and _libc.sem_trywait(self._semaphore) == 0:
                self._progress.automatic = time.monotonic()
                is_asked = False
            if not is_asked:
                is_asked = _add_pending_call(_libc.sem_post, self._semaphore) == 0

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()


def position_of(thread: int, begun: int | None = None) -> Position | None:
    """Return where a thread of this process stands, with the collectives that it has begun; None if it has ended."""
    frame: FrameType | None = sys._current_frames().get(thread)  # noqa: SLF001 - documented, for debuggers and the like
    if frame is None:
        return None
    waits, called, innermost = False, "", frame
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        waits = waits or module == _COLLECTIVES or module.startswith(_COLLECTIVES + ".")
        if not any(part in frame.f_code.co_filename for part in _INSTALLED):
            return Position(_line(frame, called), waits, begun)
        called = f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return Position(_line(innermost, ""), waits, begun)


def _line(frame: Any, called: str) -> str:
    code = frame.f_code
    text = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
    return (f"{text}, which calls {called}" if called else text)[:_LENGTH]
