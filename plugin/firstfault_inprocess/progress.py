"""What a rank and its monitor process share: the rank's phase, and when it last made progress."""

from __future__ import annotations

import ctypes
import enum
import mmap
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from typing_extensions import Self

from firstfault.utils.frames import get_current_frames
from firstfault_inprocess.store import Position
from firstfault_torch import time_limits
from firstfault_torch.guard import start_daemon

_COLLECTIVES_MODULE = "torch.distributed"
_LIBRARY_FOLDERS = ("/site-packages/", "/dist-packages/", sysconfig.get_path("stdlib"), "<frozen")
_MAX_LINE_CHARACTERS = 200
_leaked_semaphores: list[object] = []
"""Memory into which a call that Python hasn't made yet may still write; a few dozen bytes each."""
_SEMAPHORE_SIZE = 64
"""Bytes, at least those of a ``sem_t``: 32 on 64-bit Linux."""

_libc = ctypes.CDLL(None)
_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_add_pending_call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_add_pending_call.restype = ctypes.c_int


class RankPhase(enum.IntEnum):
    """Where a worker is within a call of the wrapped function."""

    IDLE = 0
    RUNNING = 1
    """In the wrapped function, or in a hook before it."""
    ENDING = 2
    """The iteration was interrupted, and the worker hasn't arrived at the barrier."""
    ARRIVED = 3
    COMPLETED = 4
    """The function has returned, and the worker waits for the remaining ranks."""
    LEFT = 5
    """It takes part in no further iteration."""
    CLOSED = 6
    """The call is over."""


class SharedProgress(ctypes.Structure):
    """What a worker writes and its monitor process reads, without a system call.

    Times are seconds of the monotonic clock, and 0 if there is none.
    """

    _fields_: ClassVar = [
        *((name, ctypes.c_double) for name in ("automatic", "manual", "interrupted")),
        *(
            (name, ctypes.c_int64)
            for name in ("phase", "iteration", "rank", "world_size", "unguarded")
        ),
        *((name, ctypes.c_int64) for name in ("monitor", "monitor_started")),
    ]
    automatic: float
    """When the main thread last executed Python code."""
    manual: float
    """When the program last called `ping` in this iteration."""
    interrupted: float
    """When this worker learned that the iteration was interrupted."""
    phase: int
    """A `RankPhase`."""
    iteration: int
    rank: int
    """In this iteration."""
    world_size: int
    """Of this iteration."""
    unguarded: int
    """Blocks, one in another, in which no time counts."""
    monitor: int
    """The process id of the monitor process, or 0 while there is none."""
    monitor_started: int
    """Its start time, as `detached.read_start_time` returns it."""

    def __new__(cls) -> Self:
        """Return a progress in memory that this process shares with its forked children."""
        return cls.from_buffer(mmap.mmap(-1, ctypes.sizeof(cls)))

    def begin(self, iteration: int, rank: int, world_size: int) -> None:
        """Begin an iteration."""
        self.automatic = time.monotonic()
        self.manual = 0.0
        self.interrupted = 0.0
        self.iteration, self.rank, self.world_size, self.unguarded = iteration, rank, world_size, 0
        # Last: the monitor process reads without a lock. RUNNING with the times of the iteration
        # before would look like a stall.
        self.phase = RankPhase.RUNNING

    def guard_again(self) -> None:
        """Leave a block in which no time counts: after the outermost all times begin anew."""
        now = time.monotonic()
        # The times move before the counter drops: in the reverse order the monitor process might
        # see the block's length as a stall and kill this process.
        if self.unguarded == 1:
            self.automatic = now
            self.manual = self.manual and now
            self.interrupted = self.interrupted and now
        self.unguarded = max(self.unguarded - 1, 0)

    @property
    def stalled_seconds(self) -> float:
        """How long the worker has made no progress, by the clock that is further behind;
        0 outside of the function.
        """
        if self.phase != RankPhase.RUNNING or self.unguarded:
            return 0.0
        times = [stamp for stamp in (self.automatic, self.manual) if stamp]
        return time.monotonic() - min(times) if times else 0.0

    @property
    def ending_seconds(self) -> float:
        """Seconds since the function was interrupted, until this worker reaches the barrier."""
        if (
            self.phase not in {RankPhase.RUNNING, RankPhase.ENDING}
            or not self.interrupted
            or self.unguarded
        ):
            return 0.0
        return time.monotonic() - self.interrupted


class ProgressStamper:
    """A thread that finds out, now and then, whether the main thread executes Python code.

    It asks Python to make a call of C in the main thread, between two instructions of the program:
    ``sem_post``, which returns 0 as Python wants it. A main thread that is inside one call of C,
    such as a collective or a sleep, makes none.
    """

    def __init__(self, progress: SharedProgress, interval: float) -> None:
        self._progress = progress
        self._interval = interval
        self._semaphore = ctypes.create_string_buffer(_SEMAPHORE_SIZE)
        _leaked_semaphores.append(self._semaphore)
        _libc.sem_init(self._semaphore, 0, 0)
        self._ended = threading.Event()
        patience = time_limits.RESOURCE_SHORTAGE_TIMEOUT_SECONDS
        self._thread = start_daemon(self._run, "firstfault-progress", patience)

    def _run(self) -> None:
        is_asked = False
        while not self._ended.wait(self._interval):
            # The main thread has run bytecode since the request. The stamp is up to one interval
            # late, so a stall is measured as that much shorter.
            if is_asked and _libc.sem_trywait(self._semaphore) == 0:
                self._progress.automatic = time.monotonic()
                is_asked = False
            # At most one open request: CPython's queue of pending calls is short. Not 0: the queue
            # is full, so try again after the interval.
            if not is_asked:
                is_asked = _add_pending_call(_libc.sem_post, self._semaphore) == 0

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()


def find_position(thread: int, begun: int | None = None) -> Position | None:
    """Return a thread's position, with the number of collectives that it has begun;
    None if the thread has ended.
    """
    # documented, for debuggers and the like
    frame: FrameType | None = get_current_frames().get(thread)
    if frame is None:
        return None
    waits, called, innermost = False, "", frame
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        waits = (
            waits or module == _COLLECTIVES_MODULE or module.startswith(_COLLECTIVES_MODULE + ".")
        )
        if not any(part in frame.f_code.co_filename for part in _LIBRARY_FOLDERS):
            return Position(_line(frame, called), waits, begun)
        called = f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return Position(_line(innermost, ""), waits, begun)


def _line(frame: Any, called: str) -> str:
    code = frame.f_code
    text = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
    return (f"{text}, which calls {called}" if called else text)[:_MAX_LINE_CHARACTERS]
