"""A training process's end of the FIFO for deadlines."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from pathlib import PurePath
from types import FrameType

from firstfault_torch.descriptors import KeptDescriptor
from firstfault_torch.guard import is_shortage, logger
from firstfault_torch.time_limits import DEADLINE_SEND_TIMEOUT_SECONDS
from firstfault_torch.watchdog.timers import Timer, build_line

_HEARTBEAT_NUMBER = "heartbeat"
_UNSENT_PING_SHARE = 0.1
"""Share of the heartbeat's timeout, at most 1 s, within which a second ping sends nothing."""


class DeadlineClient:
    """This process's end of the FIFO; `timeout`: of the heartbeat, in seconds,
    0 if there is none.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self.timeout = timeout
        self.owner = os.getpid()
        self.path = path
        self._spared = min(timeout * _UNSENT_PING_SHARE, 1.0)
        # a signal handler may use the watchdog, too
        self._lock = threading.RLock()
        self._fifo: KeptDescriptor | None = None
        self.begun = 0
        """How many blocks have begun; the last one's number."""
        self._open: dict[str, int] = {}
        """Open blocks, each with its thread."""
        self._names: dict[str, str] = {}
        self._heart: int | None = None
        """The thread that pings, or None while the heartbeat is paused."""
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
                self._put(Timer(self.owner, _HEARTBEAT_NUMBER, "", None, heartbeat=True))
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
            self._since = format_line(frame)
            self._beat(now)
            self._send()

    def pause(self) -> None:
        """End the heartbeat until the next ping."""
        with self._lock:
            if self._heart is not None:
                self._heart = None
                self._put(Timer(self.owner, _HEARTBEAT_NUMBER, "", None, heartbeat=True))
                self._send()

    def release(self, thread: int | None = None, since: int = 0) -> None:
        """End the heartbeat, and the blocks of a thread (by default, of all threads) except the
        first `since` blocks of the process.
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
            Timer(
                self.owner,
                _HEARTBEAT_NUMBER,
                "",
                deadline,
                self.timeout,
                self._since,
                heartbeat=True,
            )
        )

    def _put(self, timer: Timer) -> None:
        # Only the newest state of a timer is sent. Removed first: a dict keeps the place of a key
        # that is set again, and lines are sent in the order of the calls.
        self._unsent.pop(timer.number, None)
        self._unsent[timer.number] = build_line(timer)

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


def format_line(frame: FrameType) -> str:
    """Return the line of a frame: "train.py:50"."""
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"
