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
import math
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from typing_extensions import Self

from firstfault.errors import UsageError
from firstfault_torch.watchdog.client import DeadlineClient, format_line
from firstfault_torch.watchdog.timers import HEARTBEAT_VARIABLE, MAX_SCOPE, TIMERS_VARIABLE

__all__ = ["expires", "pause", "ping"]


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Turns the watchdog on: workers may set deadlines (`firstfault_torch.watchdog`),
    and are killed if they miss one.

    Raises:
        firstfault.errors.UsageError: `heartbeat_timeout` isn't a number of seconds above 0.
    """

    heartbeat_timeout: float | None = None
    """Longest time between two calls of ``watchdog.ping()``, seconds; None sets no deadline."""

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
        self._begun: list[tuple[DeadlineClient, str]] = []

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
        scope: the name of the block in reports; by default, the file and line where it begins.

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
    since = format_line(sys._getframe(1)) if _client() is not None else ""  # noqa: SLF001
    return _Deadline(float(after), scope[:MAX_SCOPE] or since, since)


def ping() -> None:
    """Report progress. The next ping is due within ``Watchdog.heartbeat_timeout`` seconds.

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
    return _pausing(format_line(sys._getframe(1)))  # noqa: SLF001 - as above


@contextlib.contextmanager
def _pausing(since: str) -> Iterator[None]:
    _pauses.append(f"watchdog.pause() since {since}")
    try:
        yield
    finally:
        _pauses.pop()


def current_block() -> str:
    """Return the watchdog block in which this process is or pauses, or "" if there is none."""
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


_current: DeadlineClient | None = None
_pauses: list[str] = []


def _client() -> DeadlineClient | None:
    """Return this process's client, or None without a watchdog. A forked child gets its own."""
    global _current  # noqa: PLW0603 - one for each process
    path = os.environ.get(TIMERS_VARIABLE)
    if not path:
        return None
    # A forked child has a copy of the parent's client, possibly with its lock held by a thread that
    # doesn't exist there.
    if _current is None or _current.owner != os.getpid() or _current.path != path:
        _current = DeadlineClient(path, float(os.environ.get(HEARTBEAT_VARIABLE) or 0))
    return _current
