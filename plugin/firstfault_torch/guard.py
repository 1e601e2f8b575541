"""The one place that catches everything: around our own code, where hiding the user's error would be worse."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

__all__ = ["WORKER_SIGNALS", "bounded", "caught", "guarded", "logger", "undisturbed"]

logger = logging.getLogger("firstfault_torch")

T = TypeVar("T")
WORKER_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""By which an agent, or the kernel when the agent has died, stops workers."""
_HURRIED_S = 0.3
"""Longest wait for something that is not to be waited for any more, seconds."""
_POLL_S = 0.05


@contextlib.contextmanager
def guarded(doing: str, *, through: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Turn whatever our own code raises into one warning; torch elastic goes on as it would without us.

    What is `through` passes: it is not ours (torch's SignalException, raised by a handler wherever the agent stands).
    With ``FIRSTFAULT_DEBUG`` set the warning carries the traceback.
    """
    try:
        yield
    except through:
        raise
    except BaseException as error:
        logger.warning(
            "firstfault failed while %s (%s: %s); the job goes on without it",
            doing,
            type(error).__name__,
            _text(error),
            exc_info=bool(os.environ.get("FIRSTFAULT_DEBUG")),
        )


def bounded(call: Callable[[], T], seconds: float, doing: str, give_up: threading.Event | None = None) -> T | None:
    """Return what `call` returns, None if it raised or is not done after `seconds`, or soon after `give_up` is set.

    It runs in a daemon thread, which is left behind if it does not end: no deadline can be kept otherwise when a
    ``__str__`` blocks or a storage hangs.
    """
    results: list[T] = []
    # not the thread's own end: Python takes a thread for dead once a signal's handler has raised in its join()
    done = threading.Event()

    def run() -> None:
        with guarded(doing):
            results.append(call())
        done.set()

    thread = threading.Thread(target=run, name="firstfault-record", daemon=True)
    with guarded(doing):
        deadline = time.monotonic() + max(seconds, 0)
        try:
            thread.start()
            while give_up is not None and not give_up.is_set() and time.monotonic() < deadline:
                if done.wait(_POLL_S):
                    break
            hurried = give_up is not None and give_up.is_set()
            left = max(deadline - time.monotonic(), 0)
            done.wait(min(left, _HURRIED_S) if hurried else left)
        except BaseException:
            # a signal's handler raised here; what is almost done is not to be lost for that
            done.wait(max(min(deadline - time.monotonic(), _HURRIED_S), 0))
            raise
    return results[0] if results else None


@contextlib.contextmanager
def undisturbed(numbers: Collection[signal.Signals], *, handled_only: bool = False) -> Iterator[None]:
    """Ignore signals until the block is left; outside of the main thread, which alone has handlers, change nothing.

    Args:
        numbers: the signals.
        handled_only: let one that ends the process without a handler end it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in numbers}
    # None: not Python's, and Python cannot put it back
    ignored = {
        number: handler
        for number, handler in handlers.items()
        if callable(handler) or (handler is not None and not handled_only)
    }
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in ignored.items():
            signal.signal(number, handler)


def caught(call: Callable[[], T], kind: type[BaseException] = BaseException) -> tuple[T | None, BaseException | None]:
    """Run code that is not ours, such as a plug-in or an exception's ``__str__``.

    Args:
        call: the code.
        kind: what is caught; anything else passes.

    Returns:
        What it returned and None, or None and what it raised.
    """
    try:
        return call(), None
    except kind as error:
        return None, error


def _text(error: BaseException) -> str:
    text, _ = caught(lambda: str(error))
    return "<no text>" if text is None else text
