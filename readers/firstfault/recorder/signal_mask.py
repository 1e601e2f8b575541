"""The signals that end a pod and must not end its recorder, which goes with its agent."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["held_back", "ignore"]

_ENDURED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold these signals back in this thread, and in the processes it starts until those `ignore` them.

    Without it a recorder that was just started would die of a Ctrl-C before it has said that it ignores one.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDURED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Ignore these signals from now on, also those that were held back."""
    for number in _ENDURED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDURED)
