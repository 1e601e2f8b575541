"""Block and ignore the signals that terminate a pod: the recorder ends with its agent instead."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Block the signals in this thread, and in the processes it starts until they call `ignore`.

    Otherwise a Ctrl-C could kill a new recorder before it ignores SIGINT.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Ignore the signals from now on, and unblock them."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
