"""Memory that a worker shares with its monitor process: where the worker is, and when it last made progress."""

from __future__ import annotations

import ctypes
import enum
import mmap
import threading
import time
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self

_kept: list[object] = []
"""Memory into which a call that Python has not made yet may still write; a few dozen bytes each."""
_SEMAPHORE_SIZE = 64
"""Bytes, at least those of a ``sem_t``: 32 on 64-bit Linux."""
_libc = ctypes.CDLL(None)
_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_add_pending_call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_add_pending_call.restype = ctypes.c_int


class Phase(enum.IntEnum):
    """Where a worker is within a call of the wrapped function."""

    IDLE = 0
    RUNNING = 1
    """In the wrapped function, or in a hook before it."""
    ENDING = 2
    """The iteration was interrupted, and the worker has not arrived at the barrier."""
    ARRIVED = 3
    COMPLETED = 4
    """The function has returned, and the worker waits for the others."""
    LEFT = 5
    """It takes part in no further iteration."""
    CLOSED = 6
    """The call is over."""


class Progress(ctypes.Structure):
    """What a worker writes and its monitor process reads, without a system call.

    Times are seconds of the monotonic clock; 0: none.
    """

    _fields_: ClassVar = [
        *((name, ctypes.c_double) for name in ("automatic", "manual", "interrupted")),
        *((name, ctypes.c_int64) for name in ("phase", "iteration", "rank", "world_size")),
    ]
    automatic: float
    """When the main thread last executed Python code."""
    manual: float
    """When the program last called `ping` in this iteration."""
    interrupted: float
    """When this worker learned that the iteration was interrupted."""
    phase: int
    """A `Phase`."""
    iteration: int
    rank: int
    """In this iteration."""
    world_size: int
    """Of this iteration."""

    def __new__(cls) -> Self:
        """Return a progress in memory that this process shares with those that it forks."""
        return cls.from_buffer(mmap.mmap(-1, ctypes.sizeof(cls)))

    def begin(self, iteration: int, rank: int, world_size: int) -> None:
        """Begin an iteration."""
        self.automatic, self.manual, self.interrupted = time.monotonic(), 0.0, 0.0
        self.iteration, self.rank, self.world_size = iteration, rank, world_size
        self.phase = Phase.RUNNING

    @property
    def stalled_seconds(self) -> float:
        """How long the worker has made no progress, by the clock that is further behind; 0 outside of the function."""
        if self.phase != Phase.RUNNING:
            return 0.0
        times = [stamp for stamp in (self.automatic, self.manual) if stamp]
        return time.monotonic() - min(times) if times else 0.0

    @property
    def ending_seconds(self) -> float:
        """How long this worker has been on its way from an interrupted function to the barrier."""
        if self.phase not in {Phase.RUNNING, Phase.ENDING} or not self.interrupted:
            return 0.0
        return time.monotonic() - self.interrupted


class Stamping:
    """A thread that finds out, now and then, whether the main thread executes Python code.

    It asks Python to make a call of C in the main thread, between two instructions of the program: ``sem_post``, which
    returns 0 as Python wants it. A main thread that is inside one call of C, such as a collective or a sleep, makes
    none.

    Args:
        progress: where it writes that it did.
        interval: seconds.
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
