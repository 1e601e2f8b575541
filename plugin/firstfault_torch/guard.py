"""Guards our own code: an error in firstfault must not hide the user's error."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

from firstfault.utils.loggers import logger_of
from firstfault_torch.time_limits import (
    BACKGROUND_RESULT_TIMEOUT_SECONDS,
    SHUTDOWN_CALL_TIMEOUT_SECONDS,
    SHUTDOWN_POLL_SECONDS,
)

logger = logger_of("firstfault_torch")

T = TypeVar("T")
WORKER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
"""Signals whose handlers raise in a worker: an agent, or the kernel after the agent's death, stops it by the first two,
and torch's data loader raises when one of its processes has died.
"""
_NO_THREAD = "can't start new thread"
_AT_THE_END = "at interpreter shutdown"
_refused_threads = threading.Event()
"""Set when this process has logged that the system allows no further thread: each further one would be refused, too."""


@contextlib.contextmanager
def guarded(doing: str, *, through: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Turn an exception of our own code into one warning; torch elastic continues as without firstfault.

    The warning tells what was `doing`; with ``FIRSTFAULT_DEBUG`` set it contains the traceback. Exceptions that are not
    ours, such as torch's SignalException, pass `through`.
    """
    try:
        yield
    except through:
        raise
    except BaseException as error:
        text, hidden = caught(lambda error=error: str(error))  # type: ignore[misc]
        text = "<no text>" if hidden is not None else text
        if isinstance(error, RuntimeError) and _AT_THE_END in str(text):
            return  # from Python 3.12 on no thread can be started then
        if isinstance(error, RuntimeError) and text == _NO_THREAD:
            if not _refused_threads.is_set():
                _refused_threads.set()
                logger.warning("doing without what needs a thread: %s (first while %s)", text, doing)
            return
        logger.warning(
            "failed while %s (%s: %s); the job continues without it",
            doing,
            type(error).__name__,
            text,
            exc_info=bool(os.environ.get("FIRSTFAULT_DEBUG")),
        )


def bounded(  # noqa: PLR0913 - keywords
    call: Callable[[], T],
    seconds: float,
    doing: str,
    give_up: threading.Event | None = None,
    *,
    hurried_seconds: float = SHUTDOWN_CALL_TIMEOUT_SECONDS,
    local: bool = False,
) -> T | None:
    """Return what `call` returns; None if it raises, or does not end within `seconds` or soon after `give_up` is set.

    It runs in a daemon thread, which is left running if `call` blocks, as a ``__str__`` or a storage may. Once
    `give_up` is set, the wait ends within `hurried_seconds`. A `local` call needs this process and its disk only: if
    the system allows no further thread, it runs in this one.
    """
    results: list[T] = []
    # not join(): after a signal handler raised in it, Python takes the thread for dead
    done = threading.Event()
    with guarded(doing):
        deadline = time.monotonic() + max(seconds, 0)
        try:
            _start(lambda: results.append(call()), done, doing, local=local)
            while give_up is not None and not give_up.is_set() and time.monotonic() < deadline:
                if done.wait(SHUTDOWN_POLL_SECONDS):
                    break
            hurried = give_up is not None and give_up.is_set()
            left = max(deadline - time.monotonic(), 0)
            done.wait(min(left, hurried_seconds) if hurried else left)
        except BaseException:
            # a signal handler raised here: wait a moment more for a call that is almost done
            done.wait(max(min(deadline - time.monotonic(), SHUTDOWN_CALL_TIMEOUT_SECONDS), 0))
            raise
    return results[0] if results else None


def begun(call: Callable[[], object], doing: str) -> threading.Event:
    """Begin a call in a daemon thread; return an event that is set when it has ended or could not begin."""
    ended = threading.Event()
    with guarded(doing):
        _start(call, ended, doing)
        return ended
    ended.set()
    return ended


def _start(call: Callable[[], object], ended: threading.Event, doing: str, *, local: bool = False) -> None:
    """Start a daemon thread that makes a call and then sets `ended`; without a thread make a `local` call here."""

    def run() -> None:
        with guarded(doing):
            call()
        ended.set()

    try:
        threading.Thread(target=run, name="firstfault-call", daemon=True).start()
    except RuntimeError as refused:
        if not local:
            raise
        logger.info("%s while %s; doing that without a limit of time", refused, doing)
        run()


class NonBlocking(Generic[T]):
    """A function that is called again and again in a loop, and must not block it.

    Each call runs in a daemon thread, at most one at a time. While one takes long, the loop gets the default at once;
    its late answer, or its exception, comes with the next call after it. The loop waits `seconds` for an answer of
    `call`, which asks another machine that may be frozen.
    """

    def __init__(self, call: Callable[[], T], default: T, seconds: float = BACKGROUND_RESULT_TIMEOUT_SECONDS) -> None:
        self._call = call
        self._default = default
        self._seconds = seconds
        self._answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._is_asked = False

    def __call__(self) -> T:
        """Return the answer, or the default.

        Raises:
            Exception: whatever `call` raised.
        """
        seconds = 0.0
        if not self._is_asked:
            try:
                threading.Thread(target=self._ask, name="firstfault-question", daemon=True).start()
            except RuntimeError:
                self._ask()  # without a thread it blocks the loop
            self._is_asked = True
            seconds = self._seconds
        try:
            answer, error = self._answers.get(timeout=seconds)
        except queue.Empty:
            return self._default
        self._is_asked = False
        if error is not None:
            raise error
        return cast("T", answer)

    def _ask(self) -> None:
        self._answers.put(caught(self._call, Exception))


@contextlib.contextmanager
def undisturbed(*, handled_only: bool = False) -> Iterator[None]:
    """Ignore `WORKER_SIGNALS` until the block ends; do nothing outside of the main thread, which alone sets handlers.

    With `handled_only`, a signal that has no handler still ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in WORKER_SIGNALS}
    # None: the handler is not Python's, and Python cannot restore it
    ignored = {
        number: handler
        for number, handler in handlers.items()
        if callable(handler) or (handler is not None and not handled_only and number != signal.SIGCHLD)
    }
    for number in ignored:
        # SIGCHLD keeps a handler: if it were ignored, the kernel would reap children that others wait for
        signal.signal(number, (lambda *_: None) if number == signal.SIGCHLD else signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in ignored.items():
            signal.signal(number, handler)


def caught(call: Callable[[], T], kind: type[BaseException] = BaseException) -> tuple[T | None, BaseException | None]:
    """Call third-party code, such as a plug-in; return its result and None, or None and its exception of this kind."""
    try:
        return call(), None
    except kind as error:
        return None, error
