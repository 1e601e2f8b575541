"""Memory that a worker shares with its monitor process: where the worker is, and when it last made progress."""

from __future__ import annotations

import ctypes
import enum
import mmap
import struct
import threading
import time

__all__ = ["Phase", "Progress", "Stamping"]

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


class Progress:
    """What a worker writes and its monitor process reads, without a system call.

    Times are seconds of the monotonic clock; 0: none.
    """

    _LAYOUT = struct.Struct("=5d4q")
    """auto, manual, began, ended, spare; phase, iteration, rank, world size."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._LAYOUT.size)
        self._times = (ctypes.c_double * 5).from_buffer(self._memory)
        self._numbers = (ctypes.c_int64 * 4).from_buffer(self._memory, 5 * 8)

    def begin(self, iteration: int, rank: int, world_size: int) -> None:
        """Begin an iteration."""
        now = time.monotonic()
        self._times[:] = [now, 0.0, now, 0.0, 0.0]
        self._numbers[1:] = [iteration, rank, world_size]
        self._numbers[0] = Phase.RUNNING

    def ping(self) -> None:
        """Record that the program said that it makes progress."""
        self._times[1] = time.monotonic()

    def interrupt(self) -> None:
        """Record when the iteration was interrupted."""
        self._times[3] = time.monotonic()

    @property
    def automatic(self) -> float:
        """When the main thread last executed Python code."""
        return self._times[0]

    @property
    def manual(self) -> float:
        """When the program last called `ping` in this iteration."""
        return self._times[1]

    @property
    def interrupted(self) -> float:
        """When this worker learned that the iteration was interrupted."""
        return self._times[3]

    @property
    def phase(self) -> Phase:
        """Where the worker is."""
        return Phase(self._numbers[0])

    @phase.setter
    def phase(self, value: Phase) -> None:
        self._numbers[0] = value

    @property
    def iteration(self) -> int:
        """The iteration's number."""
        return self._numbers[1]

    @property
    def rank(self) -> int:
        """The worker's rank in this iteration."""
        return self._numbers[2]

    @property
    def world_size(self) -> int:
        """The iteration's."""
        return self._numbers[3]

    @property
    def stalled_seconds(self) -> float:
        """How long the worker has made no progress, by the clock that is further behind; 0 outside of the function."""
        if self.phase is not Phase.RUNNING:
            return 0.0
        times = [stamp for stamp in (self.automatic, self.manual) if stamp]
        return time.monotonic() - min(times) if times else 0.0

    @property
    def ending_seconds(self) -> float:
        """How long this worker has been on its way from an interrupted function to the barrier."""
        if self.phase not in {Phase.RUNNING, Phase.ENDING} or not self.interrupted:
            return 0.0
        return time.monotonic() - self.interrupted

    def stamp(self) -> None:
        """Record that the main thread executes Python code."""
        self._times[0] = time.monotonic()


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
                self._progress.stamp()
                is_asked = False
            if not is_asked:
                is_asked = _add_pending_call(_libc.sem_post, self._semaphore) == 0

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()
