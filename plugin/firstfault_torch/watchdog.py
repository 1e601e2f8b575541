"""Deadlines for the training: a worker that doesn't keep one is killed by its
agent and reported as hung.

``Elastic(watchdog=Watchdog(heartbeat_timeout=300))`` or ``Options(watchdog=Watchdog())`` turns the
watchdog on. Then::

    from firstfault_torch import watchdog

    for batch in loader:
        watchdog.ping()  # every 300 s at least
        with watchdog.expires(after=30, scope="train step"):
            step(batch)

In a process without a watchdog these functions do nothing. They never raise because of the watchdog
itself: if the agent can't be reached, there is one warning and no deadline.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType, TracebackType
from typing import Any

from typing_extensions import Self

from firstfault.errors import UsageError
from firstfault.utils.text import parse_json
from firstfault_torch.descriptors import KeptDescriptor
from firstfault_torch.guard import is_shortage, logger
from firstfault_torch.time_limits import DEADLINE_SEND_TIMEOUT_SECONDS

__all__ = ["expires", "pause", "ping"]

TIMERS_VARIABLE = "FIRSTFAULT_TIMERS"
"""Path of the FIFO; the agent sets it in its workers if the watchdog is on."""
HEARTBEAT_VARIABLE = "FIRSTFAULT_HEARTBEAT"
"""Longest time between two pings, seconds; empty: pings set no deadline."""
TORCH_FILE_VARIABLE = "TORCHELASTIC_TIMER_FILE"
"""The same path, for torch's FileTimerClient. In the agent's own environment it names
the path for the FIFO.
"""
TORCH_ENABLED_VARIABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
"""With the value 1 torch's agent starts torch's FileTimerServer, which kills the agent too."""
MAX_SCOPE = 200
"""Characters of a name. A line fits into one write to a FIFO,
which is never mixed with another process's.
"""
_HEART = "heartbeat"
_SPARED = 0.1
"""Share of the heartbeat's timeout, at most 1 s, within which a second ping sends nothing."""


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Turns the watchdog on: workers may set deadlines (`firstfault_torch.watchdog`),
    and are killed if they miss one.

    Raises:
        firstfault.errors.UsageError: `heartbeat_timeout` isn't a number of seconds above 0.
    """

    heartbeat_timeout: float | None = None
    """Longest time between two calls of ``watchdog.ping()``, seconds. None: pings set no deadline.
    """

    def __post_init__(self) -> None:
        """Check the field."""
        seconds = self.heartbeat_timeout
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 < seconds < math.inf):
            raise UsageError(
                "Watchdog.heartbeat_timeout must be a number of seconds above 0, or None for no"
                f" heartbeat, not {seconds!r}"
            )


class _Deadline(contextlib.ContextDecorator):
    """A block with a deadline; see `expires`."""

    def __init__(self, after: float, scope: str, since: str) -> None:
        self._after, self._scope, self._since = after, scope, since
        self._begun: list[tuple[_Client, str]] = []

    def _recreate_cm(self) -> Self:
        return type(self)(self._after, self._scope, self._since)

    def __enter__(self) -> None:
        client = _client()
        if client is not None:
            # A list: one decorated or reused object may be entered again before it is left.
            self._begun.append((client, client.begin(self._after, self._scope, self._since)))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # a fork in the block: the deadline stays with the process that began it
        if self._begun:
            client, number = self._begun.pop()
            client.end(number)


def expires(after: float, scope: str = "") -> _Deadline:
    """Return a context manager that limits its block to `after` seconds;
    it may also decorate a function.

    Blocks may be nested. An exception that leaves the block ends it. Inside a block the heartbeat
    of the same thread rests: the block's own deadline counts.

    Args:
        after: seconds, more than 0.
        scope: the name of the block in reports; empty: file and line where it begins.

    Raises:
        firstfault.errors.UsageError: `after` isn't a number of seconds above 0, or `scope` isn't a
            text.
    """
    if (
        isinstance(after, bool)
        or not isinstance(after, int | float)
        or not 0 < after < sys.float_info.max
    ):
        raise UsageError(
            f"watchdog.expires(after=...) must be a number of seconds above 0, not {after!r}"
        )
    if not isinstance(scope, str):
        raise UsageError(f"watchdog.expires(scope=...) must be a text, not {scope!r}")
    # documented, as in logging
    since = _format_line(sys._getframe(1)) if _client() is not None else ""  # noqa: SLF001
    return _Deadline(float(after), scope[:MAX_SCOPE] or since, since)


def ping() -> None:
    """Show that the loop makes progress: the next ping has to come within
    ``Watchdog.heartbeat_timeout``.

    The first ping starts the heartbeat; it ends with the task function, and at `pause`. Call it as
    often as you like: most calls send nothing.
    """
    client = _client()
    if client is not None and client.timeout:
        client.ping(sys._getframe(1))  # noqa: SLF001 - as above


def pause() -> contextlib.AbstractContextManager[None]:
    """Let the heartbeat rest until the next ping: after the loop,
    or before a step of unknown length.

    As a block, ``with watchdog.pause():``, it also lets the agents know, with or without a
    watchdog, that the ranks may make no progress for a while: no job is ended for a hang.
    """
    client = _client()
    if client is not None:
        client.pause()
    return _pausing(_format_line(sys._getframe(1)))  # noqa: SLF001 - as above


@contextlib.contextmanager
def _pausing(since: str) -> Iterator[None]:
    _pauses.append(f"watchdog.pause() since {since}")
    try:
        yield
    finally:
        _pauses.pop()


def current_block() -> str:
    """Return the block of the watchdog in which this process is, or pauses; empty: none."""
    client = _current if _current is not None and _current.owner == os.getpid() else None
    return next(iter([*_pauses[-1:], *(client.scopes() if client is not None else ())]), "")


def release_all() -> None:
    """End all deadlines of this process: its task function has ended."""
    client = _client()
    if client is not None:
        client.release()


def begun() -> int:
    """Return how many blocks have begun in this process."""
    client = _client()
    return client.begun if client is not None else 0


def release_since(number: int) -> None:
    """End the heartbeat, and this thread's blocks but the first `number`:
    an exception may have hindered their end.
    """
    client = _client()
    if client is not None:
        client.release(threading.get_ident(), number)


class _Client:
    """This process's end of the FIFO; `timeout`: of the heartbeat, in seconds,
    0 if there is none.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self.timeout = timeout
        self.owner = os.getpid()
        self.path = path
        self._spared = min(timeout * _SPARED, 1.0)
        # a signal handler may use the watchdog, too
        self._lock = threading.RLock()
        self._fifo: KeptDescriptor | None = None
        self.begun = 0
        """How many blocks have begun; the last one's number."""
        self._open: dict[str, int] = {}
        """Open blocks, each with its thread."""
        self._names: dict[str, str] = {}
        self._heart: int | None = None
        """The thread that pings; None: the heartbeat rests."""
        self._pinged = -math.inf
        """When a ping was last sent."""
        self._since = ""
        self._unsent: dict[str, bytes] = {}
        self._is_lost = False
        self._is_blocked = False

    def begin(self, after: float, scope: str, since: str) -> str:
        """Begin a block; return its number."""
        thread = threading.get_ident()
        with self._lock:
            self.begun += 1
            number = str(self.begun)
            # The outermost block of the thread that pings: its heartbeat rests, because the block's
            # deadline counts.
            if self._heart == thread and thread not in self._open.values():
                self._put(Timer(self.owner, _HEART, "", None, heartbeat=True))
            # Known before it is sent: if an exception from outside hits now, `release_since` still
            # ends the block.
            self._open[number], self._names[number] = thread, scope
            self._put(Timer(self.owner, number, scope, time.monotonic() + after, after, since))
            self._send()
        return number

    def scopes(self) -> list[str]:
        """Return the names of the open blocks, the last one first."""
        return [self._names.get(number, "") for number in reversed(list(self._open))]

    def end(self, number: str) -> None:
        """End a block; in a forked child of the process that began it, do nothing."""
        if os.getpid() != self.owner:
            return
        with self._lock:
            thread = self._open.get(number)
            if thread is None:
                return  # the task function has ended
            # If its beginning was never sent, the agent needn't know of its end.
            if self._unsent.pop(number, None) is None:
                self._put(Timer(self.owner, number, "", None))
            if self._heart == thread and list(self._open.values()).count(thread) == 1:
                self._beat(time.monotonic())
            self._send()
            self._names.pop(number, None)
            self._open.pop(number, None)  # last: `release` ends it if an interruption came before

    def ping(self, frame: FrameType) -> None:
        """Move the heartbeat's deadline."""
        now = time.monotonic()
        thread = threading.get_ident()
        with self._lock:
            # Only one thread has the heartbeat, the one that pinged last.
            begins = self._heart != thread
            self._heart = thread
            if thread in self._open.values() or (not begins and now - self._pinged < self._spared):
                return
            self._since = _format_line(frame)
            self._beat(now)
            self._send()

    def pause(self) -> None:
        """End the heartbeat until the next ping."""
        with self._lock:
            if self._heart is not None:
                self._heart = None
                self._put(Timer(self.owner, _HEART, "", None, heartbeat=True))
                self._send()

    def release(self, thread: int | None = None, since: int = 0) -> None:
        """End the heartbeat, and a thread's blocks but the first `since` of the process; None:
        those of all threads.
        """
        with self._lock:
            for number in [
                one for one, its in self._open.items() if thread in {None, its} and int(one) > since
            ]:
                self._put(Timer(self.owner, number, "", None))
                del self._open[number], self._names[number]
            self.pause()
            self._send()

    def _beat(self, now: float) -> None:
        # a ping within the spared time isn't sent: it must not expire early for that
        deadline = now + self.timeout + self._spared
        self._pinged = now
        self._put(
            Timer(self.owner, _HEART, "", deadline, self.timeout, self._since, heartbeat=True)
        )

    def _put(self, timer: Timer) -> None:
        # Only the newest state of a timer is sent. Removed first: a dict keeps the place of a key
        # that is set again, and lines are sent in the order of the calls.
        self._unsent.pop(timer.number, None)
        self._unsent[timer.number] = timer_line(timer)

    def _send(self) -> None:
        """Send what isn't sent yet; what an agent doesn't take in time is
        sent with the next call.
        """
        try:
            while self._unsent and not self._is_lost:
                number = next(iter(self._unsent))
                # first: a signal handler may send, too, while this one waits
                line = self._unsent.pop(number)
                try:
                    self._write(line)
                except OSError:
                    self._unsent.setdefault(number, line)
                    raise
                self._is_blocked = False
        except BlockingIOError:
            self._is_blocked = True  # the next call doesn't wait
        except OSError as error:
            # Only without a reader, or without the FIFO, is the agent gone. For want of a
            # descriptor or of memory, the next call tries again: a block's end that is never sent
            # would cost a healthy process its life.
            if is_shortage(error):
                return
            self._is_lost = True
            self._unsent.clear()
            logger.warning("the watchdog of this process is off: can't reach the agent (%s)", error)

    def _write(self, line: bytes) -> None:
        # The program may have closed it: another file may have its number by now.
        if self._fifo is None or not self._fifo.is_ours:
            # fails if no agent reads it
            self._fifo = KeptDescriptor(
                os.open(self.path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            )
        # A write of at most PIPE_BUF bytes to a FIFO is atomic: the agent gets the whole line, or
        # none (pipe(7)).
        try:
            os.write(self._fifo.number, line)
        except BlockingIOError:
            if self._is_blocked:
                raise
            poll = select.poll()
            poll.register(self._fifo.number, select.POLLOUT)
            # The FIFO is full: its agent is slow or frozen. Wait once for a short time; the
            # training must not stop for it.
            poll.poll(DEADLINE_SEND_TIMEOUT_SECONDS * 1000)
            if not self._fifo.is_ours:  # another thread closed it during the wait
                raise
            os.write(self._fifo.number, line)


_current: _Client | None = None
_pauses: list[str] = []


def _client() -> _Client | None:
    """Return this process's client; None: no watchdog is configured. A
    forked child gets its own.
    """
    global _current  # noqa: PLW0603 - one for each process
    path = os.environ.get(TIMERS_VARIABLE)
    if not path:
        return None
    # A forked child has a copy of the parent's client, possibly with its lock held by a thread that
    # doesn't exist there.
    if _current is None or _current.owner != os.getpid() or _current.path != path:
        _current = _Client(path, float(os.environ.get(HEARTBEAT_VARIABLE) or 0))
    return _current


def _format_line(frame: FrameType) -> str:
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"


# --- timers on their way from a worker to its agent: lines of JSON in a FIFO ----------------------

# The lines are those of torch's FileTimer with fields of our own, so that torch's FileTimerClient
# may write into the same FIFO. torch's deadlines are times of the wall clock, which may jump; ours
# are times of CLOCK_MONOTONIC, which all processes of a machine share.


@dataclass(frozen=True, slots=True)
class Timer:
    """One deadline of a process, or its release."""

    pid: int
    number: str
    """Identifies it within the process."""
    scope: str
    """The name that the program gave to it; empty for the heartbeat."""
    deadline: float | None
    """Seconds of CLOCK_MONOTONIC; None: it is released."""
    seconds: float = 0.0
    """From its beginning to its deadline."""
    since: str = ""
    """Where it began: "train.py:50"."""
    heartbeat: bool = False
    kills: bool = True
    """Whether the process is killed at the deadline; torch's clients may ask for a log line only.
    """


def timer_line(timer: Timer) -> bytes:
    """Return a timer as one line; torch's FileTimerServer reads it too."""
    left = timer.deadline - time.monotonic() if timer.deadline is not None else 0.0
    fields: dict[str, Any] = {
        "version": 1,
        "pid": timer.pid,
        "scope_id": timer.scope or "heartbeat",
        "expiration_time": time.time() + left if timer.deadline is not None else -1,
        "signal": int(signal.SIGKILL) if timer.deadline is not None else 0,
        "number": timer.number,
        "deadline": timer.deadline,
        "seconds": timer.seconds,
        "since": timer.since[-MAX_SCOPE:],
        "heartbeat": timer.heartbeat,
    }
    line = json.dumps(fields).encode() + b"\n"
    if len(line) > select.PIPE_BUF:  # a name of characters that JSON escapes
        line = json.dumps({**fields, "scope_id": ascii(timer.scope)[:MAX_SCOPE]}).encode() + b"\n"
    return line


def parse_line(line: bytes) -> Timer:
    """Return the timer that a client wrote; a deadline of torch's client is
    converted from the wall clock.

    Raises:
        ValueError: it isn't such a line.
    """
    try:
        found = parse_json(line)
        pid = int(found["pid"])
        scope = str(found["scope_id"])
        expires = float(found["expiration_time"])
        if "number" not in found:
            left = expires - time.time()
            deadline = time.monotonic() + left if expires >= 0 else None
            return Timer(
                pid,
                f"torch:{scope}",
                scope,
                deadline,
                max(left, 0.0),
                kills=int(found["signal"]) > 0,
            )
        deadline = None if found["deadline"] is None else float(found["deadline"])
        if deadline is not None and not math.isfinite(deadline):
            raise ValueError("its deadline is not a time")
        number = str(found["number"])
        seconds = float(found["seconds"])
        since = str(found["since"])
        heartbeat = bool(found["heartbeat"])
        return Timer(pid, number, "" if heartbeat else scope, deadline, seconds, since, heartbeat)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a timer: {line[:200]!r}") from error
